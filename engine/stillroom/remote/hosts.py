"""Opens machines of any kind, and releases machines that no run needs."""

from pathlib import Path

from stillroom.errors import InputError
from stillroom.remote.host import RunHost
from stillroom.remote.machine import HfJobsFlavor, Machine, RayCluster, SkyPilotCluster, SshAddress
from stillroom.remote.providers.provision_log import ProvisionedMachine, ProvisionLog
from stillroom.remote.ssh.connection import SshChannel
from stillroom.remote.ssh.host import ChannelHost

# The providers' modules are imported lazily, because servers list machines often.


def open_host(machine: Machine, *, run: Path | None = None) -> RunHost:
    """Returns the host of a machine; nothing is connected or provisioned yet.

    run: the local folder of the run that it is for; without one, no machine is ever provisioned.
    Raises MissingExtraError if the package for such machines is not installed.
    """
    match machine.access:
        case SshAddress() as address:
            return ChannelHost(machine, SshChannel(machine.name, address))
        case SkyPilotCluster():
            from stillroom.remote.providers.skypilot import open_cluster

            return open_cluster(machine, run)
        case HfJobsFlavor():
            from stillroom.remote.providers.hf_jobs import open_job

            return open_job(machine, run)
        case RayCluster():
            raise InputError(
                f"{machine.name} is a Ray cluster, which only its runs can connect to",
                "inspect the cluster with `ray status`",
            )
        case _:
            raise _unsupported(machine)


def release_machine(entry: ProvisionedMachine, log: ProvisionLog) -> None:
    """Releases a provisioned machine, unless a run has started to use it in the meantime."""
    match entry.machine.access:
        case HfJobsFlavor():
            from stillroom.remote.providers.hf_jobs import release_job

            release_job(entry, log)
        case SkyPilotCluster():
            from stillroom.remote.providers.skypilot import open_cluster

            host = open_cluster(entry.machine, provision_log=log)
            try:
                host.release()
            finally:
                host.close()
        case _:
            raise _unsupported(entry.machine)


def _unsupported(machine: Machine) -> InputError:
    return InputError(
        f"{machine.name} is a kind of machine that this version does not support",
        "use the version of stillroom that started the run",
    )
