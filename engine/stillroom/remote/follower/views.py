"""Writes how old the view of a run is, what stands in its way, and what its machine has cost."""

import os
import time
from contextlib import suppress

import msgspec

from stillroom.errors import DataError
from stillroom.files import read_json, write_json
from stillroom.lineage import now
from stillroom.remote.cost import machine_usd
from stillroom.remote.follower.record import FollowRecord, write_record
from stillroom.remote.records import Machine, Phase, RemoteView
from stillroom.run_folder import VIEW_FILE, RunFolder

_WRITE_EVERY_S = 1.0
_SPARE_BYTES = 1 << 14


class Views:
    """The view of a run, which any program here reads at once."""

    def __init__(self, folder: RunFolder, machine: Machine, record: FollowRecord) -> None:
        self._file, self._folder, self._record = folder.path / VIEW_FILE, folder, record
        self._spare = folder.path / ".spare"
        self.view = RemoteView(where=machine.name, phase="waiting")
        with suppress(FileNotFoundError, DataError):
            self.view = read_json(self._file, RemoteView)
        # A job begins with the run's start: until then files go to a bucket, which costs nothing.
        self._is_job = machine.hf_jobs is not None
        self._written_at = 0.0
        self._heard_at: float | None = None
        self._heard_elapsed_s = record.elapsed_s

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.view.phase == "over"

    @property
    def used_s(self) -> float:
        """How long the machine has been used: by its own clock while the run is there."""
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
        if phase != self.view.phase:
            self._write(phase=phase)

    def started(self) -> None:
        """Notes, before the machine is told, that from now on only it knows how the run stands."""
        self._write(has_started=True, durable=True)

    def in_use(self) -> None:
        """Notes that the machine may cost money from now on."""
        self._use()
        write_record(self._folder, self._record)

    def _use(self) -> None:
        if self._record.used_since is None:
            self._record.used_since = time.time()

    def contact(self, *, elapsed_s: float | None = None) -> None:
        """Notes that the machine has answered."""
        record = self._record
        if not self._is_job:
            self._use()
        if elapsed_s is not None:
            self._heard_at, self._heard_elapsed_s = time.monotonic(), elapsed_s
        record.contact_at = time.time()
        is_new = self.view.problem is not None or self.view.last_contact is None
        if is_new or time.monotonic() - self._written_at >= _WRITE_EVERY_S:
            write_record(self._folder, record)
            self._write(last_contact=now(), problem=None)

    def problem(self, text: str) -> None:
        """Notes what stands in the way at the moment, and what to do."""
        if text != self.view.problem:
            self._write(problem=text)

    def over(self) -> None:
        """Notes that nothing is left to do."""
        self._write(phase="over", problem=None, durable=True)

    def _since_start_s(self) -> float:
        if self.view.phase == "over":
            return self._heard_elapsed_s
        if self._heard_at is not None:
            return self._heard_elapsed_s + time.monotonic() - self._heard_at
        if self._record.contact_at is not None:
            return self._heard_elapsed_s + max(0.0, time.time() - self._record.contact_at)
        return self._heard_elapsed_s

    def _write(self, *, durable: bool = False, **changes: object) -> None:
        self.view = msgspec.structs.replace(
            self.view,
            **{
                "machine_usd": self.machine_usd,
                "seconds_there": round(self.used_s, 1),
                **changes,
            },
        )
        self._written_at = time.monotonic()
        if not self._folder.path.exists():
            return  # Somebody has deleted the run, which is not to come back as half of one.
        try:
            write_json(self._file, self.view, durable=durable)
            self._keep_room()
        except OSError:
            # The disk is full, and that is what a user has to read.
            with suppress(OSError):
                self._spare.unlink(missing_ok=True)
                write_json(self._file, self.view, durable=False)

    def _keep_room(self) -> None:
        """Keeps some space, so that a full disk can be told of."""
        if self.view.phase == "over":
            self._spare.unlink(missing_ok=True)
        elif not self._spare.exists():
            with suppress(OSError):
                self._spare.write_bytes(os.urandom(_SPARE_BYTES))
