"""Logs of Anthropic's Messages: rows with the request's body and the message that came back."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stillroom.importing.bodies.envelopes import (
    calls_of_pair,
    envelope_facts,
    envelope_metadata,
    find_pair,
    is_of_another_tool,
)
from stillroom.importing.bodies.exchanges import NO_REQUEST
from stillroom.importing.bodies.facts import as_row
from stillroom.importing.bodies.raw_calls import (
    MessageMemo,
    RawRequest,
    encoded_metadata,
    raw_reply,
    raw_rows,
)
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
    LoggedConversation,
    RawCall,
    RawRow,
    SourceRow,
    TraceFormat,
)
from stillroom.lines import Line

_PROVIDER = "anthropic"


def _is_call(row: Row) -> bool:
    pair = None if is_of_another_tool(row) else find_pair(row)
    return pair is not None and pair.api == "anthropic"


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    return convert_rows(paths, _calls)


def _calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = find_pair(row.data)
    if pair is None:
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` with the request's body")
    yield from calls_of_pair(row, pair, _PROVIDER)


_ROW, _REQUEST = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(RawRequest)


def _read_raw(paths: Sequence[Path]) -> Iterator[RawRow]:
    memo = MessageMemo()

    def call_of(path: Path, line: Line) -> RawCall | None:
        row = _ROW.decode(line.utf8)
        if "request" not in row or "response" not in row:
            return None
        request = _REQUEST.decode(row.pop("request"))
        response = as_row(msgspec.json.decode(row.pop("response")))
        if not request.messages or "body" in response:
            return None
        envelope = {name: msgspec.json.decode(value) for name, value in row.items()}
        facts, reply = envelope_facts(envelope), raw_reply(response)
        return RawCall(
            path=path,
            line=line.number,
            messages=[*memo.of_request(request), *reply.messages],
            tools=request.tools,
            group=facts.get("group"),
            id=facts.get("id") or reply.id,
            provider=_PROVIDER,
            model=reply.model or request.model or None,
            usage=reply.usage,
            cost_usd=facts.get("cost_usd"),
            started_at=facts.get("started_at") or reply.created,
            duration_s=facts.get("duration_s"),
            finish_reason=reply.finish_reason,
            metadata=encoded_metadata(reply.details | envelope_metadata(envelope)),
        )

    for path in paths:
        if is_array_file(path):
            yield from _read([path])
        else:
            yield from raw_rows([path], call_of, _read_line)


def _read_line(path: Path, line: Line) -> list[SourceRow]:
    return convert_row(row_of_line(path, line), _calls)


ANTHROPIC_MESSAGES = TraceFormat(
    name="anthropic_messages",
    title="Anthropic Messages: requests and responses",
    is_recognised=has_row(_is_call),
    read=_read,
    read_raw=_read_raw,
)
