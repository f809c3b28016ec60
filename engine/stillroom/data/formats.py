"""The four row formats (prompts, rollouts, SFT, preference pairs), their checks and readers."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom import fences
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
from stillroom.data.layouts.rnow import is_stored_by_rnow
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.data.tool_names import NamedTools, are_names, named_schemas
from stillroom.errors import DataError
from stillroom.files import content_hash
from stillroom.lines import Line
from stillroom.types import Message, ToolSchema, Trajectory, is_trained_turn
from stillroom.validation import did_you_mean

_VALIDATE_HINT = (
    "correct the line, then list every problem with `stillroom validate-dataset {path}`"
)


class RowFormat(StrEnum):
    """The formats of rows in a data file; each line is a row."""

    PROMPTS = "prompts"
    ROLLOUTS = "rollouts"
    SFT = "sft"
    DPO = "dpo"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a prompt row: the conversation to answer, and the tools and rewards to use."""

    task_id: str
    messages: list[Message]
    metadata: dict[str, Any]
    tool_names: list[str] | None
    """The names of the tools that this task may use; None means all tools of the run."""
    reward_names: list[str] | None
    variables: dict[str, Any]
    tool_schemas: list[ToolSchema] | None = None
    """The schemas of the tools in `tool_names` if the row itself has them; else None."""
    docker: str | None = None
    """The image with the task's tools, or `local/NAME` for Dockerfile.NAME; None without one."""
    docker_env: dict[str, str] = {}
    dataset: int = 0
    """The index of the task's prompts file among the prompts files of the run."""


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


_SYSTEM_KEYS = ("system", "system_prompt")
"""The keys of a prompt row that may hold its system message."""


def _prompt_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields every problem of a prompt row."""
    for field in ("messages", "prompt"):
        if field in row and (field == "messages" or not isinstance(row["prompt"], str)):
            yield from _conversation_problems(row[field], field)
            break
    else:
        if "prompt" in row:
            if not row["prompt"].strip():
                yield Problem("prompt", "is empty", "write the prompt's text")
        elif REQUEST in row:
            yield from prompt_row_problems(row)
        else:
            yield Problem(
                "",
                "has neither 'messages' nor 'prompt'",
                'write {"prompt": "…"} or {"messages": […]}',
            )
    if REQUEST not in row:
        yield from _system_problems(row)
    yield from object_problems(row, "metadata")
    yield from object_problems(row, "variables")
    yield from name_list_problems(row, "tools")
    yield from name_list_problems(row, "rewards")
    yield from docker_problems(row)


def _conversation_problems(messages: Any, field: str) -> Iterator[Problem]:
    """Yields every problem of the messages of a prompt."""
    if field == "prompt" and not isinstance(messages, list):
        fix = "write the prompt's text, or a list of messages"
        yield Problem("prompt", f"must be a string, not {describe(messages)}", fix)
        return
    problems = list(message_problems(messages, field))
    yield from problems
    if not problems and messages[-1]["role"] == "assistant":
        yield Problem(
            field,
            "ends with an assistant message, so nothing is left to answer",
            "end with the user's message; for rows with answers use dataset_type sft",
        )


def _system_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem if a row has a second system message, which would be ignored."""
    system_keys = [key for key in _SYSTEM_KEYS if row.get(key) and isinstance(row[key], str)]
    if len(system_keys) > 1:
        yield Problem("system_prompt", "is given in addition to system", "keep only one of them")
    elif system_keys and _has_system_message(row):
        yield Problem(
            system_keys[0],
            "is given in addition to a system message in messages, and only one is read",
            f"remove {system_keys[0]}, or the system message in messages",
        )


def _has_system_message(row: dict[str, Any]) -> bool:
    messages = row.get("messages") or row.get("prompt")
    first = cast("list[Any]", messages)[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and cast("dict[str, Any]", first).get("role") == "system"


def _system_of(row: dict[str, Any]) -> str | None:
    """Returns the text of a prompt row's system key; None if it has none."""
    values = (row.get(key) for key in _SYSTEM_KEYS)
    return next((text for text in values if isinstance(text, str) and text), None)


_PROMPT_KEYS = (
    "messages", "prompt", *_SYSTEM_KEYS, "metadata", "variables", "tools", "rewards", "docker",
    "docker_env", "id",
)  # fmt: skip
"""The fields that a prompt row may have. `id` is not read, but distinguishes equal rows."""


def unread_key_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem for each key of a prompt row that nothing reads.

    Runs do not refuse such rows, because the rows of a run that is resumed must not change.
    """
    if REQUEST in row:
        return
    for key in _SYSTEM_KEYS:
        if row.get(key) is not None and not isinstance(row[key], str):
            fix = "write the system message's text"
            yield Problem(key, f"must be a string, not {describe(row[key])}; it is ignored", fix)
    for key in row.keys() - set(_PROMPT_KEYS):
        similar = did_you_mean(key, _PROMPT_KEYS)
        yield Problem(
            key,
            f"is not a key of a prompt row and is ignored{similar}",
            f"move it into metadata: {{{fences.safe_name(key)!r}: …}}, where rewards and tools can "
            "read it, or remove it",
        )


def _sft_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields every problem of a supervised row."""
    problems = list(message_problems(row.get("messages")))
    yield from problems
    if not problems and not any(message["role"] == "assistant" for message in row["messages"]):
        fix = (
            "add the answer; if the file has prompts, pass it to generate_rollouts, its rollouts "
            "to convert_rollouts, and train on that output (data.train_file)"
        )
        yield Problem("messages", "has no assistant message to train on", fix)
    elif not problems and not _has_trained_turn(row["messages"]):
        fix = "give the turns to train weight 1, or drop the row"
        yield Problem("messages", "has no trained turn: all assistant messages have weight 0", fix)
    if not are_names(row.get("tools")):
        yield from tool_schema_problems(row.get("tools"))
    yield from object_problems(row, "metadata")


def _has_trained_turn(messages: list[Message]) -> bool:
    return any(m["role"] == "assistant" and is_trained_turn(m) for m in messages)


def _dpo_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields every problem of a preference row."""
    for field in ("prompt", "chosen", "rejected"):
        problems = list(message_problems(row.get(field), field))
        # An answer may have a tool's reply to a call in the prompt, which this check does not see.
        yield from (p for p in problems if not p.field.endswith("tool_call_id"))
        if problems or field == "prompt":
            continue
        if row[field][0]["role"] != "assistant":
            yield Problem(field, "must begin with an assistant message", "begin with the answer")
        elif not _has_trained_turn(row[field]):
            yield Problem(field, "has no trained turn: all messages have weight 0", "drop the row")
    if row.get("chosen") is not None and row.get("chosen") == row.get("rejected"):
        yield Problem("rejected", "is the same as chosen", "drop the row: it teaches nothing")
    if not are_names(row.get("tools")):
        yield from tool_schema_problems(row.get("tools"))
    yield from object_problems(row, "metadata")


CHECKS = {
    RowFormat.PROMPTS: _prompt_problems,
    RowFormat.ROLLOUTS: rollout_problems,
    RowFormat.SFT: _sft_problems,
    RowFormat.DPO: _dpo_problems,
}
"""The check of each format, which yields every problem of a row."""


def detect_format(row: dict[str, Any]) -> RowFormat | None:
    """Returns the format of a row; None if the row has no known format."""
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
    """Returns the task of a prompt row without problems.

    The id is a hash of everything that affects the answer, so equal rows have the same id.
    """
    if REQUEST in row and "messages" not in row and "prompt" not in row:
        return _task_from_request(row)
    prompt: Any = row.get("messages") or row["prompt"]
    messages: list[Message] = (
        prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    )
    excluded = {"prompt", "messages"}
    if (system := _system_of(row)) is not None:
        messages = [{"role": "system", "content": system}, *messages]
        excluded |= set(_SYSTEM_KEYS)
    identity = {key: value for key, value in row.items() if key not in excluded}
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
    """Returns the task of a NeMo Gym row; its other fields become metadata."""
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
    """Yields the rows of a file: one prompt per line of a .txt file, else one JSON object per line.

    Raises DataError at the first row that has a problem.
    """
    return (row for _, row in checked_rows(path, expected))


def checked_rows(path: Path, expected: RowFormat) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yields the same rows as read_rows, each with its line."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a data file", "give one of the files in it")
    if is_stored_by_rnow(path):
        raise DataError(
            f"{path} contains rollouts that rnow stored, not prompts",
            "call import_rollouts(input=…, prompts=true), which writes them and their prompts",
        )
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
    """Returns the tasks of a prompts file (.txt: one prompt per line; .jsonl: one row per line).

    Equal rows become tasks with the same id. Raises DataError for an invalid row, and for a file
    without rows.
    """
    tasks = [task_from_row(row) for row in read_rows(path, RowFormat.PROMPTS)]
    if not tasks:
        raise DataError(f"{path} has no prompts", "write one prompt per line")
    return tasks


def load_datasets(paths: Sequence[Path]) -> list[Task]:
    """Returns the tasks of several prompts files; `dataset` is the index of a task's file."""
    return [
        msgspec.structs.replace(task, dataset=dataset)
        for dataset, path in enumerate(paths)
        for task in load_tasks(path)
    ]


def load_sft_rows(path: Path, named_tools: NamedTools | None = None) -> list[SftRow]:
    """Returns the supervised rows of a file; `named_tools` has the schemas for tool names.

    Raises DataError for an invalid row, and for an unknown tool name.
    """
    return [
        SftRow(
            messages=row["messages"],
            tools=named_schemas(row.get("tools") or [], named_tools, where=f"{path}:{line.number}"),
            metadata=row.get("metadata") or {},
        )
        for line, row in checked_rows(path, RowFormat.SFT)
    ]


def load_dpo_rows(path: Path, named_tools: NamedTools | None = None) -> list[DpoRow]:
    """Returns the preference rows of a file; `named_tools` has the schemas for tool names.

    Raises DataError for an invalid row, and for an unknown tool name.
    """
    return [
        DpoRow(
            prompt=row["prompt"],
            chosen=row["chosen"],
            rejected=row["rejected"],
            tools=named_schemas(row.get("tools") or [], named_tools, where=f"{path}:{line.number}"),
        )
        for line, row in checked_rows(path, RowFormat.DPO)
    ]


def decode_trajectory(data: bytes) -> Trajectory:
    """Returns the rollout of a line. Raises msgspec.DecodeError for any layout but Stillroom's."""
    return msgspec.json.decode(data, type=Trajectory)
