"""The log of provisioned machines that may cost money, with one small file per machine.

It belongs to the user, not to a workspace, so that any later server finds it. An entry is written
before the provider is called, and removed only after the provider has confirmed the release: if
the process is killed, there may be an entry too many, but never one too few.
"""

import os
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
from stillroom.run_folder import VIEW_FILE, RemoteView

_LOCK_WAIT_S = 20.0
_REQUEST_LIFETIME_S = 900.0
"""The seconds after which a request that was sent can no longer take effect."""
_FIX = (
    "list the machines that are up with `sky status` and `hf jobs ps`, release those that no run "
    "needs, then delete the file"
)


class ProvisionedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that was requested from a provider: an entry of the provision log."""

    name: str
    """Its name at the provider: the name of the cluster or the job."""
    machine: Machine
    """Its entry of machines.yml at that time, so that it can be released without that file."""
    runs: list[str]
    """The folders of the runs that use it, whose states tell whether it is still needed."""
    since: str
    """The time just before it was requested."""
    started: list[str] = []
    """The subset of `runs` that were started on it; if it no longer exists, they are lost."""
    request_id: str | None = None
    """The provider's id of the latest request: SkyPilot's request id, or the job's id."""
    is_answered: bool = False
    """Whether the provider's response was received; False if the process was killed before."""
    price_per_hour: float | None = None
    """The provider's price in US dollars per hour, once the machine is up; None if unknown."""

    @property
    def is_request_expired(self) -> bool:
        """Whether a request without a response can no longer take effect, since it is too old."""
        age_s = seconds_between(self.since, now())
        return age_s is None or age_s > _REQUEST_LIFETIME_S

    @property
    def is_abandoned(self) -> bool:
        """Whether no run needs it any more."""
        return not any(needs_machine(Path(run)) for run in self.runs)

    @property
    def release_command(self) -> str | None:
        """The shell command that releases the machine; None if none is needed."""
        return self.machine.access.release_command(self.name, self.request_id)


class ProvisionLog:
    """The log's entries, one file each in a folder that several processes may use concurrently."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or _state_folder()).resolve()

    @property
    def identity(self) -> str:
        """A random id of this log, so that two computers never share a machine's name."""
        path = self.folder / "identity"
        with suppress(FileNotFoundError):
            return path.read_text(encoding="ascii").strip()
        make_folder(self.folder)
        with suppress(FileExistsError):
            write_new(path, f"{token_hex(8)}\n".encode())
        return path.read_text(encoding="ascii").strip()

    def entries(self) -> list[ProvisionedMachine]:
        """Returns all provisioned machines that are not known to be released, oldest first.

        Raises DataError for a damaged entry, since its machine may still cost money.
        """
        entries = map(self._read, sorted(self.folder.glob("*.json")))
        return sorted(filter(None, entries), key=lambda entry: entry.since)

    def find(self, name: str) -> ProvisionedMachine | None:
        """Returns the entry of this name; None if there is none."""
        return self._read(self._file(name))

    @contextmanager
    def lock_entry(self, name: str) -> Generator["LockedEntry"]:
        """Locks an entry, so that no other process provisions or releases the machine.

        Raises UnreachableError if the lock is not acquired within 20 seconds.
        """
        make_folder(self.folder)
        lock = FileLock(self.folder / f"{name}.lock")
        if not lock.acquire_within(_LOCK_WAIT_S):
            raise UnreachableError(
                f"another run is provisioning or releasing {name}",
                "no action needed: Stillroom retries until the other run is done",
            )
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
    """The entry of a machine while its lock is held; each change is written immediately."""

    def __init__(self, file: Path, entry: ProvisionedMachine | None) -> None:
        self._file, self.entry = file, entry

    def add(self, machine: Machine, name: str, run: Path) -> ProvisionedMachine:
        """Records that a run is about to use the machine, before it is provisioned."""
        old = self.entry
        if old is None:
            old = ProvisionedMachine(name=name, machine=machine, runs=[], since=now())
        runs = [*(each for each in old.runs if each != str(run)), str(run)]
        return self._write(msgspec.structs.replace(old, runs=runs))

    def update(self, *, request_id: str | None, price_per_hour: float | None = None) -> None:
        """Records what the provider returned: the request's id, and the price if it is known."""
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
        """Records that a run is about to be started on the machine."""
        if self.entry is not None and str(run) not in self.entry.started:
            self._write(
                msgspec.structs.replace(self.entry, started=[*self.entry.started, str(run)])
            )

    def drop_run(self, run: Path | None) -> bool:
        """Removes a run, and all that need no machine any more; returns whether no run is left."""
        if self.entry is None:
            return True
        runs = [each for each in self.entry.runs if each != str(run) and needs_machine(Path(each))]
        self._write(msgspec.structs.replace(self.entry, runs=runs))
        return not runs

    def remove(self) -> None:
        """Removes the entry, after the provider has confirmed that the machine is gone."""
        self._file.unlink(missing_ok=True)
        self.entry = None

    def _write(self, entry: ProvisionedMachine) -> ProvisionedMachine:
        if entry != self.entry:
            write_json(self._file, entry)
        self.entry = entry
        return entry


def needs_machine(run: Path) -> bool:
    """Returns whether a run still needs its machine: it exists, and is not downloaded completely.

    True if the whole workspace is missing, e.g. because its disk is not mounted.
    """
    if not run.is_dir():
        return not run.parent.is_dir()
    try:
        return read_json(run / VIEW_FILE, RemoteView).phase != "over"
    except (OSError, DataError):
        # The follower has not written the file yet, or it is damaged: the run may be active.
        return True


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return folder / "stillroom" / "machines"
