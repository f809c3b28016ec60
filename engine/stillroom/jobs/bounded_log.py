"""A log file that keeps its beginning and its latest end, and says how much it has left out."""

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from stillroom.places import open_real

_MAX_BYTES = 32 << 20


class BoundedLog:
    """Appends to a file; when that grows too long, bytes from its middle are left out.

    Bytes that the disk refuses are counted and left out too: a run must not end because of its log.
    """

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._path = path
        self._max, self._head, self._tail = max_bytes, max_bytes // 8, 3 * max_bytes // 8
        self._left_out = self._refused = 0
        self._stream = FileIO(open_real(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")
        self._size = path.stat().st_size
        self._note = b""

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        if self._refused:
            data = _note(self._refused, "the disk was full") + data
        try:
            written = self._stream.write(data)
        except OSError:
            self._refused += len(data)
            return
        self._refused = len(data) - written
        self._size += written
        if self._size > self._max:
            with suppress(OSError):
                self._shorten()

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _shorten(self) -> None:
        """Replaces the file by its beginning, a note, and its end."""
        with self._path.open("rb") as stream:
            head = stream.read(self._head)
            # The note of the time before follows the same beginning, and is written anew.
            stream.seek(-self._tail, 2)
            tail = stream.read()
        self._left_out += self._size - len(head) - len(self._note) - len(tail)
        note = _note(self._left_out, "the log was too long")
        temporary = self._path.with_name(f".{self._path.name}.shorter")
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC
            stream = FileIO(open_real(temporary, flags), "a")
            rest = memoryview(head + note + tail)
            while rest:
                rest = rest[stream.write(rest) :]
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._stream.close()
        self._stream, self._note = stream, note
        self._size = len(head) + len(note) + len(tail)


def _note(num_bytes: int, reason: str) -> bytes:
    return f"\n[{num_bytes} bytes are left out here: {reason}]\n".encode()
