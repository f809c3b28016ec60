"""The kinds of machines on which runs can be done, each as remote.json keeps it.

A new kind is a struct here, a field of `Machine` and an element of its `kinds`; its section of
machines.yml is in `machines.py`, and `hosts.py` opens and releases it.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import msgspec

Kind = Literal["ssh", "skypilot", "hf_jobs", "ray"]
_FLAVOR_GPUS = {"a100": "A100 80GB"}
"""GPUs of flavors that have more memory than the plain name says."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind of machine is reached, and from when on it costs money.

    As it stands it is a kind that this version of Stillroom does not know.
    """

    kind: ClassVar[Kind | Literal["unknown"]] = "unknown"
    is_provisioned: ClassVar[bool] = False
    """Whether we provision the machine, and so have to release it."""
    bills_from: ClassVar[Literal["provision", "contact", "start"]] = "contact"
    """What the hours that it costs begin with."""
    can_be_probed: ClassVar[bool] = True
    """Whether the machine, or its provider, says what hardware it has."""

    @property
    def summary(self) -> str:
        """How the machine is reached, or what is requested from its provider, in a line."""
        return ""

    @property
    def key_host(self) -> str | None:
        """The host that stands for it in keys.yml; None for the machine's name."""
        return None

    @property
    def requested_gpus(self) -> list[str]:
        """The GPUs that machines.yml requests from a provider, one name for each."""
        return []

    def release_command(self, name: str, request_id: str | None) -> str | None:
        """Returns the command with which the user releases it by hand; None if nobody has to."""
        return None


class SshAddress(Access, frozen=True, kw_only=True):
    """A machine that the system's own ssh reaches."""

    kind = "ssh"

    host: str
    """What `ssh` is given: an alias of ~/.ssh/config, or user@host."""
    port: int | None = None
    options: list[str] = []
    """More arguments for `ssh`, such as `-F` and a file, before the host."""

    @property
    def summary(self) -> str:
        """The host, and its port if one is given."""
        return f"{self.host} port {self.port}" if self.port else self.host

    @property
    def key_host(self) -> str | None:
        """The host, without the user."""
        return self.host.rpartition("@")[2]


class SkyPilotCluster(Access, frozen=True, kw_only=True):
    """A cluster that SkyPilot provisions; then ssh reaches it by its name."""

    kind = "skypilot"
    is_provisioned = True
    bills_from = "provision"

    resources: dict[str, object]
    """The arguments of `sky.Resources`, as machines.yml has them: accelerators, use_spot, …"""
    autostop: int = 10
    """The idle minutes after which SkyPilot deletes it by itself."""

    @property
    def summary(self) -> str:
        """The resources that are requested."""
        return ", ".join(f"{key}: {value}" for key, value in self.resources.items())

    @property
    def accelerator(self) -> tuple[str, int] | None:
        """The one accelerator that is requested, and how many; None if none or any of several."""
        wanted = self.resources.get("accelerators")
        if isinstance(wanted, Mapping) and len(wanted) == 1:
            ((name, count),) = cast("Mapping[str, Any]", wanted).items()
        elif isinstance(wanted, str):
            name, _, count = wanted.partition(":")
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
        """Returns the command of SkyPilot that deletes the cluster."""
        return f"sky down -y {name}"


class HfJobsFlavor(Access, frozen=True, kw_only=True):
    """A job of huggingface_hub; its state and checkpoints go through a private bucket."""

    kind = "hf_jobs"
    is_provisioned = True
    bills_from = "start"  # Until then files go to a bucket, which costs nothing.

    flavor: str
    timeout: str = "4h"
    """The time after which the service ends the job by itself."""
    namespace: str | None = None
    image: str | None = None

    @property
    def summary(self) -> str:
        """The flavor."""
        return self.flavor

    @property
    def requested_gpus(self) -> list[str]:
        """The GPUs of the flavor, as its name says them."""
        name, times, num = self.flavor.partition("-")[0].partition("x")
        size = re.search(r"x(\d+)$", self.flavor)
        if name.startswith("cpu") or name == "zero":
            return []
        count = int(num) if times and num.isdecimal() else int(size[1]) if size else 1
        return [_FLAVOR_GPUS.get(name, name.upper())] * count

    def release_command(self, name: str, request_id: str | None) -> str:
        """Returns the command of the hub that ends the job."""
        # Without its id, which a kill may have kept from us, it is found by its name.
        return f"hf jobs cancel {request_id or f'ID  # the id of {name} in `hf jobs ps`'}"


class RayCluster(Access, frozen=True, kw_only=True):
    """A Ray cluster; the run's own process stays here, and the cluster does its work."""

    kind = "ray"
    can_be_probed = False

    address: str
    workers: int | None = None
    """The processes that do the work; None: as many as the request or config.yml says."""

    @property
    def summary(self) -> str:
        """The address."""
        return self.address


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of machines.yml, as remote.json keeps it: exactly one kind is set."""

    name: str
    file: str = ""
    """The machines.yml that names it; keys go to a machine of the user's own file only."""
    ssh: SshAddress | None = None
    skypilot: SkyPilotCluster | None = None
    hf_jobs: HfJobsFlavor | None = None
    ray: RayCluster | None = None
    price_per_hour: float | None = None
    """US dollars for an hour of the machine; None if it is not known."""
    budget_usd: float | None = None
    """The most that all runs of a workspace on it may cost together; None for no limit."""
    folder: str = "~/.stillroom-remote"
    """The folder on that machine that holds everything of Stillroom's."""
    python: str | None = None
    """An interpreter on it whose packages are used, such as an image's own torch; None: the first
    Python of at least 3.11, or one that uv installs, with packages of our own."""
    max_hours: float = 24.0
    """The hours after which a run on it stops by itself, with a checkpoint, reached or not."""
    keep_remote: bool = False
    """Whether a run's folder on it stays when all its files have been downloaded."""

    @property
    def access(self) -> Access:
        """How the machine is reached: the one of its kinds that is set."""
        return next((kind for kind in self.kinds if kind is not None), Access())

    @property
    def kinds(self) -> tuple[Access | None, ...]:
        """The section of each kind, of which one is set."""
        return self.ssh, self.skypilot, self.hf_jobs, self.ray
