"""Logs of Anthropic's Messages: rows with the request's body and the message that came back."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    has_row,
)
from stillroom.importing.payloads.calls import NO_REQUEST
from stillroom.importing.payloads.pairs import (
    calls_of_pair,
    find_pair,
    is_of_another_tool,
)
from stillroom.importing.records import (
    LoggedConversation,
    SourceRow,
    TraceFormat,
)

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


ANTHROPIC_MESSAGES = TraceFormat(
    name="anthropic_messages",
    title="Anthropic Messages: requests and responses",
    is_recognised=has_row(_is_call),
    read=_read,
)
