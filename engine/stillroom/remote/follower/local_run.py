"""The folder here of a run on another machine, as its follower reads and writes it."""

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import RunCancelledError
from stillroom.lineage import now
from stillroom.outputs import OutputLock
from stillroom.remote.follower.record import read_record
from stillroom.remote.follower.views import Views
from stillroom.remote.records import JobSpec
from stillroom.run_folder import KILL_MARK, Progress, RunFailure, RunFolder
from stillroom.types import RunStatus

_SHOW_EVERY_S = 1.0


class LocalRun:
    """What all steps of a follower share: the run's folder, its spec, and what is known of it."""

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        self.folder, self.spec = folder, spec
        self.root = Path(folder.read_request().workspace)
        self.record = read_record(folder)
        self.views = Views(folder, spec.machine, self.record)
        self._locks: list[OutputLock] = []
        self._shown_at = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the run's end is written."""
        return self.folder.read().status.is_final

    @property
    def is_to_stop(self) -> bool:
        """Whether the user wishes that the run stops."""
        return self.folder.cancel_mark.exists()

    @property
    def is_to_die(self) -> bool:
        """Whether the user wishes that the run's processes are killed."""
        return (self.folder.path / KILL_MARK).exists()

    def stop_if_cancelled(self) -> None:
        """Raises RunCancelledError if the user wishes that the run stops."""
        if self.is_to_stop:
            raise RunCancelledError

    def show(
        self,
        phase: str,
        done: int = 0,
        total: int = 1,
        unit: str = "steps",
        *,
        at_once: bool = True,
    ) -> None:
        """Shows what is done for the run before it begins, or after it has ended."""
        clock = time.monotonic()
        if clock - self._shown_at < _SHOW_EVERY_S and not at_once:
            return
        self._shown_at = clock
        progress = Progress(phase=phase, done=done, total=total, unit=unit, eta_s=None)
        state = msgspec.structs.replace(self.folder.read(), progress=progress)
        self.folder.write(state, durable=False)

    def end(self, status: RunStatus, problem: str | None = None, fix: str = "") -> None:
        """Writes the end of a run that does not end on its machine."""
        error = RunFailure(problem=problem, fix=fix) if problem is not None else None
        state = msgspec.structs.replace(
            self.folder.read(), status=status, ended_at=now(), error=error, progress=None
        )
        # On a full disk it is tried again.
        with suppress(OSError):
            self.folder.write(state)

    def lock_outputs(self) -> None:
        """Keeps other runs here from writing the same outputs, as a run here does.

        Raises OutputHeldError if one does.
        """
        if self._locks:
            return
        for output in self.spec.outputs:
            if (self.root / output).suffix:
                lock = OutputLock(self.root / output)
                lock.acquire("a run elsewhere", run_id=self.folder.run_id)
                self._locks.append(lock)

    def close(self) -> None:
        """Frees the outputs."""
        for lock in self._locks:
            lock.release()
