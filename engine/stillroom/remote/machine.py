"""The kinds of machines on which runs can be executed, as they are stored in remote.json.

A new kind is a struct here, named in `Kind`, `Machine` and its `kinds`, and a section of
machines.yml in `machines.py`. The agent imports this module, so it uses no pydantic.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import msgspec

Kind = Literal["ssh", "skypilot", "hf_jobs", "ray"]
_FLAVOR_GPUS = {"a100": "A100 80GB"}
"""GPU names of flavors that do not state the GPU's memory."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind of machine is reached, and when it starts to cost money.

    The base class stands for a kind that this version of Stillroom does not know.
    """

    kind: ClassVar[Kind | Literal["unknown"]] = "unknown"
    is_provisioned: ClassVar[bool] = False
    """Whether Stillroom provisions the machine and so has to release it."""
    bills_from: ClassVar[Literal["provision", "contact", "start"]] = "contact"
    """The event from which the machine is billed."""
    opened_by: ClassVar[str | None] = None
    """`module:function` that opens a machine, called with the `Machine` and the local folder of its
    run (or None); returns a `RunHost`. None if only the machine's runs can connect to it."""
    released_by: ClassVar[str | None] = None
    """`module:function` that releases a provisioned machine unless a run has started to use it,
    called with its entry of the provision log and the log."""
    can_be_probed: ClassVar[bool] = True
    """Whether the machine or its provider can be queried for its hardware."""

    @property
    def summary(self) -> str:
        """One line on how the machine is reached, or what is requested from its provider."""
        return ""

    @property
    def key_host(self) -> str | None:
        """The machine's host in keys.yml; None if that is the machine's name."""
        return None

    @property
    def requested_gpus(self) -> list[str]:
        """The names of the GPUs that machines.yml requests from a provider, one per GPU."""
        return []

    def release_command(self, name: str, request_id: str | None) -> str | None:
        """Returns the shell command that releases the machine; None if none is needed."""
        return None


class SshAddress(Access, frozen=True, kw_only=True):
    """A machine that is reached with the system's ssh."""

    kind = "ssh"
    opened_by = "stillroom.remote.ssh.host:open_ssh"

    host: str
    """The host argument of `ssh`: an alias of ~/.ssh/config, or user@host."""
    port: int | None = None
    options: list[str] = []
    """Additional arguments of `ssh`, such as `-F FILE`, before the host."""

    @property
    def summary(self) -> str:
        """The host, and its port if one is given."""
        return f"{self.host} port {self.port}" if self.port else self.host

    @property
    def key_host(self) -> str | None:
        """The host, without the user."""
        return self.host.rpartition("@")[2]


class SkyPilotCluster(Access, frozen=True, kw_only=True):
    """A cluster that SkyPilot provisions and that ssh then reaches by its name."""

    kind = "skypilot"
    opened_by = "stillroom.remote.providers.skypilot:open_cluster"
    released_by = "stillroom.remote.providers.skypilot:release_cluster"
    is_provisioned = True
    bills_from = "provision"

    resources: dict[str, object]
    """The arguments of `sky.Resources`, as machines.yml has them: accelerators, use_spot, …"""
    autostop: int = 10
    """The idle time in minutes after which SkyPilot deletes the cluster."""

    @property
    def summary(self) -> str:
        """The resources that are requested."""
        return ", ".join(f"{key}: {value}" for key, value in self.resources.items())

    @property
    def accelerator(self) -> tuple[str, int] | None:
        """The requested accelerator and its count; None if there is none or a choice of several."""
        requested = self.resources.get("accelerators")
        if isinstance(requested, Mapping) and len(requested) == 1:
            ((name, count),) = cast("Mapping[str, Any]", requested).items()
        elif isinstance(requested, str):
            name, _, count = requested.partition(":")
        else:
            return None
        try:
            return str(name), int(float(count or 1))
        except (TypeError, ValueError):
            return None

    @property
    def requested_gpus(self) -> list[str]:
        """The accelerators of the resources."""
        name, count = self.accelerator or ("", 0)
        return [name] * max(1, count) if name else []

    def release_command(self, name: str, request_id: str | None) -> str:
        """Returns SkyPilot's command that deletes the cluster."""
        return f"sky down -y {name}"


class HfJobsFlavor(Access, frozen=True, kw_only=True):
    """A Hugging Face job; its state and checkpoints are exchanged through a private bucket."""

    kind = "hf_jobs"
    opened_by = "stillroom.remote.providers.hf_jobs:open_job"
    released_by = "stillroom.remote.providers.hf_jobs:release_job"
    is_provisioned = True
    bills_from = "start"  # Until then files go to a bucket, which costs nothing.

    flavor: str
    timeout: str = "4h"
    """The time after which the service terminates the job."""
    namespace: str | None = None
    image: str | None = None

    @property
    def summary(self) -> str:
        """The flavor."""
        return self.flavor

    @property
    def requested_gpus(self) -> list[str]:
        """The flavor's GPUs, derived from its name."""
        # `a100-large` has one GPU, `l4x4` and `a10g-largex4` have four.
        name, x, num = self.flavor.partition("-")[0].partition("x")
        size = re.search(r"x(\d+)$", self.flavor)
        if name.startswith("cpu") or name == "zero":
            return []
        count = int(num) if x and num.isdecimal() else int(size[1]) if size else 1
        return [_FLAVOR_GPUS.get(name, name.upper())] * count

    def release_command(self, name: str, request_id: str | None) -> str:
        """Returns the `hf` command that cancels the job."""
        # The id is unknown if the process was killed before it received it.
        return f"hf jobs cancel {request_id or f'ID  # the id of {name} in `hf jobs ps`'}"


class RayCluster(Access, frozen=True, kw_only=True):
    """A Ray cluster; the run's process is local and distributes its work over the cluster."""

    kind = "ray"
    can_be_probed = False

    address: str
    workers: int | None = None
    """The number of worker processes; None to use that of the request or config.yml."""

    @property
    def summary(self) -> str:
        """The address."""
        return self.address


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of machines.yml, as it is stored in remote.json; exactly one kind is set."""

    name: str
    file: str = ""
    """The machines.yml with this entry; keys are sent only to machines in the user's own file."""
    ssh: SshAddress | None = None
    skypilot: SkyPilotCluster | None = None
    hf_jobs: HfJobsFlavor | None = None
    ray: RayCluster | None = None
    price_per_hour: float | None = None
    """The machine's price in US dollars per hour; None if unknown."""
    budget_usd: float | None = None
    """The maximum total cost of a workspace's runs on the machine; None for no limit."""
    folder: str = "~/.stillroom-remote"
    """The folder on the machine that holds all of Stillroom's files."""
    python: str | None = None
    """An interpreter on the machine whose packages are used, such as an image's torch. If None, the
    first Python of at least 3.11, or one that uv installs, gets its packages from Stillroom."""
    max_hours: float = 24.0
    """The hours after which a run stops with a checkpoint, even if the connection is lost."""
    keep_remote: bool = False
    """Whether a run's folder stays on the machine after all its files have been downloaded."""

    @property
    def access(self) -> Access:
        """How the machine is reached: the kind that is set."""
        return next((kind for kind in self.kinds if kind is not None), Access())

    @property
    def kinds(self) -> tuple[Access | None, ...]:
        """The sections of all kinds, of which exactly one is set."""
        return self.ssh, self.skypilot, self.hf_jobs, self.ray
