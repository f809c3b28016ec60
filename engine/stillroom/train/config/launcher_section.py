"""config.yml's `launcher`: in which processes a run trains. Needs no torch."""

import importlib.util
import socket
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.errors import ConfigError, missing_extra

_CONNECT_S = 3.0
_OWN_KEYS = {
    "local": {"kind"},
    "accelerate": {"kind", "num_processes", "strategy", "num_machines", "main_address"},
    "ray": {"kind", "num_processes", "strategy", "address"},
}


class LauncherSection(BaseModel):
    """In which processes a run trains; `launcher: accelerate` says the kind alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local", "accelerate", "ray"] = "local"
    """local: in the run's own process."""
    num_processes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Of all machines together; default with accelerate: one for each GPU."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: each process holds the whole model; fsdp2: its share of the weights and optimiser."""
    num_machines: Annotated[int, Field(ge=1, le=1024)] = 1
    """accelerate: the run waits for the others, and notes the command to start on each."""
    main_address: str | None = None
    """accelerate on several machines: host:port of this one, as the others reach it."""
    address: str | None = None
    """ray: host:port or ray://… of a cluster, auto, or local for one on this machine."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, given: Any) -> Any:
        return {"kind": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "LauncherSection":
        for key in sorted(self.model_fields_set - _OWN_KEYS[self.kind]):
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
        """Whether a process holds its share of the weights only."""
        return self.kind != "local" and self.strategy == "fsdp2"


def split_address(address: str) -> tuple[str, int] | None:
    """Returns host and port of `host:port`, also behind ray://; None if it is no such address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None


def check_launcher(section: LauncherSection) -> None:
    """Raises an EngineError where what a launcher needs is not there; starts nothing."""
    if section.kind == "accelerate":
        if importlib.util.find_spec("accelerate") is None:
            raise missing_extra("train", "launcher: accelerate")
        if section.main_address is not None:
            _check_resolves(section.main_address)
    elif section.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise missing_extra("ray", "launcher: ray")
        if section.address is not None:
            _check_answers(section.address)


def _check_resolves(address: str) -> None:
    host = address.rpartition(":")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"launcher.main_address: the host {host!r} is unknown here: {error}",
            "give this machine's name or IP address, as the other machines reach it",
        ) from error


def _check_answers(address: str) -> None:
    place = split_address(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at launcher.address {address!r}: {error}",
            "start one there with `ray start --head`, or give local for one on this machine",
        ) from error
