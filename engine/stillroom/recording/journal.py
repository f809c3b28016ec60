"""The journal of recorded calls: a call is on the disk before the client gets its reply's end."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from stillroom.errors import InputError
from stillroom.files import FileLock, cut_torn_line, wait_for_disk
from stillroom.places import make_folder, open_real
from stillroom.recording.records import JOURNAL_NAME

LOCK_NAME = ".recording.lock"
_FULL = 256 << 20
"""The size in bytes from which on calls are written to the next journal."""
_PROBE = bytes(1 << 16)

Outcome = Exception | None
"""Why a call is not on the disk; None if it is."""
_Waiting = tuple[bytes, Callable[[Outcome], None]]
_sync = getattr(os, "fdatasync", os.fsync)


class CallJournal:
    """Writes calls to numbered files in a folder, which only one process at a time does.

    A thread writes all waiting calls at once, followed by one sync. A failed write leaves the file
    as it was.
    """

    def __init__(self, folder: Path, *, full_at: int = _FULL) -> None:
        self.folder, self._full_at = folder, full_at
        self._lock = _locked(folder)
        self.num_cut = 0
        """The number of bytes of torn lines that a killed process left."""
        try:
            number = 1
            for path in journals_in(folder):
                self.num_cut += cut_torn_line(path)
                number = int(path.stem.partition("-")[2])
            self._open(number)
        except BaseException:
            self._lock.release()
            raise
        self._waiting = SimpleQueue[_Waiting | None]()
        self._file = threading.Lock()
        self.num_calls = 0
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def append(self, line: bytes, done: Callable[[Outcome], None]) -> None:
        """Puts a call's line in the queue.

        `done` is called from another thread once it is on the disk, or could not be written.
        """
        self._waiting.put((line, done))

    def can_write(self) -> bool:
        """Returns whether bytes can be written now, after a failed write."""
        with self._file:
            try:
                self._prepare()
                self._is_torn = True
                try:
                    return os.write(self._handle, _PROBE) == len(_PROBE)
                finally:
                    os.ftruncate(self._handle, self._size)
            except OSError:
                return False

    def close(self) -> None:
        """Writes all waiting calls, and lets another process write to the folder."""
        self._waiting.put(None)
        self._thread.join()  # no limit: no recorded call may be lost
        os.close(self._handle)
        self._lock.release()

    def _open(self, number: int) -> None:
        path = self.folder / f"calls-{number:04d}.jsonl"
        handle = open_real(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            # Only the user may read the calls of their programs.
            os.fchmod(handle, 0o600)
            size = os.fstat(handle).st_size
            wait_for_disk(self.folder)
        except BaseException:
            os.close(handle)
            raise
        self.path, self._number = path, number
        self._handle, self._size, self._is_torn = handle, size, False

    def _prepare(self) -> None:
        """Makes the file ready for the next lines. Raises OSError if it cannot be."""
        handle = self._handle
        # Nothing could read calls that are written to a deleted file.
        is_gone = os.fstat(handle).st_nlink == 0
        if is_gone or self._size >= self._full_at:
            # The next file is opened first, so that no connection gets the descriptor in between.
            self._open(self._number if is_gone else self._number + 1)
            os.close(handle)
        elif self._is_torn:
            os.ftruncate(handle, self._size)

    def _write_all(self) -> None:
        is_closing = False
        while not is_closing:
            found = [self._waiting.get()]  # no limit: `close` puts a None
            with suppress(Empty):
                while True:
                    found.append(self._waiting.get_nowait())
            is_closing = None in found
            batch = [one for one in found if one is not None]
            if not batch:
                continue
            with self._file:
                outcome = self._write(b"".join(line for line, _ in batch))
            if outcome is None:
                self.num_calls += len(batch)
            for _, done in batch:
                done(outcome)

    def _write(self, data: bytes) -> Outcome:
        try:
            self._prepare()
            self._is_torn = True
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            _sync(self._handle)
        except OSError as error:
            # Neither torn lines may remain, nor calls whose clients saw no end.
            with suppress(OSError):
                os.ftruncate(self._handle, self._size)
            return error
        self._size += len(data)
        self._is_torn = False
        return None


def _locked(folder: Path) -> FileLock:
    make_folder(folder)
    lock = FileLock(folder / LOCK_NAME)
    if not lock.try_acquire():
        raise InputError(
            f"another `stillroom record` writes into {folder}",
            "stop it, or give another folder with --output",
        )
    return lock


def journals_in(folder: Path) -> list[Path]:
    """Returns the journals of a folder in the order in which they were written."""
    found = [path for path in folder.iterdir() if JOURNAL_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))
