"""The kinds of machines: their sections of machines.yml, and how remote.json stores them.

A new kind is a section and a struct here, named in `Kind`, `MachineEntry` and `Machine`; `hosts.py`
opens it, and releases it if Stillroom provisions it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

import msgspec
from pydantic import Field, field_validator, model_validator

from stillroom.secrecy.keys import is_loopback
from stillroom.validation import StrictModel

Kind = Literal["ssh", "skypilot", "hf_jobs", "ray"]
EXAMPLE = "gpu-box: {ssh: me@host, price_per_hour: 2.40}"
"""An entry of machines.yml, for error messages."""
_SSH_PORT = 22
_FLAVOR_GPUS = {"a100": "A100 80GB"}
"""GPU names of flavors that do not state the GPU's memory."""


_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000)]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind of machine is reached, and when it starts to cost money.

    The base class stands for a kind that this version of Stillroom does not know.
    """

    kind: ClassVar[Kind | Literal["unknown"]] = "unknown"
    is_provisioned: ClassVar[bool] = False
    """Whether Stillroom provisions the machine and so has to release it."""
    bills_from: ClassVar[Literal["provision", "contact", "start"]] = "contact"
    """The event from which the machine is billed."""
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


class _Ssh(StrictModel):
    host: _Line
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    options: tuple[_Line, ...] = ()

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host.startswith("-"):
            raise ValueError("a host cannot begin with `-`: ssh would parse it as an option")
        if "://" in host or any(map(str.isspace, host)):
            raise ValueError("must be a host as ssh accepts it: an alias, or user@host")
        if re.fullmatch(r"[^:]+:\d+", host):
            name, _, port = host.partition(":")
            raise ValueError(f"give the port separately: {{host: {name}, port: {port}}}")
        if not host.rpartition("@")[2]:
            raise ValueError("the host name is missing")
        return host

    @model_validator(mode="after")
    def _check_not_local(self) -> "_Ssh":
        # A forwarded port leads elsewhere: to a container, a virtual machine, a tunnel's far end.
        if is_loopback(self.host.rpartition("@")[2].lower()) and self.port in (None, _SSH_PORT):
            raise ValueError(
                "host is this machine: leave `where` out to run locally "
                "(for a forwarded port, set `port`)"
            )
        return self


class SshAddress(Access, frozen=True, kw_only=True):
    """A machine that is reached with the system's ssh."""

    kind = "ssh"

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


class _SkyPilot(StrictModel):
    autostop: Annotated[int, Field(ge=1)] = 10
    resources: Annotated[dict[str, Any], Field(min_length=1)]


class SkyPilotCluster(Access, frozen=True, kw_only=True):
    """A cluster that SkyPilot provisions and that ssh then reaches by its name."""

    kind = "skypilot"
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
        """Returns SkyPilot's command that deletes the cluster."""
        return f"sky down -y {name}"


class _HfJobs(StrictModel):
    flavor: _Line
    timeout: Annotated[str, Field(pattern=r"^\d+(\.\d+)?[smhd]?$")] = "4h"
    namespace: _Line | None = None
    image: _Line | None = None


class HfJobsFlavor(Access, frozen=True, kw_only=True):
    """A Hugging Face job; its state and checkpoints are exchanged through a private bucket."""

    kind = "hf_jobs"
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
        name, times, num = self.flavor.partition("-")[0].partition("x")
        size = re.search(r"x(\d+)$", self.flavor)
        if name.startswith("cpu") or name == "zero":
            return []
        count = int(num) if times and num.isdecimal() else int(size[1]) if size else 1
        return [_FLAVOR_GPUS.get(name, name.upper())] * count

    def release_command(self, name: str, request_id: str | None) -> str:
        """Returns the `hf` command that cancels the job."""
        # The id is unknown if the process was killed before it received it.
        return f"hf jobs cancel {request_id or f'ID  # the id of {name} in `hf jobs ps`'}"


class _Ray(StrictModel):
    address: _Line
    workers: Annotated[int, Field(ge=1, le=999)] | None = None


class RayCluster(Access, frozen=True, kw_only=True):
    """A Ray cluster; the run's process is local and distributes its work over the cluster."""

    kind = "ray"
    can_be_probed = False

    address: str
    workers: int | None = None
    """The number of worker processes; None for that of the request or config.yml."""

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


_SHORT_FORMS = {"ssh": "host", "hf_jobs": "flavor", "ray": "address"}
"""The key that a section's value is expanded to if the value is a plain string."""


class MachineEntry(StrictModel):
    """One machine of machines.yml, with short forms expanded."""

    ssh: _Ssh | None = None
    skypilot: _SkyPilot | None = None
    hf_jobs: _HfJobs | None = None
    ray: _Ray | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    budget_usd: Annotated[float, Field(gt=0)] | None = None
    folder: _Line = "~/.stillroom-remote"
    python: _Line | None = None
    max_hours: Annotated[float, Field(gt=0, le=24 * 365)] = 24.0
    keep_remote: bool = False

    def machine(self, name: str, file: str) -> Machine:
        """Returns the entry as a Machine; `file` is the machines.yml that has the entry."""
        values = {"name": name, "file": file, **self.model_dump(exclude_none=True)}
        return msgspec.convert(values, Machine)

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        parts = folder.rstrip("/").split("/")
        if parts[0] not in ("~", "") or len(parts) == 1 or ".." in parts:
            raise ValueError("must be an absolute path or begin with ~/, e.g. /data/runs")
        return folder

    @field_validator("python")
    @classmethod
    def _check_python(cls, python: str | None) -> str | None:
        if python is not None and python.startswith("-"):
            raise ValueError("must be the path of an interpreter on that machine")
        return python

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"must be a mapping, e.g. {EXAMPLE}")
        entry = dict(cast("dict[str, Any]", value))
        kinds = get_args(Kind)
        if sum(entry.get(kind) is not None for kind in kinds) != 1:
            meant = "; write `host` and `user` as ssh: user@host" if "host" in entry else ""
            raise ValueError(f"needs exactly one of {', '.join(kinds)}{meant}")
        for kind, key in _SHORT_FORMS.items():
            if isinstance(entry.get(kind), str):
                entry[kind] = {key: entry[kind]}
        sky = entry.get("skypilot")
        if isinstance(sky, dict):
            resources = dict(cast("dict[str, Any]", sky))
            own = {"autostop": resources.pop("autostop")} if "autostop" in resources else {}
            entry["skypilot"] = {**own, "resources": resources}
        return entry

    @model_validator(mode="after")
    def _check_budget(self) -> "MachineEntry":
        if self.budget_usd is not None and self.price_per_hour is None and self.ssh is not None:
            raise ValueError("budget_usd limits the machine's cost, so it needs price_per_hour")
        if self.budget_usd is not None and self.ray is not None:
            raise ValueError("budget_usd is not supported for a Ray cluster: its price is unknown")
        return self

    @model_validator(mode="after")
    def _check_keep_remote(self) -> "MachineEntry":
        if self.keep_remote and self.skypilot is not None:
            raise ValueError(
                "keep_remote is not supported: a cluster is deleted with its disk after its last "
                "run"
            )
        return self
