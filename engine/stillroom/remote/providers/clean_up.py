"""`python -m stillroom.remote.providers.clean_up FOLDER`: releases machines that no run needs.

It is started when machines are listed and the provision log in FOLDER has a machine that no run
needs. Other machines are released by the followers of their runs.
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
from stillroom.remote.hosts import release_machine
from stillroom.remote.providers.provision_log import ProvisionedMachine, ProvisionLog, needs_machine
from stillroom.run_folder import RunFolder
from stillroom.secrecy.environments import provisioning_environment

_LOCK = "clean_up.lock"
_LOG = "clean_up.log"


def start_clean_up(provision_log: ProvisionLog) -> None:
    """Starts a detached process that releases the machines that no run needs."""
    make_folder(provision_log.folder)
    with suppress(OSError):  # A full disk: the next call tries again.
        start_detached(
            __name__,
            provision_log.folder,
            cwd=provision_log.folder,
            log=provision_log.folder / _LOG,
            environment=provisioning_environment(),
            secrets={},
        )


def clean_up(
    provision_log: ProvisionLog, release: Callable[[ProvisionedMachine, ProvisionLog], None]
) -> list[str]:
    """Releases the machines that no run needs; returns the names of those that it could not."""
    failed: list[str] = []
    for entry in provision_log.entries():
        try:
            if entry.is_abandoned:
                release(entry, provision_log)
        except EngineError as error:
            sys.stderr.write(f"{entry.name}: {error}\n")
            failed.append(entry.name)
    return failed


def restart_followers(entry: ProvisionedMachine) -> None:
    """Restarts the followers of all runs that use a machine, in any workspace."""
    for run in map(Path, entry.runs):
        # A missing or damaged folder has no follower to restart.
        with suppress(OSError, EngineError):
            if needs_machine(run):
                read_run(RunFolder(run))


def main() -> int:
    """Releases the machines, unless another process already does; returns the exit code."""
    provision_log = ProvisionLog(Path(sys.argv[1]))
    lock = FileLock(provision_log.folder / _LOCK)
    if not lock.try_acquire():
        return 0
    return 1 if clean_up(provision_log, release_machine) else 0


if __name__ == "__main__":
    sys.exit(main())
