"""Temporary files for data that would take too much memory."""

import mmap
import os
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from stillroom.places import make_folder

_BLOCK = 1 << 20
_READS_KEPT = 256
_MAX_MAPPED_BYTES = 1 << 30
_Key = TypeVar("_Key", bound=Hashable)


class Spill:
    """Stores chunks of bytes in an unnamed temporary file, which disappears with the process."""

    def __init__(self, folder: Path | None = None, *, most_mapped: int = _MAX_MAPPED_BYTES) -> None:
        """`folder` is where the file is created: the system's default may be small or in memory.

        A file of more than `most_mapped` bytes is read with system calls, not mapped into memory.
        """
        self._folder, self._most_mapped = folder, most_mapped
        self._pending: list[bytes] = []
        self._view: mmap.mmap | bytes = b""
        self._num_pending = self._num_written = self._num_reads = 0

    def append(self, data: bytes) -> int:
        """Stores a chunk and returns its offset."""
        offset = self._num_written + self._num_pending
        self._pending.append(data)
        self._num_pending += len(data)
        if self._num_pending >= _BLOCK:
            self._write_pending()
        return offset

    def _write_pending(self) -> None:
        """Writes the pending chunks to the file."""
        rest = memoryview(b"".join(self._pending))
        self._num_written += len(rest)
        self._pending.clear()
        self._num_pending = 0
        while rest:
            rest = rest[self._file.write(rest) :]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Returns the chunk of this length at an offset."""
        return self.read_all(((offset, num_bytes),))[0]

    def read_all(self, chunks: Iterable[tuple[int, int]]) -> list[bytes]:
        """Returns several chunks, each given as (offset, length)."""
        found: list[bytes] = []
        for offset, num_bytes in chunks:
            if offset + num_bytes > len(self._view):
                self._map_file()
            view, handle = self._view, self._file.fileno()
            found.append(
                view[offset : offset + num_bytes] if view else os.pread(handle, num_bytes, offset)
            )
        self._num_reads += len(found)
        if self._num_reads >= _READS_KEPT and isinstance(self._view, mmap.mmap):
            # Pages that were read would count as this process's memory.
            self._view.madvise(mmap.MADV_DONTNEED)
            self._num_reads = 0
        return found

    def _map_file(self) -> None:
        """Maps the file into memory, if it is small enough: reading many chunks is then faster.

        A larger mapping could exceed a limit on the process's address space.
        """
        self._write_pending()
        self._view = b""
        if 0 < self._num_written <= self._most_mapped:
            self._view = mmap.mmap(self._file.fileno(), self._num_written, prot=mmap.PROT_READ)

    def __enter__(self) -> Self:
        if self._folder is not None:
            make_folder(self._folder)
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._view, mmap.mmap):
            self._view.close()
        self._file.close()


class DiskDict(Generic[_Key]):
    """A dictionary with its keys in memory and its values as JSON in a temporary file."""

    def __init__(self) -> None:
        self._spill = Spill(most_mapped=0)
        self._chunks: dict[_Key, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._spill.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._spill.__exit__(*_)

    def add(self, key: _Key, value: Any) -> bool:
        """Adds a value and returns True; returns False if the key exists."""
        if key in self._chunks:
            return False
        data = msgspec.json.encode(value)
        self._chunks[key] = self._spill.append(data), len(data)
        return True

    def get(self, key: _Key) -> Any:
        """Returns the value of a key, or None."""
        chunk = self._chunks.get(key)
        return None if chunk is None else msgspec.json.decode(self._spill.read(*chunk))

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._chunks)
