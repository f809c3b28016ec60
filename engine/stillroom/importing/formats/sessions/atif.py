"""Reads ATIF, Harbor's format for agent trajectories, including nested sub-agents."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stillroom import bounds
from stillroom.data.checks import as_number
from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.importing.formats.sessions.message_tree import NO_REPLY, SYNTHETIC
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    make_row_reader,
    read_document,
    source_folder,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    first_text,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.messages import MessageReader, tool_call, tool_schemas
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.types import Usage, total_usd

_ROLES = {"agent": "assistant", "user": "user", "system": "system"}
_MAX_NESTING = bounds.AGENT_LEVELS.limit


@dataclass(frozen=True, slots=True)
class _Trial:
    """The location, session id and rewards that all trajectories of a file share."""

    location: Location
    session: str | None
    rewards: dict[str, float]


def _trajectories(row: JsonRow) -> Iterator[SourceRow]:
    session = first_text(row.data, "session_id", "trajectory_id")
    trial = _Trial(row.location, session, _rewards_of_trial(row.location.path))
    yield from _with_sub_agents(row.data, trial, parent=None, numbers=())


def _with_sub_agents(
    data: Row, trial: _Trial, *, parent: str | None, numbers: tuple[int, ...]
) -> Iterator[SourceRow]:
    """Yields the conversations of a trajectory and of its sub-agents.

    `numbers` has the number of the sub-agent at each level, from 1; it is empty for the trial's
    own trajectory.
    """
    trajectory_id, location = first_text(data, "trajectory_id"), trial.location
    if numbers:
        part = trajectory_id or f"sub-agent {'.'.join(map(str, numbers))}"
        location = replace(location, part=part)
    else:
        trajectory_id = trajectory_id or trial.session
    try:
        conversation = _conversation(data, trial, location, trajectory_id, parent)
        yield conversation if numbers else replace(conversation, scores=trial.rewards)
    except UnreadableRowError as error:
        yield RefusedRow(location, error.reason, error.detail)
    sub_agents = as_list(data.get("subagent_trajectories"))
    if sub_agents and len(numbers) == _MAX_NESTING:
        yield RefusedRow(
            location, "sub-agents are nested too deeply", "move them to separate files"
        )
        return
    for number, sub_agent in enumerate(sub_agents, start=1):
        yield from _with_sub_agents(
            as_row(sub_agent), trial, parent=trajectory_id, numbers=(*numbers, number)
        )


def _conversation(
    data: Row, trial: _Trial, location: Location, trajectory_id: str | None, parent: str | None
) -> LoggedConversation:
    """Returns the conversation of one trajectory, without its sub-agents and its rewards."""
    reader, agent = MessageReader(), as_row(data.get("agent"))
    steps = [as_row(step) for step in as_list(data.get("steps"))]
    messages = [message for step in steps for message in _step_messages(step, reader)]
    replies = [step for step in steps if step.get("source") == "agent" and not _is_context(step)]
    if not replies:
        raise UnreadableRowError(NO_REPLY, "no step was written by the agent's model")
    metrics = [as_row(step.get("metrics")) for step in replies if step.get("metrics")]
    models = [first_text(step, "model_name") for step in replies]
    usages = [usage for counts in metrics if (usage := usage_of(counts)) is not None]
    return LoggedConversation(
        location=location,
        messages=messages,
        is_call=False,
        tools=tool_schemas(agent.get("tool_definitions")),
        group=trial.session,
        id=trajectory_id,
        parent=parent,
        model=next(filter(None, reversed(models)), None) or first_text(agent, "model_name"),
        usage=sum(usages, Usage()) if usages else None,
        cost_usd=total_usd(as_number(counts.get("cost_usd")) for counts in metrics)
        if metrics
        else None,
        started_at=next(filter(None, (first_text(step, "timestamp") for step in steps)), None),
        dropped=tuple(reader.dropped),
        metadata=without_empty(
            agent=agent.get("name"),
            agent_version=agent.get("version"),
            notes=data.get("notes"),
            continued_in=data.get("continued_trajectory_ref"),
        ),
    )


def _is_context(step: Row) -> bool:
    """Returns whether an agent step was not written by the model in this trajectory."""
    is_dispatched = step.get("llm_call_count") == 0
    is_copied = step.get("is_copied_context") is True
    return is_dispatched or is_copied or step.get("model_name") == SYNTHETIC


def _step_messages(step: Row, reader: MessageReader) -> Iterator[Row]:
    """Yields the message of a step, followed by the results of its calls."""
    role = _ROLES.get(str(step.get("source")))
    if role is None:
        detail = f"step {step.get('step_id')!r} is from {step.get('source')!r}"
        raise UnreadableRowError("a step has an unknown source", detail)
    message: Row = {"role": role, "content": reader.text(step.get("message"))}
    calls = [as_row(call) for call in as_list(step.get("tool_calls"))]
    if role == "assistant":
        if reasoning := first_text(step, "reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        if _is_context(step):
            message["weight"] = 0
    yield message
    call_ids = [first_text(call, "tool_call_id") for call in calls]
    for result in map(as_row, as_list(as_row(step.get("observation")).get("results"))):
        text, call_id = reader.text(result.get("content")), first_text(result, "source_call_id")
        if call_id is None and len(call_ids) == 1:
            call_id = call_ids[0]
        if call_id in call_ids:
            yield {"role": "tool", "tool_call_id": call_id, "content": text}
        elif text:  # the environment's answer to an action that is not a tool call
            yield {"role": "user", "content": text}


def _call(call: Row) -> Row:
    function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
    return tool_call({"id": call.get("tool_call_id"), "function": function})


def _rewards_of_trial(path: Path) -> dict[str, float]:
    """Returns the verifier's rewards from the `result.json` of Harbor's trial."""
    result = read_document(source_folder(path).parent / "result.json")
    return numbers_by_name(as_row(result.get("verifier_result")).get("rewards"))


def _is_recognised(path: Path, head: bytes) -> bool:
    return any(str(row.get("schema_version")).startswith("ATIF-v") for row in head_rows(head))


ATIF = TraceFormat(
    name="atif",
    title="ATIF trajectories (Harbor)",
    is_recognised=_is_recognised,
    read=make_row_reader(_trajectories),
)
