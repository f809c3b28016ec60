"""`python -m stillroom.remote.agent ROOT COMMAND`: carries out a command on the machine it runs on.

ROOT is the folder in which everything of ours lies there. Messages come through standard input and
go through standard output (`frames.py`); what other code prints goes to standard error.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stillroom.errors import EngineError
from stillroom.remote.agent.folders import FREE_DISK, OTHER_FOLDER, AgentFolder
from stillroom.remote.frames import BrokenStreamError, Frames


def main(arguments: Sequence[str]) -> int:
    """Carries out the command and returns the exit code: 0 also for an error that was sent."""
    root, name = Path(arguments[0]), arguments[1]
    frames = _frames()
    frames.begin()
    try:
        _command(name)(AgentFolder(root.expanduser().absolute(), frames))
        frames.end()
    except BrokenStreamError as broken:
        sys.stderr.write(f"{broken}\n")  # Most often nobody listens any more.
        return 1
    except EngineError as error:
        return _report(frames, error)
    except OSError as error:
        return _report(frames, _explained(error))
    return 0


def _command(name: str) -> Callable[[AgentFolder], None]:
    """Returns a command by its name; each is imported only when it is used."""
    match name:
        case "have":
            from stillroom.remote.agent.store import tell_missing

            return tell_missing
        case "put":
            from stillroom.remote.agent.store import take_contents

            return take_contents
        case "start":
            from stillroom.remote.agent.start import start_run

            return start_run
        case "follow":
            from stillroom.remote.agent.follow import follow_run

            return follow_run
        case "fetch" | "cancel" | "remove":
            from stillroom.remote.agent import commands

            each = {
                "fetch": commands.fetch_file,
                "cancel": commands.stop_run,
                "remove": commands.remove_run,
            }
            return each[name]
        case _:
            raise EngineError(
                f"this version of stillroom knows no command {name!r}",
                "use the same version of stillroom on both sides",
            )


def _frames() -> Frames:
    """Takes standard output for the frames alone: a library that prints cannot break them."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Frames(source, sink)


def _report(frames: Frames, error: EngineError) -> int:
    try:
        frames.send_error(error)
    except BrokenStreamError:
        return 1
    return 0


def _explained(error: OSError) -> EngineError:
    """Returns what to do about an error of the operating system there."""
    name = error.filename or "a file"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return EngineError(
                f"the disk is full: {name} could not be written",
                FREE_DISK,
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return EngineError(
                f"{name} must not be written there: {error.strerror}",
                OTHER_FOLDER,
            )
        case _:
            return EngineError(
                f"{name}: {error.strerror or error}", "look at that file on the machine"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
