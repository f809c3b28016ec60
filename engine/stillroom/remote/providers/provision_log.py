"""The list of the machines that were provisioned and may cost money, one small file for each.

It is the user's, not a workspace's, so that any later server finds what an earlier one left. An
entry is written before the provider is called and removed only when the provider has confirmed
that nothing is left: a kill at any moment leaves an entry too many, never one too few.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import msgspec

from stillroom.errors import DataError
from stillroom.files import FileLock, read_json, write_json, write_new
from stillroom.lineage import now, seconds_between
from stillroom.places import make_folder
from stillroom.remote.host import UnreachableError
from stillroom.remote.machine import Machine
from stillroom.remote.records import RemoteView
from stillroom.run_folder import VIEW_FILE

_LOCK_WAIT_S = 20.0
_ARRIVES_WITHIN_S = 900.0
_POLL_S = 0.2
_FIX = "look with `sky status` and `hf jobs ps` what is up, release it, and delete the file"


class ProvisionedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that was requested from a provider: an entry of the provision log."""

    name: str
    """What the provider knows it by: the cluster's name, or the name of the job."""
    machine: Machine
    """Its entry of machines.yml at that time, so that it can be released without that file."""
    runs: list[str]
    """The folders of the runs that use it, by which it can be seen whether it is still needed."""
    since: str
    """When it was about to be requested."""
    started: list[str] = []
    """Those of the runs that were started on it, and so are lost if it is gone."""
    request_id: str | None = None
    """The provider's own name for the latest request: SkyPilot's request, or the job's id."""
    is_answered: bool = False
    """Whether the provider has answered at all; a kill may have cut the request off."""
    price_per_hour: float | None = None
    """US dollars an hour, by the provider, once it is up; None if it names none."""

    @property
    def is_old(self) -> bool:
        """Whether a request that a kill cut off would have arrived by now."""
        age_s = seconds_between(self.since, now())
        return age_s is None or age_s > _ARRIVES_WITHIN_S

    @property
    def is_abandoned(self) -> bool:
        """Whether no run needs it any more."""
        return all(is_over(Path(run)) for run in self.runs)

    @property
    def release_command(self) -> str | None:
        """The command with which the user releases it by hand."""
        return self.machine.access.release_command(self.name, self.request_id)


class ProvisionLog:
    """The entries of a folder; several processes may use them at the same time."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or _state_folder()).resolve()

    @property
    def identity(self) -> str:
        """A random text of this log, so that two computers never share a machine's name."""
        path = self.folder / "identity"
        with suppress(FileNotFoundError):
            return path.read_text(encoding="ascii").strip()
        make_folder(self.folder)
        with suppress(FileExistsError):
            write_new(path, f"{token_hex(8)}\n".encode())
        return path.read_text(encoding="ascii").strip()

    def entries(self) -> list[ProvisionedMachine]:
        """Returns every machine that was provisioned and is not known to be released, oldest first.

        Raises DataError for an entry that is damaged, since what it names may still cost money.
        """
        found = [self._read(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted((entry for entry in found if entry is not None), key=lambda each: each.since)

    def find(self, name: str) -> ProvisionedMachine | None:
        """Returns the entry of this name; None if there is none."""
        return self._read(self._file(name))

    @contextmanager
    def holding(self, name: str) -> Generator["LockedEntry"]:
        """Keeps other processes from provisioning or releasing the machine of this name.

        Raises UnreachableError if another has it for longer than 20 seconds.
        """
        make_folder(self.folder)
        lock = FileLock(self.folder / f"{name}.lock")
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not lock.try_acquire():
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"another run is provisioning or releasing {name}",
                    "no action needed: it is retried until that is done",
                )
            time.sleep(_POLL_S)
        try:
            yield LockedEntry(self._file(name), self.find(name))
        finally:
            lock.release()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _read(self, path: Path) -> ProvisionedMachine | None:
        with suppress(FileNotFoundError):
            return read_json(path, ProvisionedMachine, fix=_FIX)
        return None


class LockedEntry:
    """The entry of a machine while no other process may change it; each change is on the disk."""

    def __init__(self, file: Path, entry: ProvisionedMachine | None) -> None:
        self._file, self.entry = file, entry

    def add(self, machine: Machine, name: str, run: Path) -> ProvisionedMachine:
        """Notes that a run is about to use the machine, which may have to be provisioned first."""
        old = self.entry
        if old is None:
            old = ProvisionedMachine(name=name, machine=machine, runs=[], since=now())
        runs = [*(each for each in old.runs if each != str(run)), str(run)]
        return self._write(msgspec.structs.replace(old, runs=runs))

    def update(self, *, request_id: str | None, price_per_hour: float | None = None) -> None:
        """Notes what the provider has answered."""
        if self.entry is not None:
            self._write(
                msgspec.structs.replace(
                    self.entry,
                    request_id=request_id,
                    is_answered=True,
                    price_per_hour=price_per_hour or self.entry.price_per_hour,
                )
            )

    def mark_started(self, run: Path) -> None:
        """Notes that a run is about to be started on it."""
        if self.entry is not None and str(run) not in self.entry.started:
            self._write(
                msgspec.structs.replace(self.entry, started=[*self.entry.started, str(run)])
            )

    def drop_run(self, run: Path | None) -> bool:
        """Removes a run, and those that are over; returns whether no run is left."""
        if self.entry is None:
            return True
        runs = [each for each in self.entry.runs if each != str(run) and not is_over(Path(each))]
        self._write(msgspec.structs.replace(self.entry, runs=runs))
        return not runs

    def forget(self) -> None:
        """Removes the entry: the provider has confirmed that the machine is gone."""
        self._file.unlink(missing_ok=True)
        self.entry = None

    def _write(self, entry: ProvisionedMachine) -> ProvisionedMachine:
        if entry != self.entry:
            write_json(self._file, entry)
        self.entry = entry
        return entry


def is_over(run: Path) -> bool:
    """Whether nothing of a run needs its machine any more: it was deleted, or all of it is here.

    Where the whole workspace is away, e.g. on a disk that is not mounted, that is not known.
    """
    if not run.is_dir():
        return run.parent.is_dir()
    try:
        return read_json(run / VIEW_FILE, RemoteView).phase == "over"
    except (OSError, DataError):
        # Its follower has not begun, or somebody has damaged the file: it may still be running.
        return False


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return folder / "stillroom" / "machines"
