"""Stored chat completions of OpenAI: pages of completions, and pages of their messages.

A page of `GET /v1/chat/completions` has the replies. What was sent stands in the pages of
`GET /v1/chat/completions/{id}/messages`, whose messages are called `{id}-0`, `{id}-1` and so on.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.importing.bodies.envelopes import logged_calls
from stillroom.importing.bodies.exchanges import read_exchanges
from stillroom.importing.bodies.facts import as_list, as_row, parsed, text_of, without_nothing
from stillroom.importing.bodies.shelf import Shelf
from stillroom.importing.json_rows import Row, UnreadableRowError, head_rows, read_json_rows
from stillroom.importing.records import LoggedConversation, Place, Refusal, SourceRow, TraceFormat

_KIND = "chat.completion"
_Key = tuple[str, int]
"""The id of a completion, and the number of one of its messages."""


def _items(row: Row, place: Place) -> Iterator[tuple[Place, Row]]:
    listed = as_list(row.get("data")) if row.get("object", "list") == "list" else []
    if not listed:
        yield place, row
    for number, item in enumerate(listed, start=1):
        yield Place(place.path, place.line, f"row {number}"), as_row(item)


def _is_completion(row: Row) -> bool:
    return row.get("object") == _KIND and isinstance(row.get("choices"), list)


def _key_of_message(row: Row) -> _Key | None:
    """Returns which message of which completion a row is; None if it is none."""
    own, _, number = (text_of(row.get("id")) or "").rpartition("-")
    if not own or not number.isdecimal() or "role" not in row or "choices" in row:
        return None
    return own, int(number[:9])


def _is_recognised(path: Path, head: bytes) -> bool:
    for row in head_rows(head):
        items = [item for _, item in _items(row, Place(path, 1)) if item is not row]
        if any(_is_completion(item) or _key_of_message(item) is not None for item in items):
            return True
    return False


@dataclasses.dataclass(slots=True)
class _Messages:
    """The messages of all completions."""

    shelf: Shelf[_Key]
    places: dict[str, dict[int, Place]] = dataclasses.field(
        default_factory=dict[str, dict[int, Place]]
    )
    """The places of a completion's messages by their numbers."""


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    with Shelf[_Key]() as shelf:
        messages = _Messages(shelf)
        yield from _take_in(paths, messages)
        for path in paths:
            for row in read_json_rows(path):
                if isinstance(row, Refusal):
                    continue
                for place, item in _items(row.data, row.place):
                    if _is_completion(item):
                        yield from _rows_of(place, item, messages)
        for own, places in messages.places.items():
            for place in places.values():
                yield Refusal(place, "a message without its completion", own)


def _take_in(paths: Sequence[Path], messages: _Messages) -> Iterator[Refusal]:
    """Keeps the messages; yields the rows that are neither message nor completion."""
    for path in paths:
        for row in read_json_rows(path):
            if isinstance(row, Refusal):
                yield row
                continue
            for place, item in _items(row.data, row.place):
                key = _key_of_message(item)
                if key is not None and messages.shelf.put(key, item):
                    messages.places.setdefault(key[0], {})[key[1]] = place
                elif key is not None:
                    yield Refusal(place, "a message that stands twice", str(item.get("id")))
                elif not _is_completion(item):
                    yield Refusal(place, "neither a stored completion nor a message")


def _rows_of(place: Place, row: Row, messages: _Messages) -> Iterator[SourceRow]:
    places = messages.places.pop(text_of(row.get("id")) or "", {})
    sent = tuple(places[number] for number in sorted(places))
    try:
        first, *others = _calls(place, row, sorted(places), messages)
    except UnreadableRowError as error:
        yield Refusal(place, error.reason, error.detail)
        for other in sent:
            yield Refusal(other, error.reason, f"see {place}")
        return
    yield dataclasses.replace(first, also_at=sent)
    yield from others


def _calls(
    place: Place, row: Row, numbers: Sequence[int], messages: _Messages
) -> Iterator[LoggedConversation]:
    own = text_of(row.get("id")) or ""
    given = row.get("messages")
    if not isinstance(given, list):
        given = [_plain(messages.shelf.get((own, number))) for number in numbers]
    if not given:
        detail = f"give the pages of GET /v1/chat/completions/{own}/messages as well"
        raise UnreadableRowError("a completion without its messages", detail)
    request = {"messages": given, "tools": row.get("tools"), "functions": row.get("functions")}
    exchanges = [call.facts() for call in read_exchanges(request, row)]
    metadata = without_nothing(metadata=as_row(parsed(row.get("metadata"))))
    yield from logged_calls(place, exchanges, {}, metadata, "openai")


def _plain(message: Row) -> Row:
    """Returns a listed message as it was sent; its parts stand in a field of their own."""
    parts = message.get("content_parts")
    return message | {"content": parts} if as_list(parts) else message


STORED_COMPLETIONS = TraceFormat(
    name="stored_completions",
    title="OpenAI stored completions: completions and their messages",
    is_recognised=_is_recognised,
    read=_read,
)
