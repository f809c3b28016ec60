"""The interface to a machine that executes runs; `ssh/host.py` and `providers/` implement it."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Protocol

from stillroom.errors import EngineError
from stillroom.remote.records import (
    Blob,
    JobSpec,
    LaunchRequest,
    MachineFacts,
    RunUpdate,
)

FREE_DISK = (
    "free some space on the machine (its folder `store` may be deleted while nothing is being sent "
    "to it), or give the machine another `folder:` in machines.yml"
)
OTHER_FOLDER = "set the machine's `folder:` in machines.yml to one that its user can write to"


class UnreachableError(EngineError):
    """The machine did not answer. Its run may still continue."""


class MachineGoneError(EngineError):
    """The machine no longer exists, e.g. a preempted spot machine or a job cancelled by others, or
    the folder of a run that was started on it was deleted.

    If the run had started, only its downloaded files are left; otherwise it can be started again.
    """


class MachineError(EngineError):
    """The machine exists, but a user has to fix something on it or in its configuration."""


class AccessDeniedError(MachineError):
    """The machine's user may not access a file that the run needs; retrying does not help."""


class RunHost(Protocol):
    """A machine that executes runs.

    Each method is idempotent: called again after a failure, it resumes. Each raises
    UnreachableError if the machine does not answer, MachineGoneError if it no longer exists, and
    MachineError for a problem that waiting does not fix (a full disk, a changed host key, no
    Python).
    """

    def provision(self) -> None:
        """Provisions the machine if Stillroom manages it; returns when it can be reached."""
        ...

    def price_per_hour(self) -> float | None:
        """Returns the price in US dollars per hour, from machines.yml or else from its provider.

        Must be called after `provision`, when the provider has chosen the machine.
        """
        ...

    def facts(self) -> MachineFacts:
        """Probes the machine, without changing anything on it, and returns what it has."""
        ...

    def prepare(self, spec: JobSpec, report: Callable[[str], None]) -> None:
        """Installs this code and the run's packages on the machine, in reusable environments.

        `report` is called with a short text for each slow step, and with an empty text from time to
        time while a step lasts.
        """
        ...

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns how many bytes the machine has received of each incomplete blob, by hash."""
        ...

    def send(self, blobs: Sequence[Blob], offsets: Mapping[str, int]) -> Iterator[int]:
        """Sends blobs, each from its offset on, and yields the number of bytes of each piece.

        offsets: the bytes that the machine has received of each blob, by hash, from `missing`.
        A blob counts as stored only when the machine has verified its hash.
        """
        ...

    def start(self, run: LaunchRequest) -> None:
        """Starts a run's detached worker; does nothing if the run was started before."""
        ...

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields a run's updates until it has ended, at least a Heartbeat every few seconds.

        seen: the remote bytes of each growing file that are already mirrored, by path relative to
        the workspace.
        """
        ...

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a run's finished file, from `offset` on."""
        ...

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Asks a run to stop; with `kill`, kills its processes."""
        ...

    def remove(self, run_id: str) -> None:
        """Deletes a run's folder on the machine; stored blobs stay for other runs."""
        ...

    def release(self) -> None:
        """Releases the machine if Stillroom provisioned it and no other run uses it."""
        ...

    def close(self) -> None:
        """Closes the connection; processes on the machine continue."""
        ...
