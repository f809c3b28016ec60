"""Reads calls without decoding the messages that each one repeats of those before it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.row_files import read_row_blocks
from stillroom.importing.bodies.blocks import BlockReader
from stillroom.importing.bodies.exchanges import failure_text, replies, system_message
from stillroom.importing.bodies.facts import as_row, first_text, iso_time, usage_details, usage_of
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.records import NO_TOOLS, RawCall, RawRow, SourceRow
from stillroom.lines import Line
from stillroom.types import Usage

_MOST_REMEMBERED = 32 << 20
UNUSUAL = (UnreadableRowError, msgspec.DecodeError, UnicodeError, RecursionError, ValueError)
"""What a short reading raises for a row that is to be read the long way."""

ReadLine = Callable[[Path, Line], list[SourceRow]]
RawCallOf = Callable[[Path, Line], RawCall | None]


class RawRequest(msgspec.Struct, gc=False):
    """The body of a request; one with other fields that matter is read the long way."""

    messages: list[msgspec.Raw]
    model: str | None = None
    system: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = NO_TOOLS
    functions: None = None
    body: None = None


class RawReply(msgspec.Struct, frozen=True, gc=False):
    """What a response says: the reply as messages in our shape, and the facts beside it."""

    messages: list[msgspec.Raw]
    id: str | None
    model: str | None
    usage: Usage | None
    details: dict[str, int]
    """The further counts of tokens, as metadata has them."""
    created: str | None
    finish_reason: str | None


def raw_rows(paths: Sequence[Path], call_of: RawCallOf, read_line: ReadLine) -> Iterator[RawRow]:
    """Yields the calls of files with a row to each line; those without a short way by `read_line`.

    Raises InputError for a file that must not be read.
    """
    for path in paths:
        for lines in read_row_blocks(path):
            for line in lines:
                try:
                    call = None if line.is_cut else call_of(path, line)
                except UNUSUAL:
                    call = None
                if call is None:
                    yield from read_line(path, line)
                else:
                    yield msgspec.structs.replace(call, reread=partial(read_line, path, line))


class MessageMemo:
    """Messages in our shape as JSON by the JSON that they were read from."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, bytes], list[msgspec.Raw]] = {}
        self._num_bytes = 0

    def of_request(self, request: RawRequest) -> list[msgspec.Raw]:
        """Returns the messages of a request. Raises UnreadableRowError if one has what is lost."""
        found = self._read(bytes(request.system), is_system=True)
        return [*found, *(ours for raw in request.messages for ours in self._read(bytes(raw)))]

    def _read(self, data: bytes, *, is_system: bool = False) -> list[msgspec.Raw]:
        known = self._known.get((is_system, data))
        if known is None:
            value, reader = msgspec.json.decode(data), BlockReader()
            if not is_system and not stands_alone(value):
                raise UnreadableRowError("an unusual message")
            ours = system_message(value, reader) if is_system else reader.turn(value)
            known = _encoded(ours, reader)
            self._num_bytes += len(data)
            if self._num_bytes > _MOST_REMEMBERED:
                self._known.clear()
                self._num_bytes = len(data)
            self._known[is_system, data] = known
        return known


def stands_alone(value: Any) -> bool:
    """Returns whether a message means the same in every history; old calls are numbered in one."""
    message = as_row(value)
    if not isinstance(message.get("role"), str) or message["role"] == "function":
        return False
    return not any(message.get(key) for key in ("function_call", "lc", "data"))


def raw_reply(response: Row) -> RawReply:
    """Returns the one reply of a response. Raises UnreadableRowError if there is not just one."""
    reader = BlockReader()
    if failure_text(response) is not None:
        raise UnreadableRowError("a failure")
    [(messages, ending)] = replies(response, reader)
    if messages[-1]["role"] != "assistant":
        raise UnreadableRowError("no reply")
    return RawReply(
        _encoded(messages, reader),
        first_text(response, "id"),
        first_text(response, "model"),
        usage_of(response.get("usage")),
        usage_details(response.get("usage")),
        iso_time(response.get("created", response.get("created_at"))),
        ending,
    )


def _encoded(messages: list[Row], reader: BlockReader) -> list[msgspec.Raw]:
    if reader.losses:
        raise UnreadableRowError("a loss")
    return [msgspec.Raw(msgspec.json.encode(message)) for message in messages]


def encoded_metadata(metadata: dict[str, Any]) -> bytes:
    """Returns metadata as JSON."""
    return msgspec.json.encode(metadata) if metadata else b"{}"
