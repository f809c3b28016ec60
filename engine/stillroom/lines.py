"""The lines of a file, one by one, in constant memory."""

import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

BOM = b"\xef\xbb\xbf"
_BLANKS = b"\r\n \t"
_BLOCK = 1 << 20
_BEGINNING = 200


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line of a file: its bytes without blanks around them, and where they stand."""

    number: int
    """From 1."""
    offset: int
    """Of the first byte of `data` in the file."""
    num_bytes: int
    """From `offset`, in the file; of a line that is cut, only of its beginning."""
    data: bytes
    is_cut: bool = False
    """Whether it was too long, and `data` is no more than its beginning."""


def read_lines(path: Path, *, max_bytes: int | None = None) -> Iterator[Line]:
    """Yields the non-blank lines of a file in constant memory; BOM and CRLF are taken off.

    Of a line of over `max_bytes` only the beginning is given; the rest is never held in memory.
    """
    number = 0
    with path.open("rb", buffering=0) as stream:
        for start, raw, is_cut in _Buffer(stream, max_bytes or sys.maxsize).lines():
            number += 1
            head = len(BOM) if number == 1 and raw.startswith(BOM) else 0
            body = raw[head:]
            data = body.strip(_BLANKS)
            if data or is_cut:
                lead = len(body) - len(body.lstrip(_BLANKS)) if body[:1] != data[:1] else 0
                yield Line(number, start + head + lead, len(data), data, is_cut)


class _Buffer:
    """What was read of a file and not given away yet: it holds a block, or the longest line."""

    def __init__(self, stream: FileIO, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._beginning = min(limit, _BEGINNING)
        self._bytes = bytearray(_BLOCK)
        self._num_filled = 0
        self._start = 0

    def lines(self) -> Iterator[tuple[int, bytes, bool]]:
        """Yields where a line starts, its bytes without the newline, and whether it is cut."""
        is_inside_cut = False
        while size := self._fill():
            buffer, view = self._bytes, memoryview(self._bytes)
            first, searched = 0, self._num_filled - size
            while (end := buffer.find(b"\n", searched, self._num_filled)) >= 0:
                if is_inside_cut:
                    is_inside_cut = False
                elif end - first < self._limit:
                    yield self._start + first, bytes(view[first:end]), False
                else:
                    yield self._start + first, bytes(view[first : first + self._beginning]), True
                first = searched = end + 1
            if not is_inside_cut and self._num_filled - first > self._limit:
                yield self._start + first, bytes(view[first : first + self._beginning]), True
                is_inside_cut = True
            self._forget(self._num_filled if is_inside_cut else first)
        if self._num_filled:
            yield self._start, bytes(self._bytes[: self._num_filled]), False

    def _fill(self) -> int:
        """Reads on, and returns how many bytes that was: none at the end of the file."""
        if self._num_filled == len(self._bytes):
            self._bytes = self._bytes.ljust(2 * self._num_filled, b"\0")
        room = memoryview(self._bytes)[self._num_filled :][:_BLOCK]
        size = self._stream.readinto(room)
        self._num_filled += size
        return size

    def _forget(self, num_bytes: int) -> None:
        """Lets go of the first bytes."""
        view = memoryview(self._bytes)
        view[: self._num_filled - num_bytes] = view[num_bytes : self._num_filled]
        self._num_filled -= num_bytes
        self._start += num_bytes
