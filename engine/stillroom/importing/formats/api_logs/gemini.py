"""Logs of Gemini's generateContent: rows with the request's body and what came back."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.importing.bodies.envelopes import (
    envelope_facts,
    find_pair,
    is_of_another_tool,
    logged_calls,
)
from stillroom.importing.bodies.exchanges import NO_REQUEST
from stillroom.importing.bodies.facts import as_row, without_nothing
from stillroom.importing.bodies.gemini import gemini_calls, is_gemini
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    has_row,
)
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat


def _is_call(row: Row) -> bool:
    pair = None if is_of_another_tool(row) else find_pair(row)
    return pair is not None and is_gemini(pair.request)


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    return convert_rows(paths, _calls)


def _calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = find_pair(row.data)
    if pair is None or not is_gemini(pair.request):
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` with `contents`")
    exchanges = gemini_calls(pair.request, pair.response, pair.path)
    metadata = without_nothing(metadata=as_row(pair.envelope.get("metadata")))
    facts = envelope_facts(pair.envelope)
    yield from logged_calls(
        row.place, [each.facts() for each in exchanges], facts, metadata, "google"
    )


GEMINI = TraceFormat(
    name="gemini",
    title="Gemini generateContent: requests and responses",
    is_recognised=has_row(_is_call),
    read=_read,
)
