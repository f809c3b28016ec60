"""What is known of a machine without a connection: its last answers, and how fast runs were.

An answer is kept in the workspace, so that a plan for a machine that is down, or busy, needs no
connection. It counts for the entry of machines.yml that it was given for, and for no other.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import DataError
from stillroom.files import content_hash, read_json, write_json
from stillroom.lineage import now
from stillroom.places import make_folder
from stillroom.remote.host import RunHost
from stillroom.remote.machine import Machine
from stillroom.remote.records import JobSpec, MachineFacts, RemoteView
from stillroom.run_folder import REMOTE_FILE, VIEW_FILE, RunFolder, all_runs
from stillroom.settings import Workspace
from stillroom.train.config.schema import TrainConfig
from stillroom.train.planning.hardware import EarlierRate, Hardware
from stillroom.types import RunKind, RunStatus

_HOUR_S = 3600
_TRAINING = (RunKind.SFT, RunKind.DPO, RunKind.DISTILL)


class KnownMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The content of .stillroom/machines/<name>.json: what a machine answered last."""

    address: str
    """A hash of how it was reached, without its price and limits."""
    asked_at: str
    facts: MachineFacts
    price_per_hour: float | None = None
    """What its provider charges for an hour, in US dollars; None if that is not known."""


def probe_machine(workspace: Workspace, machine: Machine, host: RunHost) -> MachineFacts:
    """Probes a machine, or the provider of one that is not up, and keeps the answer.

    Raises an EngineError if there is none.
    """
    try:
        facts = host.facts()
        price = host.price_per_hour() if machine.access.is_provisioned else None
    finally:
        host.close()
    remember(workspace, machine, facts, price)
    return facts


def remember(
    workspace: Workspace,
    machine: Machine,
    facts: MachineFacts,
    price_per_hour: float | None = None,
) -> None:
    """Keeps what a machine has answered, for plans and lists to come."""
    if facts.num_processors is None:
        return  # It is not up, and which one it will be is not known.
    file = _file(workspace, machine)
    make_folder(file.parent)
    known = KnownMachine(
        address=_address(machine), asked_at=now(), facts=facts, price_per_hour=price_per_hour
    )
    write_json(file, known)


def recall(workspace: Workspace, machine: Machine) -> KnownMachine | None:
    """Returns what a machine answered last; None if it never did, or its entry has changed."""
    try:
        known = read_json(_file(workspace, machine), KnownMachine)
    except (OSError, DataError):
        return None
    return known if known.address == _address(machine) else None


def _file(workspace: Workspace, machine: Machine) -> Path:
    return workspace.root / ".stillroom" / "machines" / f"{machine.name}.json"


def _address(machine: Machine) -> str:
    return content_hash(msgspec.to_builtins((*machine.kinds, machine.python)))


def remote_runs(workspace: Workspace) -> Iterator[tuple[RunFolder, JobSpec, RemoteView | None]]:
    """Yields the runs that are or were done on other machines, in no particular order."""
    for folder in all_runs(workspace):
        with suppress(OSError, DataError):
            spec = read_json(folder.path / REMOTE_FILE, JobSpec)
            yield folder, spec, read_view(folder)


def read_view(folder: RunFolder) -> RemoteView | None:
    """Returns what the follower has noted of a remote run; None before it has, or of others."""
    try:
        return read_json(folder.path / VIEW_FILE, RemoteView)
    except (OSError, DataError):
        return None


def hardware_of(
    workspace: Workspace, machine: Machine, config: TrainConfig | None = None
) -> Hardware:
    """Returns what is known of a machine's hardware, and of its speed in this very training."""
    known = recall(workspace, machine)
    measured = _measured(workspace, machine, config) if config is not None else None
    prices = (
        machine.price_per_hour,
        known.price_per_hour if known is not None else None,
        _earlier_price(workspace, machine),
    )
    price = next((one for one in prices if one is not None), None)
    if known is None:
        gpus = machine.access.requested_gpus
        return Hardware(
            machine.name,
            gpus=gpus,
            is_known=bool(gpus),
            price_per_hour=price,
            is_installed=False,
            measured=measured,
        )
    facts = known.facts
    return Hardware(
        machine.name,
        gpus=[name for gpu in facts.gpus for name in _gpu_names(gpu)],
        gpu_memory_gb=facts.gpu_memory_gb,
        num_processors=facts.num_processors,
        memory_gb=facts.memory_gb,
        free_disk_gb=facts.free_disk_gb,
        price_per_hour=price,
        # A cluster's disk and a job's go with them.
        is_installed=facts.stillroom_version is not None and not machine.access.is_provisioned,
        measured=measured,
    )


def _gpu_names(text: str) -> list[str]:
    """Returns the names in one of `MachineFacts.gpus`; of a provider's `4 x A10G, …` four."""
    name = text.rpartition(",")[0] or text
    several = re.fullmatch(r"(\d{1,2}) x (.+)", name)
    return [several[2]] * int(several[1]) if several else [name]


def _earlier_price(workspace: Workspace, machine: Machine) -> float | None:
    """Returns what an hour of a rented machine cost in its last run; None if not known."""
    if not machine.access.is_provisioned:
        return None
    found = [
        (view.last_contact or "", view.machine_usd / view.seconds_used * _HOUR_S)
        for _, spec, view in remote_runs(workspace)
        if _address(spec.machine) == _address(machine)
        and view is not None
        and view.machine_usd
        and view.seconds_used
    ]
    return max(found)[1] if found else None


def _measured(workspace: Workspace, machine: Machine, config: TrainConfig) -> EarlierRate | None:
    """Returns the rate of the last run of the same training on a machine; None if there is none.

    A failed run may have measured its slow first steps: it counts only if none succeeded.
    """
    wanted = _settings(config.model_dump(mode="json"))
    found = list[tuple[bool, str, EarlierRate]]()
    for folder, spec, _ in remote_runs(workspace):
        if spec.machine.name != machine.name or _address(spec.machine) != _address(machine):
            continue
        with suppress(OSError, DataError):
            state = folder.read()
            rate = state.metrics.get("tokens_per_s") if state.kind in _TRAINING else None
            if rate and _settings(read_json(folder.path / "config.json", dict[str, Any])) == wanted:
                has_succeeded = state.status is RunStatus.SUCCEEDED
                earlier = EarlierRate(folder.run_id, rate)
                found.append((has_succeeded, state.created_at, earlier))
    return max(found, key=lambda run: run[:2])[2] if found else None


def _settings(config: Mapping[str, Any]) -> list[Any]:
    """Returns the settings on which a training's speed depends most."""
    model, data = config.get("model") or {}, config.get("data") or {}
    names = ("path", "qlora_rank", "precision", "quantization", "gradient_checkpointing")
    chosen = [config.get("dataset_type"), *(model.get(name) for name in names)]
    if config.get("dataset_type") == "distill":
        rollout, teacher = config.get("rollout") or {}, config.get("teacher") or {}
        chosen += [data.get("batch_size"), data.get("group_size")]
        chosen += [rollout.get("max_tokens"), rollout.get("max_turns"), teacher.get("path")]
    return chosen
