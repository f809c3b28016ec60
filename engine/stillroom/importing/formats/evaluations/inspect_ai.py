"""Reads logs of inspect_ai (.eval and .json): one conversation with its scores per sample."""

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from stillroom import bounds
from stillroom.data.checks import Problem, as_number, decode_row
from stillroom.data.row_files import MAX_ROW_BYTES, TOO_LONG
from stillroom.errors import missing_extra
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    read_field_rows,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    finish_reason_of,
    first_text,
    non_negative_number,
    short_answer,
    without_empty,
)
from stillroom.importing.payloads.messages import MessageReader, tool_schemas
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.secrecy.readable import check_readable
from stillroom.types import Usage

_ZIP = b"PK\x03\x04"
_ZSTANDARD = 93
_LOCAL_HEADER = struct.Struct("<26xHH")
"""The lengths of the file name and the extra field, at the end of a zip member's local header."""
_HEAD = 64 << 10
_ATTACHED = "attachment://"
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_WORD_SCORES = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_MEMBERS = ("_journal/start.json", "header.json", "samples/")
_MAX_DEPTH = bounds.ZIP_LEVELS.limit
_INPUT_KEYS = ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")


def read_logs(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversation of each sample in logs; each epoch of a sample is a row.

    Only one sample is in memory at a time.

    Raises MissingExtraError for an .eval file with Zstandard compression if pyarrow is missing.
    """
    for path in paths:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
        is_zip = head.startswith(_ZIP)
        task = Row() if is_zip else _task_of(head)
        for row in _zip_members(path, *_MEMBERS) if is_zip else read_field_rows(path, "samples"):
            if isinstance(row, RefusedRow):
                yield row
            elif row.location.part in _MEMBERS:
                task = as_row(row.data.get("eval"))
            else:
                try:
                    yield _conversation(row, task)
                except UnreadableRowError as error:
                    yield RefusedRow(row.location, error.reason, error.detail)


def _task_of(head: bytes) -> Row:
    return next((as_row(row.get("eval")) for row in head_rows(head)), Row())


def _conversation(row: JsonRow, task: Row) -> LoggedConversation:
    """Returns the conversation of a sample. Raises UnreadableRowError if it has no messages."""
    sample, reader = row.data, MessageReader()
    attachments = as_row(sample.get("attachments"))
    messages: list[Row] = []
    for message in as_list(sample.get("messages")):
        messages += reader.turn(
            _normalize_message(_resolve_attachments(message, attachments, _MAX_DEPTH))
        )
    error = as_row(sample.get("error")).get("message")
    if not messages:
        raise UnreadableRowError("no messages", "the sample was not run, or failed to start")
    output = as_row(sample.get("output"))
    choice = as_row(next(iter(as_list(output.get("choices"))), None))
    task_model = first_text(task, "model")
    provider = task_model.partition("/")[0] if task_model and "/" in task_model else None
    return LoggedConversation(
        location=row.location,
        messages=messages,
        is_call=False,
        tools=_offered_tools(sample),
        id=first_text(sample, "uuid"),
        provider=provider,
        model=first_text(output, "model") or task_model,
        usage=_usage(as_row(sample.get("model_usage")), task_model),
        started_at=first_text(sample, "started_at"),
        duration_s=non_negative_number(sample.get("total_time")),
        finish_reason=finish_reason_of(choice.get("stop_reason")),
        error=error if isinstance(error, str) else None,
        scores=dict(_scores(as_row(sample.get("scores")))),
        dropped=tuple(reader.dropped),
        metadata=without_empty(
            task=first_text(task, "task"),
            sample_id=sample.get("id"),
            epoch=sample.get("epoch"),
            target=sample.get("target"),
            expected_answer=short_answer(sample.get("target")),
            choices=sample.get("choices"),
            limit=as_row(sample.get("limit")).get("type"),
        )
        | as_row(sample.get("metadata")),
    )


def _resolve_attachments(value: Any, attachments: Row, depth: int) -> Any:
    """Replaces references to attachments in a value with the texts of the attachments."""
    if isinstance(value, str) and value.startswith(_ATTACHED):
        return attachments.get(value.removeprefix(_ATTACHED), value)
    if depth and isinstance(value, list):
        return [
            _resolve_attachments(item, attachments, depth - 1) for item in cast("list[Any]", value)
        ]
    if depth and isinstance(value, dict):
        fields = cast("Row", value)
        return {
            key: _resolve_attachments(item, attachments, depth - 1) for key, item in fields.items()
        }
    return value


def _normalize_message(message: Any) -> Row:
    """Converts a message's tool calls and reasoning to the form that MessageReader reads."""
    fields = dict(as_row(message))
    if calls := as_list(fields.get("tool_calls")):
        fields["tool_calls"] = [_normalize_call(as_row(call)) for call in calls]
    if isinstance(fields.get("content"), list):
        fields["content"] = [_normalize_block(as_row(block)) for block in fields["content"]]
    failure = as_row(fields.get("error")).get("message")
    if fields.get("role") == "tool" and isinstance(failure, str) and not fields.get("content"):
        fields["content"] = failure
    return {key: value for key, value in fields.items() if key != "name"}


def _normalize_call(call: Row) -> Row:
    function = {"name": call.get("function"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "function": function}


def _normalize_block(block: Row) -> Row:
    """Converts a content block to a type that MessageReader reads."""
    match block.get("type"):
        case "reasoning":
            text = first_text(block, "reasoning") if not block.get("redacted") else None
            return {"type": "thinking", "thinking": text or first_text(block, "summary")}
        case "tool_use":  # a call of the provider's tool; other calls are in `tool_calls`
            return {"type": "server_tool_use"}
        case _:
            return block


def _offered_tools(sample: Row) -> list[Row] | None:
    """Returns the tools of the sample's first model call; None if the log has no events."""
    events = map(as_row, as_list(sample.get("events")))
    call = next((event for event in events if event.get("event") == "model"), Row())
    return tool_schemas(call.get("tools"))


def _usage(by_model: Row, model: str | None) -> Usage | None:
    """Returns the usage of the evaluated model, without that of models that grade."""
    counts = as_row(by_model.get(model)) if model in by_model else Row()
    if not counts and len(by_model) == 1:
        counts = as_row(next(iter(by_model.values())))
    if not counts:
        return None
    prompt = sum(non_negative_number(counts.get(key)) or 0 for key in _INPUT_KEYS)
    completion = non_negative_number(counts.get("output_tokens")) or 0
    return Usage(prompt_tokens=int(prompt), completion_tokens=int(completion))


def _scores(scores: Row) -> Iterator[tuple[str, float]]:
    """Yields the scores that are numbers or grades; values of a dict are named `scorer.key`."""
    for name, score in scores.items():
        value = as_row(score).get("value", score)
        parts = as_row(value)
        for part, inner in parts.items():
            if (number := _score(inner)) is not None:
                yield f"{name}.{part}", number
        if not parts and (number := _score(value)) is not None:
            yield name, number


def _score(value: Any) -> float | None:
    """Returns a score as a number; None if it is neither a number nor a known grade."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        return _GRADES.get(value, _WORD_SCORES.get(value.lower()))
    return as_number(value)


def _zip_members(path: Path, *prefixes: str) -> Iterator[JsonRow | RefusedRow]:
    """Yields the JSON objects of a zip file whose member names have one of the prefixes, in order.

    In a location, `part` is the member's name, and `line` its number among those with its prefix.
    Raises MissingExtraError if a member has Zstandard compression and pyarrow is missing.
    """
    check_readable(path)
    try:
        with zipfile.ZipFile(path) as archive:
            # Of members with the same name, the last one replaces the others.
            members = {info.filename: info for info in archive.infolist()}
            for prefix in prefixes:
                matching = [info for name, info in members.items() if name.startswith(prefix)]
                for number, info in enumerate(matching, start=1):
                    location = Location(path, number, info.filename)
                    if info.file_size > MAX_ROW_BYTES:
                        yield RefusedRow(
                            location, "not a JSON object", f"the zip member {TOO_LONG}"
                        )
                    else:
                        yield _member_row(location, _decompress(archive, info))
    except (zipfile.BadZipFile, EOFError, OSError, struct.error, zlib.error) as error:
        yield RefusedRow(Location(path, 1), "not a complete zip file", str(error))


def _member_row(location: Location, data: bytes) -> JsonRow | RefusedRow:
    row = decode_row(data)
    if isinstance(row, Problem):
        return RefusedRow(location, "not a JSON object", f"the zip member {row.message}")
    return JsonRow(location, row)


def _decompress(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Returns the content of a zip member, which may be compressed with Zstandard."""
    if info.compress_type != _ZSTANDARD:
        return archive.read(info)
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra("traces", "reading .eval files") from error
    stream: Any = archive.fp
    stream.seek(info.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    stream.seek(name_length + extra_length, 1)
    packed = pyarrow.BufferReader(stream.read(info.compress_size))
    return pyarrow.CompressedInputStream(packed, "zstd").read(info.file_size)


def _is_recognised(path: Path, head: bytes) -> bool:
    if head.startswith(_ZIP):
        return path.suffix == ".eval" or b"_journal/start.json" in head
    first = next(iter(head_rows(head)), Row())
    return {"version", "status", "eval"} <= first.keys() and "task" in as_row(first["eval"])


INSPECT_AI = TraceFormat(
    name="inspect_ai",
    title="inspect_ai logs (.eval and .json)",
    is_recognised=_is_recognised,
    read=read_logs,
)
