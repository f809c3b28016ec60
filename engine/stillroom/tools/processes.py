"""Kills processes together with everything that they started.

Workers load this module each time they start, so it imports nothing slow at its top.
"""

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

SERVER_MARK_VARIABLE = "STILLROOM_SESSION"
"""The environment variable that marks all processes of one tool server.

The server's children inherit it, so they can be found even after the server has ended.
"""


def kill_family(leader: int) -> None:
    """Kills a process group, and its leader's descendants, even those in other process groups.

    The leader must not have been waited for: the system may have given its number to another
    process by then.
    """
    for descendant in descendants(leader):
        kill(descendant)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def descendants(pid: int) -> "list[psutil.Process]":
    """Returns the children of a process, their children, and so on; none once it has ended."""
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill(process: "psutil.Process") -> None:
    """Kills one process unless it has ended."""
    import psutil

    # psutil compares the start time too, so a new process with the same number is not hit.
    with suppress(psutil.Error):
        process.kill()


def kill_marked(marks: Collection[str]) -> None:
    """Kills every process that has one of the marks in its environment.

    This finds what a server started even when the server has ended and its children have been
    adopted by init.
    """
    import psutil

    for process in psutil.process_iter():
        # psutil refuses if the process has ended or belongs to another user.
        with suppress(psutil.Error, OSError):
            if process.environ().get(SERVER_MARK_VARIABLE) in marks:
                process.kill()
