"""What any machine that does runs can do; `ssh/host.py` and `providers/` implement it."""

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
OTHER_FOLDER = "give the machine a `folder:` in machines.yml that its user may write to"


class UnreachableError(EngineError):
    """The machine did not answer. That says nothing about the run, which may well continue."""


class MachineGoneError(EngineError):
    """The machine no longer exists (a spot machine was taken back, a job was ended from outside),
    or it no longer has the folder of a run that was started on it.

    Of a run that had started, only the downloaded files are left; one that had not may be started
    again.
    """


class MachineError(EngineError):
    """The machine exists, but something on it or about it has to be fixed by a user."""


class RunHost(Protocol):
    """A machine on which runs are done.

    Each method may be called again after it failed, and then resumes or finds its work done.
    Each raises UnreachableError if the machine does not answer, MachineGoneError if it never will,
    and MachineError for what waiting does not fix (a full disk, a changed host key, no Python),
    with what to do.
    """

    def provision(self) -> None:
        """Starts the machine, where it is ours to stop; returns when it can be reached."""
        ...

    def price_per_hour(self) -> float | None:
        """Returns the US dollars for an hour: what machines.yml says, else what its provider says.

        It is called after `provision`, when the provider has chosen the machine.
        """
        ...

    def facts(self) -> MachineFacts:
        """Looks at the machine without changing anything on it."""
        ...

    def prepare(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        """Puts this code and the run's packages on it, in environments that are made once.

        `say` is given a short text for each thing that takes long, and an empty one from time to
        time while it lasts.
        """
        ...

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns the hashes that are not stored yet, with the bytes of each that already are."""
        ...

    def send(self, blobs: Sequence[Blob], have: Mapping[str, int]) -> Iterator[int]:
        """Sends contents, each resumed where an earlier call ended; yields bytes as they go.

        A content counts only when the machine has verified its hash.
        """
        ...

    def start(self, run: LaunchRequest) -> None:
        """Starts a run's detached worker. A run that was started before is left alone."""
        ...

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields a run's updates until it has ended, at least a Heartbeat every few seconds.

        `seen` has the bytes of each growing file (path relative to the workspace) that are here.
        """
        ...

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a finished file of a run, from `offset` on."""
        ...

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Asks a run to stop; with `kill` ends its processes."""
        ...

    def remove(self, run_id: str) -> None:
        """Deletes a run's folder; contents that other runs may need stay."""
        ...

    def release(self) -> None:
        """Stops the machine, where it is ours to stop and no other run is on it."""
        ...

    def close(self) -> None:
        """Ends the connection; what runs on the machine continues."""
        ...
