"""The journal of recorded calls: a call is on disk before the client gets the end of its reply."""

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
_ROTATE_AT_BYTES = 256 << 20
"""The size of a journal file in bytes from which a new one is started."""
_PROBE = bytes(1 << 16)
"""Bytes that are written and removed again, to test whether writing works."""

Outcome = Exception | None
"""The error that kept a call from being written; None if it is on disk."""
_QueuedCall = tuple[bytes, Callable[[Outcome], None]]
_sync = getattr(os, "fdatasync", os.fsync)


class CallJournal:
    """Writes calls to numbered files in a folder, which it locks against other processes.

    A thread writes all queued calls together, with one sync. A failed write leaves the file
    unchanged. A new file is started once one has `rotate_at` bytes.
    """

    def __init__(self, folder: Path, *, rotate_at: int = _ROTATE_AT_BYTES) -> None:
        self.folder, self._rotate_at = folder, rotate_at
        self._folder_lock = _acquire_lock(folder)
        self.num_cut = 0
        """The number of bytes cut off: incomplete lines that a killed process left."""
        try:
            number = 1
            for path in journals_in(folder):
                self.num_cut += cut_torn_line(path)
                number = int(path.stem.partition("-")[2])
            self._open(number)
        except BaseException:
            self._folder_lock.release()
            raise
        self._queue = SimpleQueue[_QueuedCall | None]()
        self._file_lock = threading.Lock()
        self.num_calls = 0
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def append(self, line: bytes, done: Callable[[Outcome], None]) -> None:
        """Queues a call's line to be written.

        `done` is called from the writing thread once the line is on disk, or has failed.
        """
        self._queue.put((line, done))

    def can_write(self) -> bool:
        """Returns whether the journal can be written, tested with a write that is then removed."""
        with self._file_lock:
            try:
                self._prepare_write()
                self._is_torn = True
                try:
                    return os.write(self._handle, _PROBE) == len(_PROBE)
                finally:
                    os.ftruncate(self._handle, self._size)
            except OSError:
                return False

    def close(self) -> None:
        """Writes all queued calls, and releases the lock on the folder."""
        self._queue.put(None)
        self._thread.join()  # no limit: no recorded call may be lost
        os.close(self._handle)
        self._folder_lock.release()

    def _open(self, number: int) -> None:
        """Opens the journal with this number for appending."""
        path = self.folder / f"calls-{number:04d}.jsonl"
        handle = open_real(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            # The calls of a user's programs are readable by that user only.
            os.fchmod(handle, 0o600)
            size = os.fstat(handle).st_size
            wait_for_disk(self.folder)
        except BaseException:
            os.close(handle)
            raise
        self.path, self._number = path, number
        self._handle, self._size = handle, size
        self._is_torn = False
        """Whether an incomplete line may follow the first `_size` bytes."""

    def _prepare_write(self) -> None:
        """Opens the next file, or removes a torn line, if a write needs it. Raises OSError."""
        handle = self._handle
        # Calls written to a deleted file would be lost.
        is_gone = os.fstat(handle).st_nlink == 0
        if is_gone or self._size >= self._rotate_at:
            # The next file is opened first, so that no connection can reuse the descriptor.
            self._open(self._number if is_gone else self._number + 1)
            os.close(handle)
        elif self._is_torn:
            os.ftruncate(handle, self._size)

    def _write_all(self) -> None:
        """Writes queued calls until the journal is closed; runs in the journal's thread."""
        is_closing = False
        while not is_closing:
            queued = [self._queue.get()]  # no limit: `close` puts a None
            with suppress(Empty):
                while True:
                    queued.append(self._queue.get_nowait())
            is_closing = None in queued
            batch = [call for call in queued if call is not None]
            if not batch:
                continue
            with self._file_lock:
                outcome = self._write(b"".join(line for line, _ in batch))
            if outcome is None:
                self.num_calls += len(batch)
            for _, done in batch:
                done(outcome)

    def _write(self, data: bytes) -> Outcome:
        """Appends lines and syncs the file; returns the error if that fails."""
        try:
            self._prepare_write()
            self._is_torn = True
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(self._handle, remaining) :]
            _sync(self._handle)
        except OSError as error:
            # A call whose client did not get the end of its reply must not be in the journal.
            with suppress(OSError):
                os.ftruncate(self._handle, self._size)
            return error
        self._size += len(data)
        self._is_torn = False
        return None


def _acquire_lock(folder: Path) -> FileLock:
    """Creates and locks the folder. Raises InputError if another process has locked it."""
    make_folder(folder)
    lock = FileLock(folder / LOCK_NAME)
    if not lock.try_acquire():
        raise InputError(
            f"another `stillroom record` is writing to {folder}",
            "stop it, or give another folder with --output",
        )
    return lock


def journals_in(folder: Path) -> list[Path]:
    """Returns the journals of a folder in the order in which they were written."""
    journals = [path for path in folder.iterdir() if JOURNAL_NAME.fullmatch(path.name)]
    return sorted(journals, key=lambda path: int(path.stem.partition("-")[2]))
