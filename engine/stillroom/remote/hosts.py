"""Opens machines of any kind, and releases machines that no run needs."""

from pathlib import Path

from stillroom.errors import InputError
from stillroom.jobs.operations import load
from stillroom.remote.host import RunHost
from stillroom.remote.machine import Machine
from stillroom.remote.providers.provision_log import ProvisionedMachine, ProvisionLog


def open_host(machine: Machine, *, run: Path | None = None) -> RunHost:
    """Returns the host of a machine; nothing is connected or provisioned yet.

    run: the local folder of the run that uses the machine; without one, nothing is provisioned.
    Raises InputError for a Ray cluster, and MissingExtraError if the package for such machines is
    not installed.
    """
    if machine.ray is not None:
        raise InputError(
            f"{machine.name} is a Ray cluster: only a run that uses it can connect to it",
            "inspect the cluster with `ray status`",
        )
    opened_by = machine.access.opened_by
    if opened_by is None:
        raise _unsupported(machine)
    return load(opened_by)(machine, run)


def release_machine(entry: ProvisionedMachine, log: ProvisionLog) -> None:
    """Releases a provisioned machine, unless a run has started to use it in the meantime."""
    released_by = entry.machine.access.released_by
    if released_by is None:
        raise _unsupported(entry.machine)
    load(released_by)(entry, log)


def _unsupported(machine: Machine) -> InputError:
    return InputError(
        f"{machine.name} is of a kind of machine that this version does not support",
        "use a newer version of stillroom, such as the one that started the run",
    )
