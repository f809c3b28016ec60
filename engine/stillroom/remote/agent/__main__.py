"""`python -m stillroom.remote.agent ROOT COMMAND`: executes a command on its own machine.

ROOT is the folder with all of Stillroom's files on the machine. Requests are read from standard
input and replies are written to standard output (`frames.py`); other output goes to standard error.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stillroom.errors import EngineError
from stillroom.remote.agent.store import AgentFolder
from stillroom.remote.frames import BrokenStreamError, Frames
from stillroom.remote.host import FREE_DISK, OTHER_FOLDER, AccessDeniedError
from stillroom.remote.records import (
    CancelRequest,
    FetchRequest,
    FollowRequest,
    LaunchRequest,
    Piece,
)

_IDLE_TIMEOUT_S = 7200
"""The idle timeout of a command in seconds, since a connection may be lost silently."""


class _Command(NamedTuple):
    request: Any
    """The type of its requests."""
    handler: Callable[[AgentFolder, Any], Iterable[object] | None]
    """The function that handles one request and yields the replies."""


def main(arguments: Sequence[str]) -> int:
    """Executes the command and returns the exit code, which is 0 even if an error was sent."""
    agent, name = AgentFolder(Path(arguments[0]).expanduser().absolute()), arguments[1]
    frames = _open_frames()
    frames.begin()
    try:
        _serve(agent, name, frames)
        frames.end()
    except BrokenStreamError as broken:
        sys.stderr.write(f"{broken}\n")  # Usually the client has disconnected.
        return 1
    except EngineError as error:
        return _report(frames, error)
    except OSError as error:
        return _report(frames, _os_error(error))
    return 0


def _serve(agent: AgentFolder, name: str, frames: Frames) -> None:
    """Handles requests until the other side sends the end frame."""
    command = _command(name)
    signal.alarm(_IDLE_TIMEOUT_S)
    while (request := frames.receive(command.request)) is not None:
        signal.alarm(0)
        for reply in command.handler(agent, request) or ():
            # Successive updates of a run are similar, so they compress well.
            frames.send(reply, is_compressed=name == "follow")
        signal.alarm(_IDLE_TIMEOUT_S)


def _command(name: str) -> _Command:
    """Returns a command by its name; its module is imported only when it is used."""
    match name:
        case "have" | "put":
            from stillroom.remote.agent import store

            is_put = name == "put"
            return _Command(Piece, store.put) if is_put else _Command(dict[str, int], store.have)
        case "start" | "cancel" | "remove":
            from stillroom.remote.agent import lifecycle

            return {
                "start": _Command(LaunchRequest, lifecycle.start),
                "cancel": _Command(CancelRequest, lifecycle.cancel),
                "remove": _Command(str, lifecycle.remove),
            }[name]
        case "follow":
            from stillroom.remote.agent.follow import follow

            return _Command(FollowRequest, follow)
        case "fetch":
            from stillroom.remote.agent.output_files import fetch

            return _Command(FetchRequest, fetch)
        case _:
            raise EngineError(
                f"unknown command {name!r}",
                "use the same version of stillroom on both machines",
            )


def _open_frames() -> Frames:
    """Reserves standard input and output for frames, and redirects other output to stderr."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    return Frames(source, sink)


def _report(frames: Frames, error: EngineError) -> int:
    """Sends an error and returns the exit code: 1 if the client has disconnected, else 0."""
    try:
        frames.send_error(error)
    except BrokenStreamError:
        return 1
    return 0


def _os_error(error: OSError) -> EngineError:
    """Returns an error of the operating system as an EngineError with a fix."""
    name = error.filename or "a file"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return EngineError(f"the disk is full: {name} could not be written", FREE_DISK)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            problem = f"the machine's user has no access to {name}: {error.strerror}"
            fix = f"give the user access; if the file is in the machine's folder: {OTHER_FOLDER}"
            return AccessDeniedError(problem, fix)
        case _:
            problem = f"{name}: {error.strerror or error}"
            return EngineError(problem, "check that file on the machine")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
