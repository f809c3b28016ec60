"""The lines of a file, one by one, in constant memory."""

import itertools
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

BOM = b"\xef\xbb\xbf"
_BLANKS = b"\r\n \t"
_BLOCK = 256 << 10
"""What is read at once: with the lines that are made of it, it stays in a core's own cache."""
_KEPT_WHEN_FREE = 4 << 20
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
    return itertools.chain.from_iterable(read_line_blocks(path, max_bytes=max_bytes))


def read_line_blocks(path: Path, *, max_bytes: int | None = None) -> Iterator[list[Line]]:
    """Yields the same lines, those that end in a block of the file at a time."""
    with path.open("rb", buffering=0) as stream:
        yield from _Buffer(stream, max_bytes or sys.maxsize).blocks()


class _Buffer:
    """What was read of a file and not given away yet: it holds a block, or the longest line."""

    def __init__(self, stream: FileIO, limit: int) -> None:
        _keep_freed_memory()
        self._stream, self._limit = stream, limit
        self._beginning = min(limit, _BEGINNING)
        self._bytes = bytearray(_BLOCK)
        self._num_filled = 0
        self._start = 0
        self._number = 0

    def blocks(self) -> Iterator[list[Line]]:
        """Yields the lines that end in a block, or become too long in it."""
        is_inside_cut = False
        while size := self._fill():
            buffer, lines = self._bytes, list[Line]()
            first, searched = 0, self._num_filled - size
            while (end := buffer.find(b"\n", searched, self._num_filled)) >= 0:
                if is_inside_cut:
                    is_inside_cut = False
                else:
                    self._take(lines, first, end, is_cut=end - first >= self._limit)
                first = searched = end + 1
            if not is_inside_cut and self._num_filled - first > self._limit:
                self._take(lines, first, self._num_filled, is_cut=True)
                is_inside_cut = True
            self._forget(self._num_filled if is_inside_cut else first)
            yield lines
        if self._num_filled:
            lines = []
            self._take(lines, 0, self._num_filled, is_cut=False)
            yield lines

    def _take(self, lines: list[Line], first: int, end: int, *, is_cut: bool) -> None:
        """Adds the line between two places in the buffer, if it is not blank."""
        self._number += 1
        raw = bytes(memoryview(self._bytes)[first : first + self._beginning if is_cut else end])
        start = self._start + first
        if self._number == 1 and raw.startswith(BOM):
            raw, start = raw[len(BOM) :], start + len(BOM)
        data = raw.strip(_BLANKS)
        if data or is_cut:
            lead = len(raw) - len(raw.lstrip(_BLANKS)) if len(data) != len(raw) else 0
            lines.append(Line(self._number, start + lead, len(data), data, is_cut))

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


def _keep_freed_memory() -> None:
    """Makes the C library keep the memory of freed lines for the next ones.

    Else it gives it back to the system with each block and asks for new pages, which costs as much
    as to read them. glibc raises its bounds for that when it frees a block as large as this one;
    nothing ever touches its pages.
    """
    bytes(_KEPT_WHEN_FREE)
