"""`python -m stillroom.remote.rented.clean_up FOLDER`: puts down what no run needs any more.

It is started, beside whoever looks at the machines, when the ledger in FOLDER names something whose
runs are all over. Runs that are not over get their followers back, which put their machines down.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stillroom.errors import EngineError
from stillroom.files import FileLock
from stillroom.jobs.detached import start_detached
from stillroom.jobs.supervise import read_run
from stillroom.places import make_folder
from stillroom.remote.rented.ledger import BroughtUp, Ledger, is_over
from stillroom.run_folder import RunFolder
from stillroom.secrecy.environments import renting_environment

_LOCK = "clean_up.lock"
_LOG = "clean_up.log"


def start_clean_up(ledger: Ledger) -> None:
    """Starts a process that puts down what no run needs; at once, and without waiting for it."""
    make_folder(ledger.folder)
    with suppress(OSError):  # A full disk: whoever looks next tries it again.
        start_detached(
            __name__,
            ledger.folder,
            cwd=ledger.folder,
            log=ledger.folder / _LOG,
            environment=renting_environment(),
            secrets={},
        )


def clean_up(ledger: Ledger, put_down: Callable[[BroughtUp, Ledger], None]) -> list[str]:
    """Puts down what no run needs, and returns the names of what it could not put down."""
    left: list[str] = []
    for entry in ledger.entries():
        try:
            if entry.is_abandoned:
                put_down(entry, ledger)
            else:
                wake_followers(entry)
        except EngineError as error:
            sys.stderr.write(f"{entry.name}: {error}\n")
            left.append(entry.name)
    return left


def put_down_entry(entry: BroughtUp, ledger: Ledger) -> None:
    """Puts down the machine of an entry, unless a run has come to it meanwhile."""
    # Servers import this module for `start_clean_up` alone.
    if entry.machine.hf_jobs is not None:
        from stillroom.remote.rented.hf_jobs import put_down_job

        put_down_job(entry, ledger)
        return
    from stillroom.remote.rented.skypilot import open_cluster

    host = open_cluster(entry.machine, ledger=ledger)
    try:
        host.put_down()
    finally:
        host.close()


def wake_followers(entry: BroughtUp) -> None:
    """Has each run that uses a machine followed again, in whatever workspace it is."""
    for run in map(Path, entry.runs):
        # A folder that is away, or that was damaged by hand, has no follower to wake.
        with suppress(OSError, EngineError):
            if not is_over(run):
                read_run(RunFolder(run))


def main() -> int:
    """Cleans up once; a second process that is started meanwhile ends at once."""
    ledger = Ledger(Path(sys.argv[1]))
    lock = FileLock(ledger.folder / _LOCK)
    if not lock.try_acquire():
        return 0
    return 1 if clean_up(ledger, put_down_entry) else 0


if __name__ == "__main__":
    sys.exit(main())
