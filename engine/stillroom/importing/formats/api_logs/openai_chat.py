"""Logs of OpenAI's chat completions: rows with a request's messages and what came back.

The request and the response may stand in fields of their own, the messages beside the reply, or the
messages in the `chat.completion` object itself. A streamed reply may be a list of its chunks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.data.row_files import read_row_blocks
from stillroom.importing.bodies.envelopes import (
    LoggedPair,
    calls_of_pair,
    find_pair,
    is_of_another_tool,
)
from stillroom.importing.bodies.exchanges import NO_REQUEST
from stillroom.importing.bodies.facts import as_list, as_row, finish_reason_of
from stillroom.importing.bodies.streams import whole_completion
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_row,
    convert_rows,
    has_row,
    is_array_file,
    row_of_line,
)
from stillroom.importing.records import (
    NO_TOOLS,
    LoggedConversation,
    RawCall,
    RawRow,
    SourceRow,
    TraceFormat,
)
from stillroom.lines import Line
from stillroom.secrecy.readable import check_readable
from stillroom.types import Usage

_REPLIES = ("output", "reply")
_SCORES = ("score", "rating", "reward", "feedback")


def _is_call(row: Row) -> bool:
    pair = None if is_of_another_tool(row) else _pair_of(row)
    return pair is not None and pair.api == "chat" and "messages" in pair.request


def _pair_of(row: Row) -> LoggedPair | None:
    if "choices" in row:
        request = as_row(row.get("request")) or as_row(row.get("input")) or row
        return LoggedPair(request, row, row) if "messages" in request else None
    name = next((name for name in _REPLIES if row.get(name)), None)
    if name is not None and isinstance(row.get("messages"), list):
        return LoggedPair(row, row[name], row)
    return find_pair(row)


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    return convert_rows(paths, _calls)


def _calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = _pair_of(row.data)
    if pair is None:
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` and no `messages`")
    whole = LoggedPair(pair.request, _whole_reply(pair.response), pair.envelope, pair.path)
    scores = _scores(row.data)
    for call in calls_of_pair(row, whole, None):
        call.scores.update(scores)
        yield call


def _scores(row: Row) -> dict[str, float]:
    """Returns the judgements beside a call: `scores` by name, or one under a usual name."""
    single = {name: row[name] for name in _SCORES if name in row}
    single = {name: float(v) if isinstance(v, bool) else v for name, v in single.items()}
    return numbers_by_name(as_row(row.get("scores"))) | numbers_by_name(single)


def _whole_reply(response: Any) -> Any:
    """Returns the completion that a list of streamed chunks adds up to; others unchanged."""
    chunks = [as_row(chunk) for chunk in as_list(response)]
    if not any(isinstance(chunk.get("choices"), list) for chunk in chunks):
        return response
    return whole_completion(chunks, is_complete=False)


class _Message(msgspec.Struct, gc=False):
    message: msgspec.Raw
    finish_reason: str | None = None


class _Tokens(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int = 0


class _Completion(msgspec.Struct, gc=False):
    choices: tuple[_Message]
    id: str | None = None
    model: str | None = None
    created: float | None = None
    usage: _Tokens | None = None
    error: None = None
    body: None = None


class _Request(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]
    model: str | None = None
    tools: msgspec.Raw = NO_TOOLS
    functions: None = None
    system: None = None
    body: None = None


class _PlainRow(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A row as most loggers write it; one with any other field is read the long way."""

    request: _Request
    response: _Completion
    id: str | None = None
    session_id: str | None = None
    timestamp: float | str | None = None
    started_at: float | str | None = None
    duration_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    latency_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None


_PLAIN_ROW = msgspec.json.Decoder(_PlainRow)


def _read_raw(paths: Sequence[Path]) -> Iterator[RawRow]:
    for path in paths:
        check_readable(path)
        if is_array_file(path):
            yield from _read([path])
            continue
        for lines in read_row_blocks(path):
            for line in lines:
                call = _plain_call(path, line)
                if call is not None:
                    yield call
                else:
                    yield from _read_line(path, line)


def _plain_call(path: Path, line: Line) -> RawCall | None:
    """Returns the call of a row in its most usual shape; None for all other rows."""
    if line.is_cut:
        return None
    try:
        row = _PLAIN_ROW.decode(line.utf8)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    request, response = row.request, row.response
    if not request.messages:
        return None
    [choice] = response.choices
    tokens, seconds = response.usage, row.duration_s
    if seconds is None and row.latency_ms is not None:
        seconds = row.latency_ms / 1000
    return RawCall(
        path=path,
        line=line.number,
        messages=[*request.messages, choice.message],
        tools=request.tools,
        group=row.session_id or None,
        id=row.id or response.id or None,
        model=response.model or request.model or None,
        usage=None
        if tokens is None
        else Usage(prompt_tokens=tokens.prompt_tokens, completion_tokens=tokens.completion_tokens),
        started_at=row.started_at or row.timestamp or response.created,
        duration_s=seconds,
        finish_reason=finish_reason_of(choice.finish_reason),
        reread=partial(_read_line, path, line),
    )


def _read_line(path: Path, line: Line) -> list[SourceRow]:
    return convert_row(row_of_line(path, line), _calls)


OPENAI_CHAT = TraceFormat(
    name="openai_chat",
    title="OpenAI chat completions: requests and responses",
    is_recognised=has_row(_is_call),
    read=_read,
    read_raw=_read_raw,
)
