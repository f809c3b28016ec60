"""Reads OpenAI's stored chat completions: pages of completions, and pages of their messages.

A page of `GET /v1/chat/completions` has the replies. The request messages are in the pages of
`GET /v1/chat/completions/{id}/messages`; their ids are `{id}-0`, `{id}-1` and so on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    listed_rows,
    read_json_rows,
)
from stillroom.importing.payloads.calls import logged_calls, read_calls
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    parse_if_json,
    text_of,
    without_empty,
)
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.spill import DiskDict

_KIND = "chat.completion"
_Key = tuple[str, int]
"""The id of a completion, and the index of one of its messages."""


def _list_items(paths: Sequence[Path]) -> Iterator[JsonRow | RefusedRow]:
    """Yields the items of all pages, and the rows that are not pages."""
    for row in read_json_rows(*paths):
        if isinstance(row, RefusedRow) or row.data.get("object", "list") != "list":
            yield row
        else:
            yield from listed_rows(row, "data")


def _is_completion(row: Row) -> bool:
    return row.get("object") == _KIND and isinstance(row.get("choices"), list)


def _key_of_message(row: Row) -> _Key | None:
    """Returns the completion id and index of a message row; None for other rows."""
    completion_id, _, number = (text_of(row.get("id")) or "").rpartition("-")
    if not completion_id or not number.isdecimal() or "role" not in row or "choices" in row:
        return None
    return completion_id, int(number[:9])


def _is_recognised(_path: Path, head: bytes) -> bool:
    pages = (row for row in head_rows(head) if row.get("object", "list") == "list")
    items = (as_row(item) for page in pages for item in as_list(page.get("data")))
    return any(_is_completion(item) or _key_of_message(item) is not None for item in items)


@dataclass(slots=True)
class _Messages:
    """The messages of all completions."""

    bodies: DiskDict[_Key]
    locations: dict[str, dict[int, Location]] = field(
        default_factory=dict[str, dict[int, Location]]
    )
    """The locations of each completion's messages, by index."""


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    with DiskDict[_Key]() as bodies:
        messages = _Messages(bodies)
        yield from _read_messages(paths, messages)
        for row in _list_items(paths):
            if isinstance(row, JsonRow) and _is_completion(row.data):
                yield from _calls_or_refusals(row.location, row.data, messages)
        for completion_id, locations in messages.locations.items():
            for location in locations.values():
                yield RefusedRow(location, "a message without its completion", completion_id)


def _read_messages(paths: Sequence[Path], messages: _Messages) -> Iterator[RefusedRow]:
    """Stores the messages; yields the rows that are neither message nor completion."""
    for row in _list_items(paths):
        if isinstance(row, RefusedRow):
            yield row
        elif (key := _key_of_message(row.data)) is not None:
            if messages.bodies.add(key, row.data):
                messages.locations.setdefault(key[0], {})[key[1]] = row.location
            else:
                yield RefusedRow(
                    row.location, "a message that appears twice", str(row.data.get("id"))
                )
        elif not _is_completion(row.data):
            yield RefusedRow(row.location, "neither a stored completion nor a message")


def _calls_or_refusals(location: Location, row: Row, messages: _Messages) -> Iterator[SourceRow]:
    """Yields the calls of a completion, or the completion and its messages as refused rows."""
    locations = messages.locations.pop(text_of(row.get("id")) or "", {})
    message_locations = {number: locations[number] for number in sorted(locations)}
    try:
        yield from _calls(location, row, message_locations, messages)
    except UnreadableRowError as error:
        yield RefusedRow(location, error.reason, error.detail)
        for other in message_locations.values():
            yield RefusedRow(other, error.reason, f"see {location}")


def _calls(
    location: Location, row: Row, message_locations: dict[int, Location], messages: _Messages
) -> Iterator[LoggedConversation]:
    """Yields the calls of a completion. Raises UnreadableRowError if its messages are missing."""
    completion_id = text_of(row.get("id")) or ""
    prompt = row.get("messages")
    if not isinstance(prompt, list):
        keys = ((completion_id, number) for number in message_locations)
        prompt = [_restore_content(messages.bodies.get(key)) for key in keys]
    if not prompt:
        detail = f"also import the pages of GET /v1/chat/completions/{completion_id}/messages"
        raise UnreadableRowError("a completion without its messages", detail)
    request = {"messages": prompt, "tools": row.get("tools"), "functions": row.get("functions")}
    yield from logged_calls(
        location,
        read_calls(request, row),
        metadata=without_empty(metadata=as_row(parse_if_json(row.get("metadata")))),
        provider="openai",
        merged_from=tuple(message_locations.values()),
    )


def _restore_content(message: Row) -> Row:
    """Returns a listed message with its `content_parts` as its content."""
    parts = message.get("content_parts")
    return message | {"content": parts} if as_list(parts) else message


STORED_COMPLETIONS = TraceFormat(
    name="stored_completions",
    title="OpenAI stored completions: completions and their messages",
    is_recognised=_is_recognised,
    read=_read,
)
