"""Opens the way to a machine, whichever kind of machine it is."""

from pathlib import Path

from stillroom.errors import InputError
from stillroom.remote.host import RunHost
from stillroom.remote.records import Machine
from stillroom.remote.ssh.host import SshHost


def open_host(machine: Machine, *, run: Path | None = None) -> RunHost:
    """Returns a machine on which runs can be done; nothing is connected or brought up yet.

    run: the folder here of the run that it is for; without one no machine is ever brought up.
    Raises MissingExtraError if the package for such machines is not installed.
    """
    if machine.ssh is not None:
        return SshHost(machine)
    if machine.skypilot is not None:
        from stillroom.remote.providers.skypilot import open_cluster

        return open_cluster(machine, run)
    if machine.hf_jobs is not None:
        from stillroom.remote.providers.hf_jobs import open_job

        return open_job(machine, run)
    raise InputError(
        f"{machine.name} is a Ray cluster, which is reached by its runs alone",
        "look at it with `ray status`",
    )
