"""The number of processes that a run trains in, and how that changes its memory and time."""

import os
from dataclasses import replace
from typing import Any

import torch

from stillroom.errors import ConfigError
from stillroom.train.config.sections import LauncherSection
from stillroom.train.planning.forecast import ONE_PROCESS, Speed, Spread
from stillroom.train.student.sharding import gathered_bytes


def process_count(section: LauncherSection, *, num_gpus: int | None = None) -> int:
    """Returns the number of processes on all machines, as configured or one for each GPU.

    num_gpus: those of the machine that would train; None: of this one.
    Raises ConfigError if no number is configured and there are no GPUs to count.
    """
    if section.num_processes is not None:
        return section.num_processes
    if num_gpus is None and torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
    if section.kind == "accelerate" and num_gpus:
        return num_gpus * section.num_machines
    raise ConfigError(
        f"launcher.kind: {section.kind} has to be told how many processes train",
        "set launcher.num_processes, e.g. 2",
    )


def spread_of(
    launcher: LauncherSection, empty: Any, device: torch.device, *, num_gpus: int | None = None
) -> Spread:
    """Returns how a run is spread over processes; `empty` is the model without weights.

    num_gpus: those of the machine that would train; None: of this one.
    """
    if launcher.kind == "local":
        return ONE_PROCESS
    size = process_count(launcher, num_gpus=num_gpus)
    return Spread(
        size,
        1 if device.type == "cuda" else size // launcher.num_machines,
        # With their gradient.
        2 * gathered_bytes(empty) if launcher.is_sharded else None,
    )


def shared_speed(speed: Speed, spread: Spread) -> Speed:
    """Returns the speed of all processes together, counting no more of them than GPUs or cores."""
    cores = (os.cpu_count() or 1) // torch.get_num_threads()
    at_once = spread.num_processes if spread.num_sharing == 1 else cores
    return replace(speed, token_s=speed.token_s / max(1, min(spread.num_processes, at_once)))


def spread_notes(launcher: LauncherSection, spread: Spread) -> list[str]:
    """Returns notes that explain a forecast for several processes; none for one process."""
    if spread.num_processes == 1:
        return []
    machines = f" on {launcher.num_machines} machines" if launcher.num_machines > 1 else ""
    whose = "one's GPU" if spread.num_sharing == 1 else f"{spread.num_sharing} on one machine"
    note = (
        f"{spread.num_processes} processes{machines}: the memory is that of {whose}; the time was "
        "measured in one process, and what they send each other comes on top"
    )
    return [note]
