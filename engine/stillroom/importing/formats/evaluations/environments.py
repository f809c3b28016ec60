"""Reads rollouts of environments and trainers: verifiers, rnow, NeMo Gym and Stillroom.

verifiers saves `results.jsonl`, and since 0.4 `traces.jsonl`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.checks import as_number, decode_row
from stillroom.data.layouts.detect import RULES, RolloutLayout, layout_of
from stillroom.data.layouts.foreign import count_or_zero, numbers_by_name
from stillroom.data.layouts.rnow import (
    STORED_FIELD,
    failed_before_its_conversation,
    is_incomplete,
    is_stored_by_rnow,
)
from stillroom.errors import FailureClass
from stillroom.importing.formats.datasets.conversations import reward_scores
from stillroom.importing.formats.sessions.message_tree import NO_REPLY
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    detect_by_row,
    head_rows,
    make_row_reader,
    read_document,
    read_field_rows,
    read_json_rows,
    source_folder,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    first_text,
    iso_time,
    non_negative_number,
    short_answer,
    without_empty,
)
from stillroom.importing.payloads.messages import MessageReader, tool_schemas
from stillroom.importing.records import (
    INCOMPLETE,
    Location,
    LoggedConversation,
    SourceRow,
    TraceFormat,
)
from stillroom.types import RowReason, StopReason, Usage

_METADATA = "metadata.json"
_RESULT_FIELDS = frozenset(
    (
        "answer", "completion", "error", "example_id", "generation_ms", "info", "is_completed",
        "is_truncated", "metrics", "prompt", "reward", "scoring_ms", "stop_condition", "task",
        "timing", "token_usage", "tool_defs", "total_ms", "trajectory", "version_info", "_env_id",
    )
)  # fmt: skip
"""The fields of a result that are not its environment's metrics."""
_RUN_SETTINGS = frozenset(
    (
        "artifact_max_bytes", "artifacts", "idx", "network_allow", "network_block", "prompt",
        "resources", "skills", "system_prompt", "timeout",
    )
)  # fmt: skip
"""The fields of a task's data that configure how the task is run."""


def read_results(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the rollouts of results files; `metadata.json` next to a file names the model."""
    for path in (path for path in paths if path.name != _METADATA):
        model = first_text(read_document(source_folder(path) / _METADATA), "model")
        yield from convert_rows(
            read_json_rows(path), lambda row, model=model: [_result(row, model)]
        )


def _result(row: JsonRow, model: str | None) -> LoggedConversation:
    """Returns the conversation of a verifiers result."""
    data, reader = row.data, MessageReader()
    prompt = _turns(data.get("prompt"), "user", reader)
    completion = _turns(data.get("completion"), "assistant", reader)
    if not any(message["role"] == "assistant" for message in completion):
        raise UnreadableRowError(NO_REPLY, str(data.get("error") or ""))
    metrics = {key: value for key, value in data.items() if key not in _RESULT_FIELDS}
    reward, milliseconds = as_number(data.get("reward")), data.get("total_ms")
    tokens, error = as_row(data.get("token_usage")), data.get("error")
    timing = as_row(data.get("timing"))
    milliseconds = non_negative_number(timing.get("total_ms", milliseconds))
    return LoggedConversation(
        location=row.location,
        messages=list(_fill_in_call_ids([*prompt, *completion])),
        is_call=False,
        tools=tool_schemas(data.get("tool_defs")),
        model=model,
        usage=_usage([tokens]) if tokens else None,
        duration_s=None if milliseconds is None else milliseconds / 1000,
        finish_reason="length" if data.get("is_truncated") is True else None,
        error=msgspec.json.encode(error).decode() if error else None,
        scores=({} if reward is None else {"reward": reward})
        | numbers_by_name(metrics)
        | numbers_by_name(data.get("metrics")),
        dropped=tuple(reader.dropped),
        metadata=without_empty(
            example_id=data.get("example_id"),
            task=data.get("task"),
            answer=data.get("answer"),
            expected_answer=short_answer(data.get("answer")),
            info=data.get("info"),
        ),
    )


def _turns(value: Any, role: str, reader: MessageReader) -> list[Row]:
    """Converts messages; the string of a text environment becomes one message with this role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return reader.turns([_parse_calls(as_row(message)) for message in as_list(value)])


def _parse_calls(message: Row) -> Row:
    """Parses the tool calls of a message, which some versions write as JSON text."""
    calls = [
        decode_row(call.encode("utf-8", "replace")) if isinstance(call, str) else call
        for call in as_list(message.get("tool_calls"))
    ]
    return message | {"tool_calls": calls}


def _fill_in_call_ids(messages: list[Row]) -> Iterator[Row]:
    """Yields the messages, with missing call ids of tool results filled in by their order.

    Some versions of verifiers omit these ids.
    """
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            open_calls = [call["id"] for call in message.get("tool_calls", ()) if "id" in call]
        elif message["role"] == "tool" and open_calls:
            yield {"tool_call_id": open_calls.pop(0)} | message
            continue
        yield message


def _usage(all_counts: Iterable[Mapping[str, Any]]) -> Usage:
    """Returns the sum of token counts; the source counts cached prompt tokens separately."""
    total = Usage()
    for counts in all_counts:
        numbers = {name: int(non_negative_number(value) or 0) for name, value in counts.items()}
        prompt = numbers.get("prompt_tokens", 0) + numbers.get("cached_input_tokens", 0)
        total += Usage(
            prompt_tokens=numbers.get("input_tokens", 0) or prompt,
            completion_tokens=numbers.get("completion_tokens", 0)
            or numbers.get("output_tokens", 0),
        )
    return total


def _episode(row: JsonRow) -> Iterator[SourceRow]:
    """Yields the branches of each agent's trace in an episode.

    Raises UnreadableRowError if no branch has a reply.
    """
    traces = [as_row(trace) for trace in as_list(row.data.get("traces"))]
    branches = [branch for trace in traces for branch in _branches(row, trace)]
    if not branches:
        errors = [as_row(error) for error in as_list(row.data.get("errors"))]
        raise UnreadableRowError(NO_REPLY, str(errors[-1].get("message", "")) if errors else "")
    yield from branches


def _branches(row: JsonRow, trace: Row) -> Iterator[LoggedConversation]:
    """Yields the conversation of each leaf of a trace; shared turns are trained on in the first."""
    nodes = [as_row(node) for node in as_list(trace.get("nodes"))]
    calls = [as_row(call) for call in as_list(trace.get("calls"))]
    parents = {_parent(node, index) for index, node in enumerate(nodes)}
    seen: set[int] = set()
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = _path(nodes, leaf)
        new_nodes = {*path} - seen
        new_calls = [c for c in calls if isinstance(c.get("node"), int) and c["node"] in new_nodes]
        if not any(nodes[index].get("sampled") is True for index in new_nodes):
            continue
        is_first = not seen
        # A turn that an earlier branch has is context in this one.
        branch = [nodes[i] | ({"sampled": False} if i in seen else {}) for i in path]
        seen.update(path)
        yield _branch(row, trace, branch, new_calls, leaf, is_first)


def _parent(node: Row, index: int) -> int | None:
    """Returns the index of a node's parent; None for a root, or if the parent is not earlier."""
    parent = node.get("parent")
    if not isinstance(parent, int) or isinstance(parent, bool):
        return None
    return parent if 0 <= parent < index else None


def _path(nodes: Sequence[Row], leaf: int) -> list[int]:
    """Returns the indices of the nodes from the root to a leaf."""
    path, index = list[int](), leaf
    while True:
        path.append(index)
        parent = _parent(nodes[index], index)
        if parent is None:
            return path[::-1]
        index = parent


def _branch(
    row: JsonRow, trace: Row, nodes: list[Row], calls: list[Row], leaf: int, is_first: bool
) -> LoggedConversation:
    """Returns the conversation along a branch; `nodes` and `calls` are those of the branch."""
    reader, messages = MessageReader(), list[Row]()
    for node in nodes:
        for message in reader.turn(_parse_calls(as_row(node.get("message")))):
            is_context = message["role"] == "assistant" and node.get("sampled") is not True
            messages.append(message | {"weight": 0} if is_context else message)
    trace_id = first_text(trace, "id")
    agent, timing = as_row(trace.get("agent")), as_row(trace.get("timing"))
    failures = [as_row(error).get("message") for error in as_list(trace.get("errors"))]
    last_call = calls[-1] if calls else Row()
    model = first_text(last_call, "model") or first_text(as_row(agent.get("config")), "model")
    task = as_row(as_row(trace.get("task") or row.data.get("task")).get("data"))
    location, is_only_trace = row.location, len(as_list(row.data.get("traces"))) == 1
    if not is_only_trace or not is_first:
        location = Location(location.path, location.line, f"{trace_id}/{leaf}")
    return LoggedConversation(
        location=location,
        messages=messages,
        is_call=False,
        tools=tool_schemas(nodes[0].get("tools") or trace.get("tools")),
        group=first_text(row.data, "id"),
        id=trace_id if is_first else f"{trace_id}/{leaf}",
        parent=None if is_first else trace_id,
        model=model,
        usage=_usage(usages) if (usages := [as_row(c.get("usage")) for c in calls]) else None,
        started_at=iso_time(timing.get("start")),
        finish_reason=first_text(last_call, "finish_reason"),
        error=str(failures[-1]) if failures and trace.get("ok") is not True else None,
        scores=dict(_trace_scores(trace)),
        dropped=tuple(reader.dropped),
        metadata=without_empty(
            environment=as_row(row.data.get("env")).get("id"),
            agent=agent.get("name"),
            task={key: value for key, value in task.items() if key not in _RUN_SETTINGS},
            # With several agents, each may have a part of the task.
            expected_answer=short_answer(task.get("answer")) if is_only_trace else None,
            info=trace.get("info"),
        ),
    )


def _trace_scores(trace: Row) -> Iterator[tuple[str, float]]:
    """Yields each reward before weighting, their weighted sum as `reward`, and the metrics."""
    total, is_scored = 0.0, False
    for name, value in as_row(trace.get("rewards")).items():
        score = as_number(as_row(value).get("score"))
        if score is not None:
            weight = as_number(as_row(value).get("weight"))
            total, is_scored = total + score * (1.0 if weight is None else weight), True
            yield name, score
    if is_scored:
        yield "reward", total
    yield from numbers_by_name(trace.get("metrics")).items()


def _is_results_file(path: Path, head: bytes) -> bool:
    if path.name == _METADATA:
        return any(
            {"env_id", "model", "rollouts_per_example"} <= row.keys() for row in head_rows(head)
        )
    return any(
        {"prompt", "completion", "reward"} <= row.keys()
        and bool({"example_id", "task"} & row.keys())
        for row in head_rows(head)
    )


RESULTS = TraceFormat(
    name="verifiers",
    title="verifiers results (results.jsonl)",
    is_recognised=_is_results_file,
    read=read_results,
)
EPISODES = TraceFormat(
    name="verifiers_traces",
    title="verifiers traces (traces.jsonl, since 0.4)",
    is_recognised=detect_by_row(lambda row: {"env", "task", "traces", "ok"} <= row.keys()),
    read=make_row_reader(_episode),
)


_STOP_REASONS = {reason.value: reason for reason in StopReason}
_FINISH_REASONS = {StopReason.ANSWERED: "stop", StopReason.MAX_TOKENS: "length"}


def _converter_of(layout: RolloutLayout) -> Callable[[JsonRow], Iterator[SourceRow]]:
    """Returns a converter of rows in this layout."""
    rules = RULES[layout]

    def convert(row: JsonRow) -> Iterator[SourceRow]:
        if layout is RolloutLayout.RNOW and failed_before_its_conversation(row.data):
            raise UnreadableRowError(RowReason.FAILED, row.data["error"])
        if layout_of(row.data) is not layout:
            raise UnreadableRowError(f"not a rollout of {layout}", "required fields are missing")
        problem = next(rules.problems(row.data), None)
        if problem is not None:
            detail = f"{problem.field} {problem.message}; {problem.fix}"
            raise UnreadableRowError("the rollout cannot be read", detail)
        yield _conversation(row, rules.to_stillroom(row.data))

    return convert


def _read_rnow(paths: Sequence[Path]) -> Iterator[SourceRow]:
    for path in paths:
        is_stored = is_stored_by_rnow(path)
        rows = read_field_rows(path, STORED_FIELD) if is_stored else read_json_rows(path)
        yield from convert_rows(rows, _converter_of(RolloutLayout.RNOW))


def _is_rnow_file(path: Path, head: bytes) -> bool:
    return is_stored_by_rnow(path) or _detector_of(RolloutLayout.RNOW)(path, head)


def _conversation(row: JsonRow, rollout: Row) -> LoggedConversation:
    """Converts a rollout in Stillroom's format to a LoggedConversation."""
    reader, usage = MessageReader(), as_row(rollout.get("usage"))
    reward, rewards = rollout.get("reward"), numbers_by_name(rollout.get("rewards"))
    teacher = as_row(rollout.get("teacher"))
    message = as_row(rollout.get("error")).get("message")
    tokens = Usage(
        prompt_tokens=count_or_zero(usage.get("prompt_tokens")),
        completion_tokens=count_or_zero(usage.get("completion_tokens")),
    )
    messages, stop = reader.messages(rollout["messages"]), rollout["stop_reason"]
    is_unfinished = stop == StopReason.ANSWERED and is_incomplete(row.data)
    return LoggedConversation(
        location=row.location,
        messages=messages,
        is_call=False,
        tools=tool_schemas(as_list(rollout.get("tools"))),
        id=first_text(rollout, "id"),
        provider=first_text(teacher, "provider"),
        model=first_text(teacher, "model"),
        usage=None if tokens == Usage() else tokens,
        cost_usd=non_negative_number(rollout.get("cost_usd")),
        started_at=iso_time(rollout.get("started_at")),
        duration_s=non_negative_number(row.data.get("latency", rollout.get("duration_s"))),
        finish_reason=_FINISH_REASONS.get(stop),
        error=message if isinstance(message, str) else None,
        failure=FailureClass.of(rollout.get("error")),
        stop_reason=_STOP_REASONS.get(stop),
        tool_errors=rollout.get("tool_errors"),
        answered_by=tuple(_answerers(rollout)),
        scores=rewards | reward_scores(reward, rollout.get("success")),
        dropped=(*reader.dropped, *([INCOMPLETE] if is_unfinished else [])),
        metadata=as_row(rollout.get("metadata")),
    )


def _answerers(rollout: Row) -> Iterator[str]:
    """Yields the names of the models that answered, as the endpoint gave them."""
    for answerer in as_list(rollout.get("answered_by")):
        if (model := first_text(as_row(answerer), "model")) is not None:
            yield model


def _detector_of(layout: RolloutLayout) -> Callable[[Path, bytes], bool]:
    return lambda _path, head: any(layout_of(row) is layout for row in head_rows(head))


ROLLOUTS = TraceFormat(
    name="stillroom",
    title="Rollouts of Stillroom: generated, evaluated or imported",
    is_recognised=detect_by_row(lambda row: {"task_id", "messages", "stop_reason"} <= row.keys()),
    read=make_row_reader(_converter_of(RolloutLayout.STILLROOM)),
)
RNOW = TraceFormat(
    name="rnow",
    title="rnow rollouts",
    is_recognised=_is_rnow_file,
    read=_read_rnow,
)
NEMO_GYM = TraceFormat(
    name="nemo_gym",
    title="NeMo Gym rollouts",
    is_recognised=_detector_of(RolloutLayout.NEMO_GYM),
    read=make_row_reader(_converter_of(RolloutLayout.NEMO_GYM)),
)
