"""Short commands about a run on this machine: reading a file, stopping the run, deleting it."""

import os
import shutil
from collections.abc import Generator
from contextlib import suppress

import msgspec

from stillroom.errors import EngineError
from stillroom.jobs.supervise import cancel_run, kill_run
from stillroom.remote.agent.agent_run import agent_run
from stillroom.remote.agent.folders import AgentFolder
from stillroom.remote.host import MachineGoneError
from stillroom.remote.run_files import is_safe

_BLOCK = 1 << 20


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """A finished file of a run, and the first byte of it that is wanted."""

    run_id: str
    path: str
    """Relative to the run's workspace there."""
    offset: int = 0


class CancelRequest(msgspec.Struct, frozen=True, array_like=True):
    """The wish that a run stops, or that its processes are killed."""

    run_id: str
    kill: bool = False


def fetch_file(there: AgentFolder) -> None:
    """The command `fetch`: sends the bytes of each `FetchRequest`, and then an empty message."""
    while (request := there.receive(FetchRequest)) is not None:
        for data in read_finished(there, request):
            there.frames.send(data)
        there.frames.send(b"")


def read_finished(there: AgentFolder, request: FetchRequest) -> Generator[bytes]:
    """Yields the bytes of a finished file. Raises EngineError if the run has none of that name."""
    path = agent_run(there, request.run_id).workspace / request.path
    if not is_safe(request.path) or path.is_symlink() or not path.is_file():
        raise EngineError(
            f"the run has no file {request.path!r} any more", "its later files are brought back"
        )
    with path.open("rb", buffering=0) as stream:
        stream.seek(request.offset)
        while data := stream.read(_BLOCK):
            yield data


def stop_run(there: AgentFolder) -> None:
    """The command `cancel`: asks the run of a `CancelRequest` to stop, or kills it."""
    request = there.receive(CancelRequest)
    if request is not None:
        stop(there, request)


def stop(there: AgentFolder, request: CancelRequest) -> None:
    """Asks a run to stop, or kills it. Raises MachineGoneError if it is not here."""
    folder = agent_run(there, request.run_id).folder
    if not folder.is_run:
        raise MachineGoneError(
            f"there is no run {request.run_id!r} on this machine", "it has nothing to stop"
        )
    if request.kill:
        kill_run(folder)
    elif folder.cancel_waited_s() is None:
        cancel_run(folder)


def remove_run(there: AgentFolder) -> None:
    """The command `remove`: deletes the folder of the run whose id is sent, and what it runs."""
    run_id = there.receive(str)
    if run_id is not None:
        remove(there, run_id)


def remove(there: AgentFolder, run_id: str) -> None:
    """Deletes a run's folder, after ending what may still run in it."""
    place = agent_run(there, run_id)
    if place.folder.is_run:
        kill_run(place.folder)
    # Renamed first, so that nobody takes what is left of it for a run.
    with suppress(FileNotFoundError):
        place.base.rename(place.base.with_name(f".{run_id}.{os.getpid()}.going"))
    # Also what a connection that broke off has left.
    for leftover in place.base.parent.glob(f".{run_id}.*.going"):
        shutil.rmtree(leftover, ignore_errors=True)
