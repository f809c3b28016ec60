"""Reads the lines of a file one by one, in constant memory."""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec

BOM = b"\xef\xbb\xbf"
_BLANKS = b"\r\n \t"
_LAST_BLANK = 0x20
"""The largest whitespace byte; a line that begins and ends with larger bytes needs no stripping."""
_BLOCK = 256 << 10
"""The number of bytes read at once; a block and its lines fit into the L2 cache of a core."""
_MMAP_THRESHOLD_BYTES = 4 << 20
_MAX_CUT_LINE_BYTES = 200
_TAIL_BLOCK = 4 << 10
_MAX_TAIL_BYTES = 100_000
_LONGEST_SHOWN = 2000
_LONGEST_LAST_LINE = 300
_MAX_TRAILING_LINES = 20


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line of a file: its bytes without surrounding whitespace, and their position."""

    number: int
    """The number of the line, from 1."""
    offset: int
    """The position of the first byte of `data` in the file."""
    num_bytes: int
    """The length of `data`; for a truncated line, the length of its beginning."""
    view: bytes | memoryview
    """The bytes of `data` without a copy: a view of the block that was read.

    The view keeps the whole block in memory.
    """
    is_cut: bool = False
    """Whether the line is too long, so that `data` is only its beginning."""
    is_ascii: bool = False
    """Whether the whole block is ASCII; if False, this line may still be ASCII."""

    @property
    def data(self) -> bytes:
        """A copy of the bytes, independent of the block."""
        return bytes(self.view)

    @property
    def utf8(self) -> bytes | memoryview:
        """The bytes, checked to be UTF-8. Raises UnicodeDecodeError if they are not.

        The check is needed since JSON decoders check only the strings that they decode, and not
        those that they skip.
        """
        if self.is_ascii:
            return self.view
        data = self.data
        if not data.isascii():
            data.decode()
        return data

    @property
    def source(self) -> bytes:
        """The block of which `view` is a part."""
        view = self.view
        return cast("bytes", view.obj) if isinstance(view, memoryview) else view


def read_lines(path: Path, *, max_bytes: int | None = None) -> Iterator[Line]:
    """Yields the non-blank lines of a file in constant memory, without BOM and line ends.

    A line longer than `max_bytes` is truncated; its rest is never held in memory.
    """
    return itertools.chain.from_iterable(read_line_blocks(path, max_bytes=max_bytes))


def read_line_blocks(path: Path, *, max_bytes: int | None = None) -> Iterator[list[Line]]:
    """Yields the same lines as read_lines, as one list for each block that was read."""
    with path.open("rb", buffering=0) as stream:
        yield from _Reader(stream.fileno(), max_bytes or sys.maxsize).blocks()


def count_lines(path: Path) -> int:
    """Returns the number of lines that read_lines yields, ten times faster than reading them."""
    # has_text: whether the last line, which may continue in the next block, is not blank so far.
    count, has_text = 0, False
    with path.open("rb", buffering=0) as stream:
        if stream.read(len(BOM)) != BOM:
            stream.seek(0)
        while block := stream.read(_BLOCK):
            first, *others = block.split(b"\n")
            has_text = has_text or bool(first.strip(_BLANKS))
            if others:
                has_text_flags = [has_text, *map(_has_text, others[:-1])]
                count, has_text = count + sum(has_text_flags), _has_text(others[-1])
    return count + has_text


def _has_text(line: bytes) -> bool:
    return bool(line.strip(_BLANKS))


class _Reader:
    """Reads a file line by line, without keeping lines that were yielded."""

    def __init__(self, handle: int, limit: int) -> None:
        _keep_freed_memory()
        self._handle, self._limit = handle, limit
        self._number = 0

    def blocks(self) -> Iterator[list[Line]]:
        """Yields lists of lines: the lines that end in a block, or one line longer than a block."""
        start = len(BOM) if os.pread(self._handle, len(BOM), 0) == BOM else 0
        while block := os.pread(self._handle, _BLOCK, start):
            if size := block.rfind(b"\n") + 1:
                yield self._lines(block, start, size)
                start += size
                continue
            end = self._end_of_line(start + len(block))
            yield self._long_line(block, start, end)
            if os.pread(self._handle, 1, end - 1) != b"\n":
                return  # if the file has grown since, the new text continues this line
            start = end

    def _lines(self, block: bytes, start: int, size: int) -> list[Line]:
        """Returns the lines of the first bytes of a block that begins at `start` in the file."""
        lines: list[Line] = []
        view = memoryview(block)
        number, limit, begin = self._number, self._limit, 0
        # Checked once per block, since checking each line would copy it.
        is_ascii = block.isascii()
        while begin < size:
            end = block.find(b"\n", begin)
            number += 1
            if end - begin >= limit:
                lines.append(self._truncated_line(number, start + begin, block[begin:end]))
            elif block[begin] > _LAST_BLANK and block[end - 1] > _LAST_BLANK:
                line = view[begin:end]
                lines.append(Line(number, start + begin, end - begin, line, False, is_ascii))
            elif data := block[begin:end].strip(_BLANKS):
                offset = start + block.index(data, begin)
                lines.append(Line(number, offset, len(data), data))
            begin = end + 1
        self._number = number
        return lines

    def _long_line(self, block: bytes, start: int, end: int) -> list[Line]:
        """Returns the line from `start` to `end` in the file; [] if it is blank.

        `block` is its beginning.
        """
        self._number += 1
        if end - start > self._limit:
            return [self._truncated_line(self._number, start, block)]
        raw = block if end - start == len(block) else os.pread(self._handle, end - start, start)
        data = raw.strip(_BLANKS)
        return [Line(self._number, start + raw.index(data), len(data), data)] if data else []

    def _truncated_line(self, number: int, start: int, raw: bytes) -> Line:
        """Returns the truncated form of a line that is too long."""
        raw = raw[: min(self._limit, _MAX_CUT_LINE_BYTES)]
        data = raw.strip(_BLANKS)
        return Line(number, start + raw.index(data), len(data), data, is_cut=True)

    def _end_of_line(self, position: int) -> int:
        """Returns the position after the next newline from `position` on, or the file's end."""
        while block := os.pread(self._handle, _BLOCK, position):
            if size := block.find(b"\n") + 1:
                return position + size
            position += len(block)
        return position


def _keep_freed_memory() -> None:
    """Makes the C library reuse the memory of freed blocks.

    By default, it returns each block to the system and requests new pages, which costs as much as
    reading the file. glibc raises its mmap threshold when a block of this size is freed; the pages
    of this block are never touched.
    """
    bytes(_MMAP_THRESHOLD_BYTES)


class NewLines:
    """Reads the complete lines that were appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[bytes]:
        """Returns the new complete lines; none if the file does not exist yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            complete, newline, _ = stream.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return complete.split(b"\n") if newline else []


class Tail(msgspec.Struct, frozen=True):
    """The end of a text file."""

    lines: list[str]
    """The last lines; the middle of a long line is replaced by its length."""
    num_bytes: int
    """The size of the file."""
    is_whole: bool
    """Whether `lines` has all lines of the file."""


def read_tail(path: Path, max_lines: int, *, max_bytes: int = _MAX_TAIL_BYTES) -> Tail:
    """Returns the last lines of a file, in constant memory.

    They are at most `max_lines` lines with `max_bytes` bytes; the last line is always included.
    """
    lines: list[str] = []
    with path.open("rb", buffering=0) as stream:
        handle, size = stream.fileno(), os.fstat(stream.fileno()).st_size
        end = size - 1 if size and os.pread(handle, 1, size - 1) == b"\n" else size
        position = end if size else -1
        while position >= 0 and len(lines) < max_lines:
            start = _start_of_line(handle, position)
            line = _shown_line(handle, start, position)
            max_bytes -= len(line.encode("utf-8", errors="replace"))
            if max_bytes < 0 and lines:
                break
            lines.append(line)
            position = start - 1
    return Tail(lines[::-1], size, is_whole=position < 0)


def last_line(path: Path) -> str:
    """Returns the last non-blank line of a file, truncated if it is long; "" if there is none."""
    if not path.exists():
        return ""
    lines = [line.strip() for line in read_tail(path, _MAX_TRAILING_LINES).lines]
    return next((line for line in reversed(lines) if line), "")[:_LONGEST_LAST_LINE]


def _start_of_line(handle: int, end: int) -> int:
    """Returns the position after the last newline before `end`, or 0 if there is none."""
    position, size = end, _TAIL_BLOCK
    while position > 0:
        start = max(0, position - size)
        index = os.pread(handle, position - start, start).rfind(b"\n")
        if index >= 0:
            return start + index + 1
        position, size = start, _BLOCK
    return 0


def _shown_line(handle: int, start: int, end: int) -> str:
    """Returns the text of a line from `start` to `end`, without the middle of a long one."""
    length = end - start
    if length <= _LONGEST_SHOWN:
        text = os.pread(handle, length, start).decode("utf-8", errors="replace")
        # Keeps only the final state of a progress bar.
        return text.rstrip("\r").rpartition("\r")[2]
    half = _LONGEST_SHOWN // 2
    first, last = os.pread(handle, half, start), os.pread(handle, half, end - half)
    begin, finish = (part.decode("utf-8", errors="replace") for part in (first, last))
    return f"{begin}… (cut: this line has {length:,} bytes) …{finish}"
