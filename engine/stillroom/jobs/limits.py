"""Ends a run at the limits of a machine that costs by the hour, whether or not it is reached."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from stillroom.run_folder import RunFolder
from stillroom.teachers.run_limits import RunLimits, read_limits

_LOOK_EVERY_S = 0.5
_END_WAIT_S = 5.0
KILLED_AT_LIMIT = "killed, as it did not stop in time: "
"""How the last line of the log begins of a run that passed its limits; the limit follows."""


class Stoppable(Protocol):
    """A run's work, which stops with a checkpoint when it is told to."""

    @property
    def teacher_usd(self) -> float:
        """What the run has spent on endpoints so far."""
        ...

    def from_elsewhere(self, limit: str | None = None) -> None:
        """Tells the work to stop, at this limit; any thread may call this."""
        ...


def _kill_this_process(reason: str) -> None:
    # It is the log's last line, which the run's end then quotes.
    sys.stderr.write(f"{KILLED_AT_LIMIT}{reason}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def watched_for_limits(folder: RunFolder, work: Stoppable) -> Generator[None]:
    """Stops the run at its limits, and kills it if it has not stopped before one is passed."""
    limits = read_limits(folder.path)
    if limits is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=watch, args=(limits, work, ended.wait), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_WAIT_S)


def watch(
    limits: RunLimits,
    work: Stoppable,
    has_ended: Callable[[float], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    kill: Callable[[str], None] = _kill_this_process,
) -> None:
    """Looks at the limits until the run has ended; `has_ended` waits for that so many seconds."""
    stopping: str | None = None
    while not has_ended(_LOOK_EVERY_S):
        teacher_usd = work.teacher_usd
        if stopping is not None and limits.is_overdue(clock(), teacher_usd):
            kill(stopping)
            return
        reason = None if stopping is not None else limits.reached(clock(), teacher_usd)
        if reason is not None:
            stopping = reason
            work.from_elsewhere(reason)
