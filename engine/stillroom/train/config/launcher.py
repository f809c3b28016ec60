"""The section of config.yml that says in which processes a run trains."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stillroom.train.config.distill_sections import ConfigSection

_KEYS_OF_KIND = {
    "local": {"kind"},
    "accelerate": {"kind", "num_processes", "strategy", "num_machines", "main_address"},
    "ray": {"kind", "num_processes", "strategy", "address"},
}


class LauncherSection(ConfigSection):
    """The processes that a run trains in; `launcher: accelerate` is short for the kind alone."""

    kind: Literal["local", "accelerate", "ray"] = "local"
    """How training processes are started; local: the run's own process trains."""
    num_processes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The number of processes on all machines together; None (accelerate): one for each GPU."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: each process holds the whole model; fsdp2: each holds a share of the weights and of the
    optimiser's state."""
    num_machines: Annotated[int, Field(ge=1, le=1024)] = 1
    """The number of machines (accelerate); the run waits for the other machines and notes the
    command to start on each."""
    main_address: str | None = None
    """The host:port at which the other machines reach this one (accelerate on several machines)."""
    address: str | None = None
    """The Ray cluster: host:port, ray://…, auto, or local for a new one on this machine (ray)."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "LauncherSection":
        for key in sorted(self.model_fields_set - _KEYS_OF_KIND[self.kind]):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"launcher.{key} does nothing with kind: {self.kind}")
        if self.kind == "ray" and (self.address is None or self.num_processes is None):
            raise ValueError(
                "launcher.kind: ray needs address (host:port, auto, or local for a cluster on this "
                "machine) and num_processes"
            )
        if self.num_machines > 1 and split_address(self.main_address or "") is None:
            raise ValueError(
                "launcher.num_machines needs main_address: host:port of this machine, as the "
                "others reach it"
            )
        if self.num_processes is not None and self.num_processes % self.num_machines:
            raise ValueError("launcher.num_processes must be a multiple of num_machines")
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a share of the weights."""
        return self.kind != "local" and self.strategy == "fsdp2"


def split_address(address: str) -> tuple[str, int] | None:
    """Returns the host and port of `host:port` or `ray://host:port`; None for any other text."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None
