"""A temporary file for what an import reads and does not need yet; it has no name on the disk."""

import os
import tempfile
from pathlib import Path
from typing import Self

from stillroom.places import make_folder

_BLOCK = 1 << 20


class Spill:
    """Keeps pieces of bytes in a temporary file, which vanishes with the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[bytes] = []
        self._num_waiting = self._num_written = 0

    def append(self, data: bytes) -> int:
        """Keeps a piece and returns its position."""
        place = self._num_written + self._num_waiting
        self._waiting.append(data)
        self._num_waiting += len(data)
        if self._num_waiting >= _BLOCK:
            self.flush()
        return place

    def flush(self) -> None:
        """Writes what still waits in memory."""
        rest = memoryview(b"".join(self._waiting))
        self._num_written += len(rest)
        self._waiting.clear()
        self._num_waiting = 0
        while rest:
            rest = rest[self._file.write(rest) :]

    def read(self, place: int, num_bytes: int) -> bytes:
        """Returns the piece of this length at a position."""
        if place + num_bytes > self._num_written:
            self.flush()
        return os.pread(self._file.fileno(), num_bytes, place)

    def __enter__(self) -> Self:
        make_folder(self._folder)
        # Beside the output and not in the system's folder, which may be small or in memory.
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
