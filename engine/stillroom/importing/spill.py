"""Temporary files for data that would take too much memory."""

import os
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from stillroom.places import make_folder

_BLOCK = 1 << 20
_Key = TypeVar("_Key", bound=Hashable)


class Spill:
    """Stores chunks of bytes in an unnamed temporary file, which disappears with the process."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is where the file is created: the system's default may be small or in memory."""
        self._folder = folder
        self._pending: list[bytes] = []
        self._num_pending = self._num_written = 0

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
        unwritten = memoryview(b"".join(self._pending))
        self._num_written += len(unwritten)
        self._pending.clear()
        self._num_pending = 0
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Returns the chunk of this length at an offset."""
        if offset + num_bytes > self._num_written:
            self._write_pending()
        return os.pread(self._file.fileno(), num_bytes, offset)

    def __enter__(self) -> Self:
        if self._folder is not None:
            make_folder(self._folder)
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class DiskDict(Generic[_Key]):
    """A dictionary with its keys in memory and its values as JSON in a temporary file."""

    def __init__(self) -> None:
        self._spill = Spill()
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
