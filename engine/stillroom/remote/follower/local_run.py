"""The local folder of a run on another machine, as its follower reads and writes it."""

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import DataError, RunCancelledError
from stillroom.files import read_json, write_json
from stillroom.lineage import now
from stillroom.outputs import OutputLock
from stillroom.remote.machine import Machine
from stillroom.remote.records import JobSpec
from stillroom.run_folder import (
    KILL_MARK,
    MIRROR_FILE,
    MIRRORED_FILE,
    VIEW_FILE,
    Phase,
    Progress,
    RemoteView,
    RunFailure,
    RunFolder,
    RunState,
    fixed_inputs,
)
from stillroom.types import RunStatus

_SHOW_EVERY_S = 1.0
_WRITE_VIEW_EVERY_S = 1.0
_SPARE_BYTES = 1 << 14
_HOUR_S = 3600.0


class GrownFile(msgspec.Struct, frozen=True, kw_only=True):
    """The mirrored size of a growing file, on the machine and locally."""

    remote_bytes: int = msgspec.field(name="there")
    """The number of remote bytes that have been mirrored."""
    local_bytes: int = msgspec.field(name="here")
    """The size of the local file, which differs because paths are replaced."""
    changed_at: int = 0
    """The local file's modification time (`st_mtime_ns`)."""


class DownloadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The hash, size and modification time of a file when it was downloaded and verified."""

    sha256: str
    num_bytes: int
    changed_at: int


class FollowRecord(msgspec.Struct, kw_only=True):
    """The content of remote_mirror.json: what the next follower needs to resume."""

    used_since: float | None = None
    """When the machine first answered, in seconds since the epoch; None if it never has."""
    before_start_s: float = 0.0
    """How long the machine was used before the run was started."""
    is_started: bool = False
    """Whether the machine has confirmed the start."""
    price_per_hour: float | None = None
    elapsed_s: float = 0.0
    """The seconds from the start to the last contact, by the machine's clock."""
    clock_ahead_s: float | None = None
    """How far the machine's clock is ahead of the local one."""
    contact_at: float | None = None
    """When the machine last answered, in seconds since the epoch."""
    ended_at: float | None = None
    """When the run was first seen to have ended on its machine, in seconds since the epoch."""
    root: str | None = None
    """The run's folder on the machine."""
    bytes_per_s: float | None = None
    """The measured upload speed."""
    grown: dict[str, GrownFile] = {}
    """The mirrored growing files, by path relative to the workspace."""
    changed_locally: list[str] = msgspec.field(name="left_alone", default_factory=list[str])
    """Growing outputs that another local process has changed, and that are not mirrored."""
    initial_stamps: dict[str, str] = msgspec.field(name="before", default_factory=dict[str, str])
    """The stamps of outputs that existed locally when the run was started, by path."""


def read_record(folder: RunFolder) -> FollowRecord:
    """Returns the record of the previous follower; an empty one if there is none."""
    with suppress(FileNotFoundError, DataError):
        return read_json(folder.path / MIRROR_FILE, FollowRecord)
    return FollowRecord()


def write_record(folder: RunFolder, record: FollowRecord, *, durable: bool = False) -> None:
    """Writes the record for the next follower."""
    write_json(folder.path / MIRROR_FILE, record, durable=durable)


def read_downloaded(folder: RunFolder) -> dict[str, DownloadedFile]:
    """Returns the downloaded files by path relative to the workspace."""
    with suppress(FileNotFoundError, DataError):
        content = read_json(folder.path / MIRRORED_FILE, dict[str, dict[str, DownloadedFile]])
        return content.get("brought", {})
    return {}


def write_downloaded(folder: RunFolder, files: dict[str, DownloadedFile]) -> None:
    """Writes the record of downloaded files."""
    write_json(folder.path / MIRRORED_FILE, {"brought": files}, durable=False)


def stamp_of(path: Path) -> str:
    """Returns a string that changes when the file, or a file in the folder, changes."""
    return fixed_inputs([path])[0].stamp


def machine_usd(price_per_hour: float | None, used_s: float) -> float | None:
    """Returns the cost in US dollars of using a machine for `used_s`; None without a price."""
    return None if price_per_hour is None else price_per_hour * used_s / _HOUR_S


class LocalRun:
    """A run's local folder, with the spec, record and view that all steps of a follower share."""

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        self.folder, self.spec = folder, spec
        self.root = Path(folder.read_request().workspace)
        self.record = read_record(folder)
        self.view = ViewFile(folder, spec.machine, self.record)
        self._locks: list[OutputLock] = []
        self._shown_at = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the run's final state is written."""
        return self.folder.read().status.is_final

    @property
    def is_cancelled(self) -> bool:
        """Whether the user has cancelled the run."""
        return self.folder.cancel_mark.exists()

    @property
    def is_kill_requested(self) -> bool:
        """Whether the user has asked to kill the run's processes."""
        return (self.folder.path / KILL_MARK).exists()

    def stop_if_cancelled(self) -> None:
        """Raises RunCancelledError if the user has cancelled the run."""
        if self.is_cancelled:
            raise RunCancelledError

    def show_progress(
        self,
        phase: str,
        done: int = 0,
        total: int = 1,
        unit: str = "steps",
        *,
        is_throttled: bool = False,
    ) -> None:
        """Writes progress to run.json during launch and download; if throttled, once a second."""
        now_s = time.monotonic()
        if is_throttled and now_s - self._shown_at < _SHOW_EVERY_S:
            return
        self._shown_at = now_s
        progress = Progress(phase=phase, done=done, total=total, unit=unit, eta_s=None)
        state = msgspec.structs.replace(self.folder.read(), progress=progress)
        self.folder.write(state, durable=False)

    def end(self, status: RunStatus, problem: str | None = None, fix: str = "") -> None:
        """Writes the final state of a run that did not end on its machine."""
        error = RunFailure(problem=problem, fix=fix) if problem is not None else None
        state = msgspec.structs.replace(
            self.folder.read(), status=status, ended_at=now(), error=error, progress=None
        )
        # On a full disk, the follower tries again.
        with suppress(OSError):
            self.write_final(state)

    def write_final(self, state: RunState) -> None:
        """Writes the final state, once nothing more is written to the run's outputs.

        Whoever reads it may write to them immediately, while the machine is still cleaned up.
        """
        self.close()
        self.folder.write(state)

    def lock_outputs(self) -> None:
        """Locks the run's outputs, as a local run does.

        Raises OutputHeldError if another run is writing one of them.
        """
        if self._locks:
            return
        for output in self.spec.outputs:
            # An output without a suffix is a folder; only files are locked here.
            if (self.root / output).suffix:
                lock = OutputLock(self.root / output)
                lock.acquire("a run on another machine", run_id=self.folder.run_id)
                self._locks.append(lock)

    def close(self) -> None:
        """Releases the locks of the outputs."""
        while self._locks:
            self._locks.pop().release()


class ViewFile:
    """Writes remote_view.json: the run's phase, connection problem and machine cost."""

    def __init__(self, folder: RunFolder, machine: Machine, record: FollowRecord) -> None:
        self._file, self._folder, self._record = folder.path / VIEW_FILE, folder, record
        self._spare = folder.path / ".spare"
        self._view = RemoteView(where=machine.name)
        with suppress(FileNotFoundError, DataError):
            self._view = read_json(self._file, RemoteView)
        self._is_provisioned = machine.access.is_provisioned
        self._bills_from_start = machine.access.bills_from == "start"
        self._written_at = 0.0
        self._elapsed_at: float | None = None
        """When `_elapsed_s` was received (monotonic); None if this process received none."""
        self._elapsed_s = record.elapsed_s

    @property
    def has_started(self) -> bool:
        """Whether the launch was requested; from then on only the machine knows the run's state."""
        return self._view.has_started

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do: the run is downloaded, and its machine is cleaned up."""
        return self._view.phase == "over"

    @property
    def used_s(self) -> float:
        """How long the machine has been used, by its own clock while the run is on it."""
        record = self._record
        if record.is_started:
            return record.before_start_s + self._since_start_s()
        return 0.0 if record.used_since is None else max(0.0, time.time() - record.used_since)

    @property
    def machine_usd(self) -> float | None:
        """The machine's cost so far, up to the run's end; None without a price."""
        return machine_usd(self._record.price_per_hour, self.used_s)

    @property
    def _release_usd(self) -> float | None:
        """The cost since the run's end of a provisioned machine; None before, and for any other."""
        if not self._is_provisioned or (ended_at := self._record.ended_at) is None:
            return None
        return machine_usd(self._record.price_per_hour, max(0.0, time.time() - ended_at))

    def record_phase(self, phase: Phase) -> None:
        """Records the run's phase."""
        if phase != self._view.phase:
            self._write(phase=phase)

    def record_launch(self) -> None:
        """Records that the launch is about to be requested."""
        self._write(has_started=True, durable=True)

    def record_use(self) -> None:
        """Records that the machine may cost money from now on."""
        self._record.used_since = self._record.used_since or time.time()
        write_record(self._folder, self._record)

    def record_end(self) -> None:
        """Records that the run has ended on its machine, so that its cost no longer grows."""
        if self._record.ended_at is None:
            self._record.ended_at = time.time()
            write_record(self._folder, self._record, durable=True)

    def record_contact(self, *, elapsed_s: float | None = None) -> None:
        """Records that the machine has answered."""
        record = self._record
        if not self._bills_from_start:
            record.used_since = record.used_since or time.time()
        if elapsed_s is not None and record.ended_at is None:
            self._elapsed_at, self._elapsed_s = time.monotonic(), elapsed_s
        record.contact_at = time.time()
        is_new = self._view.problem is not None or self._view.last_contact is None
        if is_new or time.monotonic() - self._written_at >= _WRITE_VIEW_EVERY_S:
            write_record(self._folder, record)
            # The problem of a failed start is shown until a retry succeeds.
            is_retried = self.has_started and not record.is_started
            self._write(last_contact=now(), problem=self._view.problem if is_retried else None)

    def record_problem(self, text: str) -> None:
        """Records why the run cannot be advanced at present, and what to do.

        The cost is updated on each retry too, since the machine may still be billed.
        """
        is_due = time.monotonic() - self._written_at >= _WRITE_VIEW_EVERY_S
        if text != self._view.problem or is_due:
            self._write(problem=text)

    def record_done(self) -> None:
        """Records that nothing is left to do for the run."""
        self._write(phase="over", problem=None, durable=True)

    def _since_start_s(self) -> float:
        """Returns the seconds since the run's start, by the machine's clock while it answers."""
        if self.is_done or self._record.ended_at is not None:
            return self._elapsed_s
        if self._elapsed_at is not None:
            return self._elapsed_s + time.monotonic() - self._elapsed_at
        if self._record.contact_at is not None:
            return self._elapsed_s + max(0.0, time.time() - self._record.contact_at)
        return self._elapsed_s

    def _write(self, *, durable: bool = False, **changes: object) -> None:
        """Writes changes to the view, with the current cost."""
        cost = {
            "machine_usd": self.machine_usd,
            "release_usd": self._release_usd,
            "seconds_used": round(self.used_s, 1),
        }
        self._view = msgspec.structs.replace(self._view, **{**cost, **changes})
        self._written_at = time.monotonic()
        if not self._folder.path.exists():
            return  # The run was deleted, and its folder must not be created again.
        try:
            write_json(self._file, self._view, durable=durable)
            self._reserve_disk_space()
        except OSError:
            # The disk is full. The view must still show that, so the reserved space is freed.
            with suppress(OSError):
                self._spare.unlink(missing_ok=True)
                write_json(self._file, self._view, durable=False)

    def _reserve_disk_space(self) -> None:
        """Reserves disk space, so that the view can still be written when the disk is full."""
        if self.is_done:
            self._spare.unlink(missing_ok=True)
        elif not self._spare.exists():
            with suppress(OSError):
                self._spare.write_bytes(os.urandom(_SPARE_BYTES))
