"""The four row formats (prompts, rollouts, SFT, preference pairs), their checks and readers."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.checks import (
    Problem,
    describe,
    docker_problems,
    message_problems,
    name_list_problems,
    object_problems,
    tool_schema_problems,
)
from stillroom.data.layouts.detect import layout_of, rollout_problems
from stillroom.data.layouts.nemo_gym import (
    REQUEST,
    prompt_row_problems,
    request_messages,
    request_schemas,
    row_metadata,
)
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.errors import DataError
from stillroom.files import content_hash
from stillroom.lines import Line
from stillroom.types import Message, ToolSchema, Trajectory, is_trained_turn
from stillroom.validation import nearest

_VALIDATE_HINT = "mend the line, then list every problem with `stillroom validate-dataset {path}`"


class RowFormat(StrEnum):
    """The formats of the rows that a data file can hold, one row a line."""

    PROMPTS = "prompts"
    ROLLOUTS = "rollouts"
    SFT = "sft"
    DPO = "dpo"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one prompt row: the conversation to answer, and what its rollout may use."""

    task_id: str
    messages: list[Message]
    metadata: dict[str, Any]
    tool_names: list[str] | None
    """The names of the tools that this task may use; None means every tool of the run."""
    reward_names: list[str] | None
    variables: dict[str, Any]
    tool_schemas: list[ToolSchema] | None = None
    """The schemas of the tools in `tool_names` if the row itself has them; else None."""
    docker: str | None = None
    """The image with the task's tools, or `local/NAME` for Dockerfile.NAME; None if none."""
    docker_env: dict[str, str] = {}
    dataset: int = 0
    """The index of the task's prompts file among those of the run."""


class SftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One supervised row; assistant turns of `messages` are trained unless their weight is 0."""

    messages: list[Message]
    tools: list[ToolSchema]
    metadata: dict[str, Any]


class DpoRow(msgspec.Struct, frozen=True, kw_only=True):
    """One preference pair; both answers continue the same prompt."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[ToolSchema]


def _prompt_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields everything wrong with a prompt row."""
    if "messages" in row:
        problems = list(message_problems(row["messages"]))
        yield from problems
        if not problems and row["messages"][-1]["role"] == "assistant":
            yield Problem(
                "messages",
                "ends with an assistant message, so nothing is left to answer",
                "end with the user's message; for rows with answers use dataset_type sft",
            )
    elif "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            prompt = describe(row["prompt"])
            is_list = isinstance(row["prompt"], list)
            fix = "name a list of messages `messages`" if is_list else "write the prompt's text"
            yield Problem("prompt", f"must be a text, not {prompt}", fix)
    elif REQUEST in row:
        yield from prompt_row_problems(row)
    else:
        yield Problem(
            "", "has neither 'messages' nor 'prompt'", 'write {"prompt": "…"} or {"messages": […]}'
        )
    if REQUEST not in row:
        yield from _unread_system_problems(row)
    yield from object_problems(row, "metadata")
    yield from object_problems(row, "variables")
    yield from name_list_problems(row, "tools")
    yield from name_list_problems(row, "rewards")
    yield from docker_problems(row)


def _unread_system_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem for a system message that no conversation would have."""
    for field in ("system", "system_prompt"):
        if isinstance(row.get(field), str):
            yield Problem(
                field,
                "is not read, and no conversation would have it",
                'write {"messages": [{"role": "system", …}, {"role": "user", …}]}, or give the '
                "same system message for all rows as `system` of generate_rollouts",
            )


_PROMPT_KEYS = (
    "messages", "prompt", "metadata", "variables", "tools", "rewards", "docker", "docker_env", "id",
)  # fmt: skip
"""What a prompt row may have. Of these `id` is read by nobody, but tells equal rows apart."""


def unread_key_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem for each key of a prompt row that nothing reads; a whole file has the same.

    A run does not refuse them, since rows that it began with must stay as they are.
    """
    if REQUEST in row:
        return
    unread_system = {problem.field: problem for problem in _unread_system_problems(row)}
    for key in row.keys() - set(_PROMPT_KEYS):
        put = f"put it into metadata: {{{key!r}: …}}, where rewards and tools see it, or remove it"
        similar = nearest(key, _PROMPT_KEYS)
        problem = Problem(key, f"is no key of a prompt row and is not read{similar}", put)
        yield unread_system.get(key, problem)


def _sft_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields everything wrong with a supervised row."""
    problems = list(message_problems(row.get("messages")))
    yield from problems
    if not problems and not any(message["role"] == "assistant" for message in row["messages"]):
        yield Problem("messages", "holds no assistant message to train on", "add the answer")
    elif not problems and not _has_trained_turn(row["messages"]):
        fix = "give the turns to train weight 1, or drop the row"
        yield Problem("messages", "holds no assistant message whose weight is not 0", fix)
    yield from tool_schema_problems(row.get("tools"))
    yield from object_problems(row, "metadata")


def _has_trained_turn(messages: list[Message]) -> bool:
    return any(m["role"] == "assistant" and is_trained_turn(m) for m in messages)


def _dpo_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields everything wrong with a preference row."""
    for field in ("prompt", "chosen", "rejected"):
        problems = list(message_problems(row.get(field), field))
        # An answer may hold a tool's reply to a call in the prompt, which the check does not see.
        yield from (p for p in problems if not p.field.endswith("tool_call_id"))
        if problems or field == "prompt":
            continue
        if row[field][0]["role"] != "assistant":
            yield Problem(field, "must begin with an assistant message", "begin with the answer")
        elif not _has_trained_turn(row[field]):
            yield Problem(field, "holds no message whose weight is not 0", "drop the row")
    if row.get("chosen") is not None and row.get("chosen") == row.get("rejected"):
        yield Problem("rejected", "is the same as chosen", "drop the row: it teaches nothing")
    yield from tool_schema_problems(row.get("tools"))
    yield from object_problems(row, "metadata")


CHECKS = {
    RowFormat.PROMPTS: _prompt_problems,
    RowFormat.ROLLOUTS: rollout_problems,
    RowFormat.SFT: _sft_problems,
    RowFormat.DPO: _dpo_problems,
}
"""The check of each format, which yields everything wrong with a row."""


def detect_format(row: dict[str, Any]) -> RowFormat | None:
    """Returns the format that a row is written in, or None if it looks like none of them."""
    if "chosen" in row or "rejected" in row:
        return RowFormat.DPO
    if layout_of(row) is not None:
        return RowFormat.ROLLOUTS
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        last = cast("list[Any]", messages)[-1]
        is_answered = isinstance(last, dict) and last.get("role") == "assistant"
        return RowFormat.SFT if is_answered else RowFormat.PROMPTS
    return RowFormat.PROMPTS if "prompt" in row or REQUEST in row else None


def task_from_row(row: dict[str, Any]) -> Task:
    """Returns the task of a prompt row that has no problems.

    The id is a hash of everything that shapes the answer, so the same row always has the same id.
    """
    if REQUEST in row and "messages" not in row and "prompt" not in row:
        return _task_from_request(row)
    messages: list[Message] = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    identity = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    return Task(
        task_id=content_hash({"messages": messages, **identity}),
        messages=messages,
        metadata=row.get("metadata") or {},
        tool_names=row.get("tools"),
        reward_names=row.get("rewards"),
        variables=row.get("variables") or {},
        docker=row.get("docker"),
        docker_env=row.get("docker_env") or {},
    )


def _task_from_request(row: dict[str, Any]) -> Task:
    """Returns the task of a NeMo Gym row; its fields beside the prompt become metadata."""
    schemas = cast("list[ToolSchema] | None", request_schemas(row))
    settings = {k: v for k, v in row[REQUEST].items() if k not in ("input", "tools") and v}
    return Task(
        task_id=content_hash(row),
        messages=cast("list[Message]", request_messages(row)),
        metadata=row_metadata(row) | ({REQUEST: settings} if settings else {}),
        tool_names=[schema["function"]["name"] for schema in schemas] if schemas else None,
        reward_names=row.get("rewards"),
        variables=row.get("variables") or {},
        tool_schemas=schemas,
        docker=row.get("docker"),
        docker_env=row.get("docker_env") or {},
    )


def read_rows(path: Path, expected: RowFormat) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file (.txt: one prompt a line; else: one JSON object a line).

    Raises DataError at the first row that has a problem.
    """
    return (row for _, row in checked_rows(path, expected))


def checked_rows(path: Path, expected: RowFormat) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yields the same rows as read_rows, each with its line."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a data file", "give one of the files in it")
    check, decode = CHECKS[expected], decode_text_line if path.suffix == ".txt" else decode_line
    for line in read_row_lines(path):
        row = decode(line)
        problems = [row] if isinstance(row, Problem) else list(check(row))
        if problems:
            raise _row_error(path, line.number, problems)
        yield line, cast("dict[str, Any]", row)


def _row_error(path: Path, number: int, problems: list[Problem]) -> DataError:
    problem = problems[0]
    more = f" (and {len(problems) - 1} more on this line)" if len(problems) > 1 else ""
    return DataError(
        f"{path}:{number}: {problem.field or 'the line'} {problem.message}{more}",
        f"{problem.fix}; {_VALIDATE_HINT.format(path=path)}",
    )


def load_tasks(path: Path) -> list[Task]:
    """Returns the tasks of a prompts file (.txt: one prompt a line; .jsonl: one row a line).

    A row that is in the file twice becomes two tasks with the same id.
    Raises DataError at the first bad row, or if there is no row.
    """
    tasks = [task_from_row(row) for row in read_rows(path, RowFormat.PROMPTS)]
    if not tasks:
        raise DataError(f"{path} holds no prompts", "write one prompt per line")
    return tasks


def load_datasets(paths: Sequence[Path]) -> list[Task]:
    """Returns the tasks of several prompts files; `dataset` is the index of a task's file."""
    return [
        msgspec.structs.replace(task, dataset=dataset)
        for dataset, path in enumerate(paths)
        for task in load_tasks(path)
    ]


def load_sft_rows(path: Path) -> list[SftRow]:
    """Returns the supervised rows of a file. Raises DataError at the first bad row."""
    return [
        SftRow(messages=r["messages"], tools=r.get("tools") or [], metadata=r.get("metadata") or {})
        for r in read_rows(path, RowFormat.SFT)
    ]


def load_dpo_rows(path: Path) -> list[DpoRow]:
    """Returns the preference rows of a file. Raises DataError at the first bad row."""
    return [
        DpoRow(
            prompt=r["prompt"],
            chosen=r["chosen"],
            rejected=r["rejected"],
            tools=r.get("tools") or [],
        )
        for r in read_rows(path, RowFormat.DPO)
    ]


def decode_trajectory(data: bytes) -> Trajectory:
    """Returns the rollout in a line. Raises msgspec.DecodeError if it isn't in our layout."""
    return msgspec.json.decode(data, type=Trajectory)
