"""Checks that reject, before anything is sent, what cannot be done on another machine."""

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

_MIN_BUDGET_S = 60.0
_MAX_ROWS = 1000
"""The number of rows of a file that are checked, as in the checks of training and rollouts."""


class _ContainerRow(msgspec.Struct):
    docker: str | None = None


def check_remote_request(request: PlacedRequest, machine: Machine) -> None:
    """Raises InputError for options of a request that only work on the local machine."""
    if getattr(request, "dry_run", False):
        raise InputError(
            "where is not supported with dry_run, which calls nothing", "set only one of the two"
        )
    if isinstance(request, GenerateRollouts) and request.ray_address is not None:
        raise InputError(
            f"ray_address and where: {machine.name} both choose where the rollouts run",
            "set only one of the two",
        )
    if isinstance(request, ExportModel) and request.format == "gguf":
        raise InputError(
            "format gguf is written on the local machine only",
            "set format to merged, or leave where out",
        )
    # Checked before keys, so that the user is not asked to allow a key for an unusable address.
    if (url := getattr(request, "base_url", None)) is not None:
        _check_reachable(Address("the model", url, is_loadable=True), machine)
    budget = getattr(request, "budget_usd", None)
    if budget is not None and machine.price_per_hour is None and not machine.access.is_provisioned:
        raise InputError(
            f"budget_usd includes the cost of {machine.name}, whose price is unknown",
            f"set price_per_hour of {machine.name} in {machine.file} (0 if it is free)",
        )
    if budget is not None and machine.price_per_hour:
        _check_budget(budget, machine.price_per_hour, machine)


def min_budget_usd(machine: Machine) -> float:
    """Returns the minimum budget in US dollars: the price of one minute of the machine."""
    return (machine.price_per_hour or 0.0) * _MIN_BUDGET_S / 3600


def _check_budget(budget_usd: float, price_per_hour: float, machine: Machine) -> None:
    """Raises InputError for a budget that would be spent before the run has started."""
    min_usd = min_budget_usd(machine)
    if budget_usd < min_usd:
        raise InputError(
            f"budget_usd {budget_usd:g} pays for {budget_usd / price_per_hour * 3600:.0f} s of "
            f"{machine.name} (${price_per_hour:g} an hour), too little to upload and start a run",
            f"give at least ${min_usd:.2f}, and more for the machine's first run, which spends "
            "some minutes installing packages; or omit `where` to run locally",
        )


def check_remote_config(config: TrainConfig, machine: Machine) -> None:
    """Raises InputError for settings of config.yml that need the local machine or a cluster."""
    launcher = config.launcher
    if launcher.kind == "ray":
        raise InputError(
            f"launcher: ray and where: {machine.name} both choose where the training runs",
            "use launcher: local (or accelerate for several GPUs) with where, or leave where out",
        )
    if launcher.num_machines > 1:
        raise InputError(
            f"launcher.num_machines {launcher.num_machines} cannot be combined with `where`, since "
            f"processes are started on {machine.name} only",
            "train on one machine: launcher.num_machines=1",
        )
    if config.trainer.trackio_project is not None:
        raise InputError(
            "trainer.trackio_project cannot be combined with `where`, since its metrics stay in a "
            "database on the machine that trains",
            "use trainer.tensorboard or trainer.wandb_project; the run's metrics.jsonl is always "
            "downloaded",
        )


def check_remote_needs(needs: Needs, machine: Machine) -> None:
    """Raises InputError for servers and containers that exist only on the local machine."""
    for server in needs.servers:
        spec = parse_spec(server)
        if hide_secrets(server)[1]:
            raise InputError(
                "the command line or URL of an MCP server contains a secret, which would be "
                f"visible on {machine.name}",
                "let the server read the key from an environment variable, listed in the user's "
                "keys.yml: - {key: NAME, tools: true}",
            )
        if not spec.command:
            _check_reachable(Address("the MCP server", spec.url), machine)
    for address in needs.addresses:
        _check_reachable(address, machine)
    _check_images(needs.prompts, machine)


def _check_reachable(address: Address, machine: Machine) -> None:
    """Raises InputError for a loopback address, which would mean the machine itself."""
    host = urlsplit(address.url).hostname or ""
    if _is_this_machine(host.lower()):
        options = [f"give an address that {machine.name} can reach"]
        if address.is_loadable:
            options.append("load the model in the run's process (provider hf)")
        raise InputError(
            f"{address.label} is at {address.url}, a loopback address: on {machine.name} it would "
            f"mean {machine.name} itself",
            f"{', '.join(options)}, or leave where out",
        )


def _is_this_machine(host: str) -> bool:
    """Returns whether a host is a loopback address, in any spelling such as 127.1 or 0.0.0.0."""
    if is_loopback(host) or host.endswith((".localhost", "-localhost")):
        return True
    try:
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))
    except (OSError, ValueError):
        return False
    return address.is_loopback or address.is_unspecified


def _check_images(prompts: Sequence[Path], machine: Machine) -> None:
    """Raises InputError for a row whose Docker image is built from a local folder."""
    for path in prompts:
        if path.suffix == ".txt":
            continue
        for line in itertools.islice(read_row_lines(path), _MAX_ROWS):
            name = _docker_image_of(line.data)
            if name is not None and name.startswith(LOCAL):
                raise InputError(
                    f"{path}:{line.number}: docker {name!r} is built from a local folder",
                    f"give an image that {machine.name} can pull, or leave where out",
                )


def _docker_image_of(row: bytes) -> str | None:
    """Returns the Docker image that a row names; None if it names none."""
    if b'"docker"' not in row:
        return None
    try:
        return msgspec.json.decode(row, type=_ContainerRow).docker
    except (msgspec.DecodeError, RecursionError):
        return None  # The run reports the malformed row.
