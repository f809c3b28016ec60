"""What cannot be done on another machine, refused by name before anything is sent."""

import ipaddress
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from stillroom.data.row_files import read_row_lines
from stillroom.errors import InputError
from stillroom.export.request import ExportModel
from stillroom.remote.bundle.needs import Address, Needs
from stillroom.remote.machine import Machine
from stillroom.rollout.request import GenerateRollouts
from stillroom.secrecy.commands import hide_secrets
from stillroom.secrecy.keys import is_loopback
from stillroom.tools.containers import LOCAL
from stillroom.tools.mcp.spec import parse_spec
from stillroom.train.config.schema import TrainConfig
from stillroom.validation import PlacedRequest

_LEAST_BOUGHT_S = 60.0
_LOOKED_AT = 1000
"""As many rows of a file are looked at as training and rollouts check at a call."""


class _ContainerRow(msgspec.Struct):
    docker: str | None = None


def refuse_request(request: PlacedRequest, machine: Machine) -> None:
    """Raises InputError for options of a request that mean this machine."""
    if getattr(request, "dry_run", False):
        raise InputError(
            "dry_run calls nothing, so it needs no other machine", "leave where out with dry_run"
        )
    if isinstance(request, GenerateRollouts) and request.ray_address is not None:
        raise InputError(
            f"ray_address and where: {machine.name} both say where the rollouts are made",
            "leave one of them out",
        )
    if isinstance(request, ExportModel) and request.format == "gguf":
        raise InputError(
            "format gguf needs llama.cpp, which is a folder of this machine",
            f"export it as merged with where: {machine.name}, or as gguf without where",
        )
    # Before any key is looked at, as the user would allow one for an address that cannot do.
    if (url := getattr(request, "base_url", None)) is not None:
        _refuse_local(Address("the model", url), machine)
    budget = getattr(request, "budget_usd", None)
    if budget is not None and machine.price_per_hour is None and not machine.access.is_provisioned:
        raise InputError(
            f"budget_usd counts what {machine.name} costs, and its price is not known",
            f"write price_per_hour to the entry {machine.name} in {machine.file} (0 if its hours "
            "cost nothing)",
        )
    if budget is not None and machine.price_per_hour:
        _refuse_too_little(budget, machine.price_per_hour, machine)


def least_budget(machine: Machine) -> float:
    """Returns the US dollars below which a budget is spent before a run has begun."""
    return (machine.price_per_hour or 0.0) * _LEAST_BOUGHT_S / 3600


def _refuse_too_little(budget_usd: float, price_per_hour: float, machine: Machine) -> None:
    """Raises InputError for a budget that would be spent before the run has begun."""
    least = least_budget(machine)
    if budget_usd < least:
        raise InputError(
            f"budget_usd {budget_usd:g} pays for {budget_usd / price_per_hour * 3600:.0f} s of "
            f"{machine.name} (${price_per_hour:g} an hour), too little to upload and start a run",
            f"give at least ${least:.2f}, and some minutes more for a machine's first run, which "
            "installs packages; or leave where out",
        )


def refuse_config(config: TrainConfig, machine: Machine) -> None:
    """Raises InputError for settings of config.yml that mean this machine, or a cluster."""
    launcher = config.launcher
    if launcher.kind == "ray":
        raise InputError(
            f"launcher: ray and where: {machine.name} both say where the training is done",
            "take launcher: local (or accelerate for several GPUs) with where, or leave where out",
        )
    if launcher.num_machines > 1:
        raise InputError(
            f"launcher.num_machines {launcher.num_machines} needs processes on other machines than "
            f"{machine.name}, which stillroom does not start",
            "train on one machine: launcher.num_machines=1",
        )
    if config.trainer.trackio_project is not None:
        raise InputError(
            "trainer.trackio_project writes its metrics to a database on the machine that trains, "
            "and they would not be downloaded",
            "use trainer.tensorboard or trainer.wandb_project; the run's metrics.jsonl is "
            "downloaded anyway",
        )


def refuse_needs(needs: Needs, machine: Machine) -> None:
    """Raises InputError for servers and containers that only this machine has."""
    for server in needs.servers:
        spec = parse_spec(server)
        if hide_secrets(server)[1]:
            raise InputError(
                "the command line or URL of an MCP server holds a secret, which would be visible "
                f"on {machine.name}",
                "let the server read the key from a variable, and name that in the user's "
                "keys.yml: - {key: NAME, tools: true}",
            )
        if not spec.command:
            _refuse_local(Address("the MCP server", spec.url), machine)
    for address in needs.addresses:
        _refuse_local(address, machine)
    _refuse_dockerfiles(needs.prompts, machine)


def _refuse_local(address: Address, machine: Machine) -> None:
    host = urlsplit(address.url).hostname or ""
    if _is_this_machine(host.lower()):
        raise InputError(
            f"{address.label} is at {address.url}, which on {machine.name} would be a different "
            "machine than here",
            f"give an address that {machine.name} reaches, load the model in the run (provider hf)"
            ", or leave where out",
        )


def _is_this_machine(host: str) -> bool:
    """Whether a host means the machine that calls it, also spelled as 127.1 or 0.0.0.0, say."""
    if is_loopback(host) or host.endswith((".localhost", "-localhost")):
        return True
    try:
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))
    except (OSError, ValueError):
        return False
    return address.is_loopback or address.is_unspecified


def _refuse_dockerfiles(prompts: Sequence[Path], machine: Machine) -> None:
    for path in prompts:
        if path.suffix == ".txt":
            continue
        for line in itertools.islice(read_row_lines(path), _LOOKED_AT):
            name = _container_of(line.data)
            if name is not None and name.startswith(LOCAL):
                raise InputError(
                    f"{path}:{line.number}: docker {name!r} is built from a folder of this machine",
                    f"name an image that {machine.name} can fetch, or leave where out",
                )


def _container_of(row: bytes) -> str | None:
    if b'"docker"' not in row:
        return None
    try:
        return msgspec.json.decode(row, type=_ContainerRow).docker
    except (msgspec.DecodeError, RecursionError):
        return None  # the run says what is wrong with the row
