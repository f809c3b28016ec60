"""Fast access to any page of rows in a data file of any length."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from stillroom import bounds
from stillroom.errors import InputError
from stillroom.lines import BOM
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace

SUFFIXES = (".jsonl", ".txt")
_BLOCK = 1 << 20
_HEAD_BYTES = 2000
_MAX_INDEXES = 16
MAX_SHOWN_BYTES = bounds.SHOWN_ROW.limit
"""The maximum number of bytes of a line that are read, since a browser could not show more."""


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a file: its number (from 1), the offset of its first byte, and its bytes."""

    number: int
    offset: int
    data: bytes
    is_cut: bool = False
    """Whether only the beginning of the line was read."""


@dataclass(slots=True)
class _LineIndex:
    """The number of lines before each block of a file; it grows with the file."""

    identity: tuple[int, int] = (0, 0)
    """The device and inode of the file."""
    size: int = 0
    mtime_ns: int = 0
    lines: list[int] = field(default_factory=lambda: [0])
    """The number of line ends before each block of the file, and at its end."""
    ends_line: bool = True
    """Whether the file ends with a line end."""

    def update(self, path: Path) -> None:
        """Counts the lines that were appended, or all lines if the file was replaced."""
        with path.open("rb", buffering=0) as stream:
            stat = os.fstat(stream.fileno())
            identity = (stat.st_dev, stat.st_ino)
            if (identity, stat.st_size, stat.st_mtime_ns) == (
                self.identity, self.size, self.mtime_ns
            ):  # fmt: skip
                return
            if identity != self.identity or stat.st_size <= self.size:
                self.lines = [0]
            else:
                # The last block was incomplete when it was counted.
                self.lines.pop()
            self.identity, self.mtime_ns = identity, stat.st_mtime_ns
            self.lines = self.lines or [0]
            start = (len(self.lines) - 1) * _BLOCK
            # Lines that are appended after the stat are counted by the next call.
            while block := os.pread(stream.fileno(), min(_BLOCK, stat.st_size - start), start):
                self.lines.append(self.lines[-1] + block.count(b"\n"))
                start += len(block)
                self.ends_line = block.endswith(b"\n")
            self.size = start

    @property
    def num_lines(self) -> int:
        return self.lines[-1] + (not self.ends_line)


class RowFiles:
    """The data files of a workspace, with line indexes of the most recently read files."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._indexes: OrderedDict[Path, _LineIndex] = OrderedDict()
        self._lock = Lock()

    def path(self, name: str) -> Path:
        """Returns the path of a data file.

        Raises InputError if it is outside the workspace, or may not be read.
        """
        path = self._workspace.path(name).resolve()
        fix = "open a file that the Data page lists"
        if not path.is_relative_to(self._workspace.root):
            raise InputError(f"{name!r} is outside the workspace", fix)
        check_readable(path)
        if path.suffix not in SUFFIXES or not path.is_file():
            raise InputError(f"{name!r} is not a data file", fix)
        return path

    def count_lines(self, path: Path) -> int:
        """Returns the number of lines of a file."""
        with self._lock:
            return self._index_of(path).num_lines

    def read(self, path: Path, first: int, num_rows: int) -> list[FileLine]:
        """Returns at most `num_rows` lines of a file, from line `first` (counted from 0)."""
        with self._lock:
            index = self._index_of(path)
            # The block that contains the line end before the first requested line.
            block = max(0, bisect_right(index.lines, first - 1) - 1) if first else 0
            num_before = index.lines[block]
        lines = _lines_from(path, block * _BLOCK, num_before)
        rows: list[FileLine] = []
        for row in lines:
            if row.number > first:
                rows.append(row)
            if len(rows) == num_rows:
                break
        return rows

    def read_at(self, path: Path, offset: int) -> bytes:
        """Returns the line that begins at an offset.

        Raises InputError if no line begins there, or if the line is too long to show.
        """
        with path.open("rb") as stream:
            if not _seek_to_line(stream, offset):
                raise InputError(f"no row begins at byte {offset}", "reload the page of rows")
            line = stream.readline(MAX_SHOWN_BYTES)
        if _is_cut(line):
            raise InputError(
                f"this row is longer than {MAX_SHOWN_BYTES >> 20} MB and begins: {head_of(line)}",
                "open the file with another program",
            )
        return _cleaned(line)

    def _index_of(self, path: Path) -> _LineIndex:
        """Returns the up-to-date index of a file; the caller holds the lock."""
        index = self._indexes.setdefault(path, _LineIndex())
        self._indexes.move_to_end(path)
        if len(self._indexes) > _MAX_INDEXES:
            self._indexes.popitem(last=False)
        index.update(path)
        return index


def _lines_from(path: Path, start: int, num_before: int) -> Iterator[FileLine]:
    """Yields the lines after the first line end at or after `start`; all lines if it is 0.

    num_before: the number of line ends before `start`.
    """
    with path.open("rb") as stream:
        stream.seek(start)
        number = num_before
        if start:
            # Skips the line that began in the previous block.
            stream.readline()
            number += 1
        while True:
            offset = stream.tell()
            line = piece = stream.readline(MAX_SHOWN_BYTES)
            if not line:
                return
            while _is_cut(piece):
                piece = stream.readline(MAX_SHOWN_BYTES)
            number += 1
            yield FileLine(number, offset, _cleaned(line), _is_cut(line))


def _seek_to_line(stream: BinaryIO, offset: int) -> bool:
    """Moves the stream to an offset if a line begins there, and returns whether one does."""
    if offset <= 0:
        return offset == 0
    if offset >= os.fstat(stream.fileno()).st_size:
        return False
    stream.seek(offset - 1)
    return stream.read(1) == b"\n"


def head_of(line: bytes) -> str:
    """Returns the beginning of a line that is too long to show."""
    return line[:_HEAD_BYTES].decode("utf-8", errors="replace") + "…"


def _is_cut(line: bytes) -> bool:
    return len(line) == MAX_SHOWN_BYTES and not line.endswith(b"\n")


def _cleaned(line: bytes) -> bytes:
    return line.removeprefix(BOM).strip()
