"""What any place that runs work for us can do; `ssh/host.py` and `rented/` keep the promise."""

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
    """The machine did not answer. It says nothing about the run, which may well go on there."""


class MachineGoneError(EngineError):
    """The machine no longer exists (a spot machine was taken back, a job was ended from outside),
    or it no longer has the folder of a run that was started there.

    A run that had started there is lost but for what is here; one that had not may start anew.
    """


class MachineError(EngineError):
    """The machine is there, but something on it or about it stands in the way until a user acts."""


class RunHost(Protocol):
    """A machine on which runs are done.

    Each method may be called again after it broke off, and then goes on or finds its work done.
    Each raises UnreachableError if the machine does not answer, MachineGoneError if it never will,
    and MachineError for what waiting does not mend (a full disk, a changed host key, no Python),
    with what to do.
    """

    def provision(self) -> None:
        """Brings the machine up, where it is ours to stop; returns when it can be reached."""
        ...

    def price_per_hour(self) -> float | None:
        """Returns the US dollars for an hour: what machines.yml says, else what its provider says.

        It is asked after `provision`, when the provider has chosen the machine.
        """
        ...

    def facts(self) -> MachineFacts:
        """Looks at the machine without changing anything there."""
        ...

    def prepare(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        """Puts this code and the run's packages there, in environments that are made once.

        `say` is given a short text for each thing that takes long.
        """
        ...

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns the hashes that are not there yet, with the bytes of each that already are."""
        ...

    def send(self, blobs: Sequence[Blob], have: Mapping[str, int]) -> Iterator[int]:
        """Sends contents, each from where an earlier call broke off; yields bytes as they go.

        A content counts only when its hash has been verified there.
        """
        ...

    def start(self, run: LaunchRequest) -> None:
        """Starts a run's detached worker there. A run that was started before is left alone."""
        ...

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields a run's news until it has ended there, at least a Heartbeat every few seconds.

        `seen` has the bytes of each growing file (path relative to the workspace) that are here.
        """
        ...

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a finished file of a run there, from `offset` on."""
        ...

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Asks a run there to stop; with `kill` ends its processes."""
        ...

    def remove(self, run_id: str) -> None:
        """Deletes a run's folder there; contents that other runs may need stay."""
        ...

    def release(self) -> None:
        """Stops the machine, where it is ours to stop and nothing else of ours runs on it."""
        ...

    def close(self) -> None:
        """Ends the connection; what runs there goes on."""
        ...
