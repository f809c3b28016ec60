"""The folder here of a run on another machine, as its follower reads and writes it."""

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
from stillroom.remote.records import JobSpec, Phase, RemoteView
from stillroom.run_folder import (
    KILL_MARK,
    MIRROR_FILE,
    MIRRORED_FILE,
    VIEW_FILE,
    Progress,
    RunFailure,
    RunFolder,
    fixed_inputs,
)
from stillroom.types import RunStatus

_SHOW_EVERY_S = 1.0
_WRITE_VIEW_EVERY_S = 1.0
_SPARE_BYTES = 1 << 14
_HOUR_S = 3600.0


class GrownFile(msgspec.Struct, frozen=True, kw_only=True):
    """How far a growing file has been mirrored."""

    remote_bytes: int = msgspec.field(name="there")
    """The bytes of it on the machine that are here."""
    local_bytes: int = msgspec.field(name="here")
    """The size that they have here, where texts name other paths."""
    changed_at: int = 0
    """When the file here was written last (`st_mtime_ns`)."""


class DownloadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was downloaded and verified, and how it was then."""

    sha256: str
    num_bytes: int
    changed_at: int


class FollowRecord(msgspec.Struct, kw_only=True):
    """The content of remote_mirror.json: what the next follower needs to resume."""

    used_since: float | None = None
    """When the machine answered first, in seconds since the epoch; None if it never has."""
    before_start_s: float = 0.0
    """How long the machine had been used when the run was started."""
    is_started: bool = False
    """Whether the machine has confirmed the start."""
    price_per_hour: float | None = None
    elapsed_s: float = 0.0
    """The seconds since the start, by the machine's clock, at the last contact."""
    clock_ahead_s: float | None = None
    """How far the machine's clock is ahead."""
    contact_at: float | None = None
    """When the machine answered last, in seconds since the epoch."""
    root: str | None = None
    """The run's folder on the machine."""
    bytes_per_s: float | None = None
    """How fast files were sent."""
    grown: dict[str, GrownFile] = {}
    left_alone: list[str] = []
    """Growing files outside the run's folder that somebody else has changed here."""
    before: dict[str, str] = {}
    """The stamps of outputs that were here when the run was started."""


class _DownloadedFiles(msgspec.Struct, kw_only=True):
    """The content of remote_files.json."""

    files: dict[str, DownloadedFile] = msgspec.field(name="brought", default_factory=dict)
    """By the paths relative to the workspace."""


def read_record(folder: RunFolder) -> FollowRecord:
    """Returns what the follower before this one has written."""
    with suppress(FileNotFoundError, DataError):
        return read_json(folder.path / MIRROR_FILE, FollowRecord)
    return FollowRecord()


def write_record(folder: RunFolder, record: FollowRecord, *, durable: bool = False) -> None:
    """Writes what the follower after this one needs."""
    write_json(folder.path / MIRROR_FILE, record, durable=durable)


def read_downloaded(folder: RunFolder) -> dict[str, DownloadedFile]:
    """Returns the files that were downloaded, by their paths relative to the workspace."""
    with suppress(FileNotFoundError, DataError):
        return read_json(folder.path / MIRRORED_FILE, _DownloadedFiles).files
    return {}


def write_downloaded(folder: RunFolder, files: dict[str, DownloadedFile]) -> None:
    """Writes which files were downloaded."""
    write_json(folder.path / MIRRORED_FILE, _DownloadedFiles(files=files), durable=False)


def stamp_of(path: Path) -> str:
    """Returns a text that changes with a file, or with the files of a folder."""
    return fixed_inputs([path])[0].stamp


def machine_usd(price_per_hour: float | None, used_s: float) -> float | None:
    """Returns what a machine has cost that was used for so many seconds; None without a price."""
    return None if price_per_hour is None else price_per_hour * used_s / _HOUR_S


class LocalRun:
    """What all steps of a follower share: the run's folder, its spec, and what is known of it."""

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        self.folder, self.spec = folder, spec
        self.root = Path(folder.read_request().workspace)
        self.record = read_record(folder)
        self.view = ViewFile(folder, spec.machine, self.record)
        self._locks: list[OutputLock] = []
        self._shown_at = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the run's end is written."""
        return self.folder.read().status.is_final

    @property
    def is_cancelled(self) -> bool:
        """Whether the user has cancelled the run."""
        return self.folder.cancel_mark.exists()

    @property
    def is_killed(self) -> bool:
        """Whether the user wants the run's processes killed."""
        return (self.folder.path / KILL_MARK).exists()

    def stop_if_cancelled(self) -> None:
        """Raises RunCancelledError if the user has cancelled the run."""
        if self.is_cancelled:
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
        # On a full disk it is retried.
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


class ViewFile:
    """Writes remote_view.json: how far the run is, why it cannot be reached, what it has cost."""

    def __init__(self, folder: RunFolder, machine: Machine, record: FollowRecord) -> None:
        self._file, self._folder, self._record = folder.path / VIEW_FILE, folder, record
        self._spare = folder.path / ".spare"
        self._view = RemoteView(where=machine.name, phase="waiting")
        with suppress(FileNotFoundError, DataError):
            self._view = read_json(self._file, RemoteView)
        self._bills_from_start = machine.access.bills_from == "start"
        self._written_at = 0.0
        self._elapsed_at: float | None = None
        self._elapsed_s = record.elapsed_s

    @property
    def has_started(self) -> bool:
        """Whether the start was requested: from then on only the machine knows the run's state."""
        return self._view.has_started

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self._view.phase == "over"

    @property
    def used_s(self) -> float:
        """How long the machine has been used: by its own clock while the run is on it."""
        record = self._record
        if record.is_started:
            return record.before_start_s + self._since_start_s()
        return 0.0 if record.used_since is None else max(0.0, time.time() - record.used_since)

    @property
    def machine_usd(self) -> float | None:
        """What the machine has cost so far; None without a price."""
        return machine_usd(self._record.price_per_hour, self.used_s)

    def phase(self, phase: Phase) -> None:
        """Notes how far the run has come."""
        if phase != self._view.phase:
            self._write(phase=phase)

    def starting(self) -> None:
        """Notes that the start is requested now."""
        self._write(has_started=True, durable=True)

    def in_use(self) -> None:
        """Notes that the machine may cost money from now on."""
        self._record.used_since = self._record.used_since or time.time()
        write_record(self._folder, self._record)

    def contact(self, *, elapsed_s: float | None = None) -> None:
        """Notes that the machine has answered."""
        record = self._record
        if not self._bills_from_start:
            record.used_since = record.used_since or time.time()
        if elapsed_s is not None:
            self._elapsed_at, self._elapsed_s = time.monotonic(), elapsed_s
        record.contact_at = time.time()
        is_new = self._view.problem is not None or self._view.last_contact is None
        if is_new or time.monotonic() - self._written_at >= _WRITE_VIEW_EVERY_S:
            write_record(self._folder, record)
            self._write(last_contact=now(), problem=None)

    def problem(self, text: str) -> None:
        """Notes why the run cannot proceed or be reached at the moment, and what to do.

        The machine may cost meanwhile, so that its cost is written again with each try.
        """
        is_due = time.monotonic() - self._written_at >= _WRITE_VIEW_EVERY_S
        if text != self._view.problem or is_due:
            self._write(problem=text)

    def over(self) -> None:
        """Notes that nothing is left to do."""
        self._write(phase="over", problem=None, durable=True)

    def _since_start_s(self) -> float:
        if self.is_over:
            return self._elapsed_s
        if self._elapsed_at is not None:
            return self._elapsed_s + time.monotonic() - self._elapsed_at
        if self._record.contact_at is not None:
            return self._elapsed_s + max(0.0, time.time() - self._record.contact_at)
        return self._elapsed_s

    def _write(self, *, durable: bool = False, **changes: object) -> None:
        cost = {"machine_usd": self.machine_usd, "seconds_used": round(self.used_s, 1)}
        self._view = msgspec.structs.replace(self._view, **{**cost, **changes})
        self._written_at = time.monotonic()
        if not self._folder.path.exists():
            return  # Somebody has deleted the run, which is not to come back as half of one.
        try:
            write_json(self._file, self._view, durable=durable)
            self._keep_spare_bytes()
        except OSError:
            # The disk is full, and that is what a user has to read.
            with suppress(OSError):
                self._spare.unlink(missing_ok=True)
                write_json(self._file, self._view, durable=False)

    def _keep_spare_bytes(self) -> None:
        """Keeps some space, so that the view can still be written when the disk is full."""
        if self.is_over:
            self._spare.unlink(missing_ok=True)
        elif not self._spare.exists():
            with suppress(OSError):
                self._spare.write_bytes(os.urandom(_SPARE_BYTES))
