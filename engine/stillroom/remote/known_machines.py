"""What is known about a machine without connecting to it: its last probe, and its runs' speed.

The last probe is cached in the workspace, so that planning for a machine that is down or busy needs
no connection. It is valid only while the machine's entry in machines.yml does not change.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import DataError
from stillroom.files import content_hash, read_json, write_json
from stillroom.lineage import now
from stillroom.places import make_folder
from stillroom.remote.bundle.models import needs_gguf_for
from stillroom.remote.bundle.needs import training_extras
from stillroom.remote.host import RunHost
from stillroom.remote.machine import Machine
from stillroom.remote.records import JobSpec, MachineFacts
from stillroom.run_folder import REMOTE_FILE, RemoteView, RunFolder, all_runs, read_remote_state
from stillroom.settings import Workspace
from stillroom.train.config.schema import TrainConfig
from stillroom.train.planning.hardware import EarlierRate, Hardware
from stillroom.types import RunKind, RunStatus

_HOUR_S = 3600
_RemoteRun = tuple[RunFolder, JobSpec, RemoteView]
_TRAINING = (RunKind.SFT, RunKind.DPO, RunKind.DISTILL)


class CachedProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The content of .stillroom/machines/<name>.json: a machine's last probe."""

    access_hash: str = msgspec.field(name="address")
    """A hash of how the machine is reached and of its Python, without its price and limits."""
    probed_at: str = msgspec.field(name="asked_at")
    facts: MachineFacts
    price_per_hour: float | None = None
    """The provider's price in US dollars per hour; None if unknown."""


def probe_machine(workspace: Workspace, machine: Machine, host: RunHost) -> MachineFacts:
    """Probes a machine, or its provider if it is not up, and caches the result.

    Raises an EngineError if the probe fails.
    """
    try:
        facts = host.facts()
        price = host.price_per_hour() if machine.access.is_provisioned else None
    finally:
        host.close()
    save_probe(workspace, machine, facts, price)
    return facts


def save_probe(
    workspace: Workspace,
    machine: Machine,
    facts: MachineFacts,
    price_per_hour: float | None = None,
) -> None:
    """Caches the result of a probe for later plans and lists."""
    if facts.num_processors is None:
        return  # The machine is not up, and its hardware is not known yet.
    file = _probe_file(workspace, machine)
    make_folder(file.parent)
    probe = CachedProbe(
        access_hash=_access_hash(machine),
        probed_at=now(),
        facts=facts,
        price_per_hour=price_per_hour,
    )
    write_json(file, probe)


def load_probe(workspace: Workspace, machine: Machine) -> CachedProbe | None:
    """Returns a machine's cached probe; None if there is none or its entry has changed since."""
    try:
        probe = read_json(_probe_file(workspace, machine), CachedProbe)
    except (OSError, DataError):
        return None
    return probe if probe.access_hash == _access_hash(machine) else None


def _probe_file(workspace: Workspace, machine: Machine) -> Path:
    return workspace.root / ".stillroom" / "machines" / f"{machine.name}.json"


def _access_hash(machine: Machine) -> str:
    """Returns a hash of how a machine is reached, and of its Python.

    A cached probe is valid only while this does not change.
    """
    return content_hash(msgspec.to_builtins((*machine.kinds, machine.python)))


def remote_runs(workspace: Workspace) -> Iterator[_RemoteRun]:
    """Yields the workspace's runs on other machines, in no particular order."""
    for folder in all_runs(workspace):
        with suppress(OSError, DataError):
            if (view := read_remote_state(folder.path)) is not None:
                yield folder, read_json(folder.path / REMOTE_FILE, JobSpec), view


def hardware_of(
    workspace: Workspace, machine: Machine, config: TrainConfig | None = None
) -> Hardware:
    """Returns a machine's hardware as last probed, and the speed of its last run of the config."""
    probe, runs = load_probe(workspace, machine), list(remote_runs(workspace))
    measured = _earlier_rate(machine, config, runs) if config is not None else None
    prices = (
        machine.price_per_hour,
        probe.price_per_hour if probe is not None else None,
        _earlier_price(machine, runs),
    )
    price = next((price for price in prices if price is not None), None)
    if probe is None:
        gpus = machine.access.requested_gpus
        return Hardware(
            machine.name,
            gpus=gpus,
            is_known=bool(gpus),
            price_per_hour=price,
            is_installed=False,
            measured=measured,
        )
    facts = probe.facts
    return Hardware(
        machine.name,
        gpus=[name for gpu in facts.gpus for name in gpu_names(gpu)],
        gpu_memory_gb=facts.gpu_memory_gb,
        num_processors=facts.num_processors,
        memory_gb=facts.memory_gb,
        free_disk_gb=facts.free_disk_gb,
        price_per_hour=price,
        # The disk of a cluster or a job is deleted with it.
        is_installed=facts.stillroom_version is not None
        and not machine.access.is_provisioned
        and (config is None or _has_packages(workspace, machine, config, runs)),
        measured=measured,
    )


def gpu_names(text: str) -> list[str]:
    """Returns one name per GPU of an element of `MachineFacts.gpus`; four for `4 x A10G, …`."""
    name = text.rpartition(",")[0] or text
    counted = re.fullmatch(r"(\d{1,2}) x (.+)", name)
    return [counted[2]] * int(counted[1]) if counted else [name]


def _has_packages(
    workspace: Workspace, machine: Machine, config: TrainConfig, runs: Sequence[_RemoteRun]
) -> bool:
    """Whether a machine has the packages of a training, as far as its earlier runs tell.

    A run installs all of its packages unless an earlier one had installed them and maybe others.
    """
    needed = {*training_extras(config)}
    teachers = [teacher.tokenizer or teacher.path for teacher in config.teachers]
    names = (config.model.path, *teachers, config.model.chat_template)
    if any(name is not None and needs_gguf_for(workspace, name) for name in names):
        needed.add("gguf")
    installed = [
        spec.extras
        for _, spec, view in runs
        if view.has_started and _access_hash(spec.machine) == _access_hash(machine)
    ]
    return not installed or any(needed.issubset(extras) for extras in installed)


def _earlier_price(machine: Machine, runs: Sequence[_RemoteRun]) -> float | None:
    """Returns what a provisioned machine cost per hour in its last run, in USD; None if unknown."""
    if not machine.access.is_provisioned:
        return None
    prices = [
        (view.last_contact or "", view.machine_usd / view.seconds_used * _HOUR_S)
        for _, spec, view in runs
        if _access_hash(spec.machine) == _access_hash(machine)
        and view.machine_usd
        and view.seconds_used
    ]
    return max(prices)[1] if prices else None


def _earlier_rate(
    machine: Machine, config: TrainConfig, runs: Sequence[_RemoteRun]
) -> EarlierRate | None:
    """Returns the speed of the last run of the same training on a machine; None if there is none.

    A failed run counts only if none succeeded, since it may have measured only slow first steps.
    """
    wanted = _speed_settings(config.model_dump(mode="json"))
    rates = list[tuple[bool, str, EarlierRate]]()
    for folder, spec, _ in runs:
        if spec.machine.name != machine.name or _access_hash(spec.machine) != _access_hash(machine):
            continue
        with suppress(OSError, DataError):
            state = folder.read()
            rate = state.metrics.get("tokens_per_s") if state.kind in _TRAINING else None
            if (
                rate
                and _speed_settings(read_json(folder.path / "config.json", dict[str, Any]))
                == wanted
            ):
                has_succeeded = state.status is RunStatus.SUCCEEDED
                earlier = EarlierRate(folder.run_id, rate, _seconds_outside_steps(folder, rate))
                rates.append((has_succeeded, state.created_at, earlier))
    return max(rates, key=lambda run: run[:2])[2] if rates else None


def _seconds_outside_steps(folder: RunFolder, tokens_per_s: float) -> float | None:
    """Returns how long a training run took apart from its steps, e.g. to load its models.

    None for a run that has not succeeded, and for a run that resumed another.
    """
    state = folder.read()
    trained = (state.result or {}).get("trained_tokens")
    if state.status is not RunStatus.SUCCEEDED or not isinstance(trained, int | float):
        return None
    if folder.read_request().request.get("resume") is not None:
        return None
    return max(0.0, (state.seconds or 0.0) - trained / tokens_per_s)


def _speed_settings(config: Mapping[str, Any]) -> list[Any]:
    """Returns the settings that most affect the speed of a training run."""
    model, data = config.get("model") or {}, config.get("data") or {}
    names = ("path", "qlora_rank", "precision", "quantization", "gradient_checkpointing")
    chosen = [config.get("dataset_type"), *(model.get(name) for name in names)]
    if config.get("dataset_type") == "distill":
        rollout, teacher = config.get("rollout") or {}, config.get("teacher") or {}
        chosen += [data.get("batch_size"), data.get("group_size")]
        chosen += [rollout.get("max_tokens"), rollout.get("max_turns"), teacher.get("path")]
    return chosen
