"""A temporary file for what an import reads and does not need yet; it has no name on the disk."""

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from stillroom.places import make_folder

_BLOCK = 1 << 20
_READS_KEPT = 256
_MOST_MAPPED = 1 << 30


class Spill:
    """Keeps pieces of bytes in a temporary file, which vanishes with the process."""

    def __init__(self, folder: Path, *, most_mapped: int = _MOST_MAPPED) -> None:
        self.folder, self._most_mapped = folder, most_mapped
        self._waiting: list[bytes] = []
        self._view: mmap.mmap | bytes = b""
        self._num_waiting = self._num_written = self._num_reads = 0

    @property
    def handle(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    def grown_to(self, num_bytes: int) -> None:
        """Says that another process has written the file, up to this length."""
        self._num_written = num_bytes

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
        return self.read_all(((place, num_bytes),))[0]

    def read_all(self, pieces: Iterable[tuple[int, int]]) -> list[bytes]:
        """Returns several pieces, each given by its position and its length."""
        found: list[bytes] = []
        for place, num_bytes in pieces:
            if place + num_bytes > len(self._view):
                self._map()
            view = self._view
            piece = (
                view[place : place + num_bytes] if view else os.pread(self.handle, num_bytes, place)
            )
            found.append(piece)
        self._num_reads += len(found)
        if self._num_reads >= _READS_KEPT and isinstance(self._view, mmap.mmap):
            # The pages that were read would count as memory of this process.
            self._view.madvise(mmap.MADV_DONTNEED)
            self._num_reads = 0
        return found

    def _map(self) -> None:
        """Maps the file into memory, which reads many pieces faster than calls of the system.

        A file that is too large for the addresses that a process may be allowed is not mapped.
        """
        self.flush()
        self._view = b""
        if 0 < self._num_written <= self._most_mapped:
            self._view = mmap.mmap(self._file.fileno(), self._num_written, prot=mmap.PROT_READ)

    def __enter__(self) -> Self:
        make_folder(self.folder)
        # Beside the output and not in the system's folder, which may be small or in memory.
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._view, mmap.mmap):
            self._view.close()
        self._file.close()
