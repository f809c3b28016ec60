"""Brings files back beside the mirroring, which a large checkpoint must not hold up."""

import threading
from contextlib import suppress
from typing import Self

from stillroom.remote.follower.download import Download, StoppedError
from stillroom.remote.host import MachineError
from stillroom.remote.records import RemoteFiles


class Downloader:
    """A thread that brings back the latest list of finished files."""

    def __init__(self, files: Download) -> None:
        self._files = files
        self._changed = threading.Condition()
        self._wanted: RemoteFiles | None = None
        self._done: RemoteFiles | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def bring(self, files: RemoteFiles) -> None:
        """Has these files brought back; what an earlier list wanted and this one not is left."""
        with self._changed:
            self._wanted = files
            self._changed.notify()

    def is_done(self, files: RemoteFiles) -> bool:
        """Returns whether all of these files are here."""
        return self._done is files

    def raise_error(self) -> None:
        """Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with suppress(StoppedError):
                while (wanted := self._next()) is not None:
                    self._take(wanted)
                    self._done = wanted
        # It is raised again in the thread that asked.
        except BaseException as error:
            self._error = error

    def _take(self, wanted: RemoteFiles) -> None:
        try:
            self._files.take(wanted.files, is_last=wanted.is_last, is_stopped=self._is_stopped)
        except MachineError:
            # A checkpoint may be pruned there just now; the next list says so.
            if wanted.is_last:
                raise

    def _next(self) -> RemoteFiles | None:
        with self._changed:
            while self._wanted is self._done and not self._is_closed:
                self._changed.wait()  # no limit: `__exit__` notifies it
            return None if self._is_closed else self._wanted

    def _is_stopped(self) -> bool:
        return self._is_closed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()  # no limit: each read of the download has one
