"""Forecasts a training run's steps, memory, disk and time with pure functions, without torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from stillroom.train.config.request import PlanTraining
from stillroom.train.config.schema import TrainConfig
from stillroom.train.planning.hardware import MachineForecast, forecast_sequence
from stillroom.types import OwnText

GB = 1e9
# Not all free memory can be used: other programs and fragmentation take some.
_USABLE_SHARE = 0.9
# Adapters need about ten times the learning rate of full fine-tuning (Schulman et al. 2025, LoRA
# without regret). Below a hundred million parameters, an adapter's rank is too low to learn much.
_TINY_MODEL, _TINY_RATE = 100_000_000, 1e-3
# SmolLM2-135M learnt most with all weights trained at 2e-4, and hardly anything with an adapter at
# 1e-4 (benchmarks/real/sweep.py).
_SMALL_MODEL, _SMALL_FULL_RATE, _SMALL_LORA_RATE = 400_000_000, 2e-4, 1e-3
# A step changes a weight by about the learning rate: 16 steps at 1e-4 left a loss of 3.95.
_FEW_STEPS = 40
_LORA_RATE, _MAX_FULL_RATE, _MIN_LORA_RATE = 1e-4, 5e-5, 3e-5


class TrainingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of a training run's steps, memory, disk and time, before anything is trained."""

    method: str
    device: str
    rows: int
    """The number of rows, pairs or prompts that will be trained on."""
    skipped: dict[OwnText, int]
    """The number of rows that would be skipped, by reason."""
    longest_tokens: int | None
    epoch_tokens: int | None
    """All tokens of the rows, read and trained; None if the student samples them (distill)."""
    epoch_trained_tokens: int | None = None
    """The tokens that are trained on: `tokens_per_s`, and a run's `trained_tokens`, count these."""
    steps: int
    parameters: int
    trained_parameters: int
    memory_gb: float
    """The peak memory (GB) of the training process; with several processes, of one GPU or of this
    machine's CPU memory."""
    memory_parts_gb: dict[OwnText, float]
    memory_free_gb: float | None
    """None if unknown: a remote machine that is not running."""
    measured_memory_gb: float | None
    """The peak memory (GB) of a short trial; None without a trial."""
    seconds: float | None
    """The time of the run in seconds, including `start_s`; None without a trial. For a remote
    machine, the upper estimate."""
    start_s: float | None = None
    """The seconds before the first step (imports, loading models), measured by this plan."""
    tokens_per_s: float | None
    """The trained tokens (distill: sampled ones) per second, without those that are only read; the
    run's metric of this name counts the same."""
    checkpoint_gb: float
    disk_gb: float
    disk_free_gb: float | None
    fits: bool
    changes: list[OwnText]
    """Settings that would make the run fit, smallest change first."""
    notes: list[OwnText]
    checks: list[OwnText] = []
    """The results of checking student and teacher (distill)."""
    machines: list[MachineForecast] = []
    """With `where`, the time and price on that machine, then on the others of machines.yml."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model, and of the activations kept in a forward pass."""

    weight_bytes: int
    num_parameters: int
    trained_bytes: int
    num_trained: int
    activation_bytes: float
    """The bytes per token that a forward pass keeps for the backward pass."""
    vocab_size: int
    tile_positions: int
    """The number of positions whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """The processes of a training run, and how its memory is divided between them."""

    num_processes: int = 1
    num_sharing: int = 1
    """The number of processes that share this machine's CPU memory; 1 on GPUs, where each has its
    own."""
    gathered_bytes: int | None = None
    """The bytes of the weights that fsdp2 gathers at a time, with their gradients; None without
    fsdp2."""

    def per_process(self, size: ModelSize) -> ModelSize:
        """Returns the size of one process's part of a model."""
        if self.gathered_bytes is None:
            return size
        count = self.num_processes
        return replace(
            size,
            weight_bytes=size.weight_bytes // count,
            trained_bytes=size.trained_bytes // count,
        )


ONE_PROCESS = ProcessLayout()


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The lengths in tokens of the sequences or pairs to train on, and the number of rows."""

    lengths: Sequence[int]
    num_rows: int
    num_held_out: int = 0
    skipped: Mapping[str, int] | None = None
    num_cold_start_steps: int = 0
    """The number of steps of a cold start, before the first rollout."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed that a short trial measured."""

    token_s: float
    """The seconds of forward and backward pass per token."""
    step_s: float
    """The seconds of the optimiser per step."""


def num_steps(config: TrainConfig, num_units: int) -> int:
    """Returns the number of steps over sequences or pairs, or of iterations over prompts."""
    per_epoch = math.ceil(num_units / config.data.batch_size)
    if config.dataset_type != "distill":
        return per_epoch * config.trainer.num_epochs
    # A batch of prompts may span two epochs.
    total = math.ceil(num_units * config.trainer.num_epochs / config.data.batch_size)
    return min(total, config.trainer.max_steps or total)


def pass_tokens(longest: Sequence[int], *, max_tokens: int) -> int:
    """Returns the tokens of the largest forward pass, from the longest sequences' lengths."""
    return min(sum(longest), max(max_tokens, max(longest, default=0)))


def memory_parts(
    size: ModelSize,
    *,
    tokens: int,
    process_bytes: int,
    teacher_bytes: int = 0,
    cache_bytes: int = 0,
    layout: ProcessLayout = ONE_PROCESS,
) -> dict[str, float]:
    """Returns the peak bytes of training, by purpose.

    On GPUs they are per GPU, on CPUs of all processes of one machine.
    """
    size = layout.per_process(size)
    logits = min(tokens, size.tile_positions) * size.vocab_size * 4
    parts = {
        "process": process_bytes,
        "weights": size.weight_bytes,
        "gradients": size.trained_bytes,
        "optimizer": 2 * size.trained_bytes,
        "activations": size.activation_bytes * tokens,
        # The logits and their gradient.
        "head": 2 * logits,
        "teacher": teacher_bytes,
        "sampling": cache_bytes,
        "gathered": layout.gathered_bytes or 0,
    }
    return {name: float(value) * layout.num_sharing for name, value in parts.items() if value}


def recomputed_bytes(activation_bytes: float, *, num_layers: int, state_bytes: int) -> float:
    """Returns the activation bytes per token with gradient checkpointing.

    They are the inputs of all layers, and the activations of the one layer being recomputed.
    """
    return num_layers * state_bytes + activation_bytes / num_layers


def checkpoint_bytes(size: ModelSize, *, is_final: bool) -> int:
    """Returns the size in bytes of a checkpoint; a final one has no optimiser state."""
    weights = size.trained_bytes
    return weights if is_final else 3 * weights


def disk_bytes(config: TrainConfig, size: ModelSize, *, steps: int) -> int:
    """Returns the peak disk space of a run's checkpoints, in bytes."""
    every, keep = config.trainer.save_step, config.trainer.keep_checkpoints
    num = (steps - 1) // every if every > 0 and steps > 0 else 0
    if keep is not None and num > keep:
        # One more exists while a checkpoint is being written, and the best one is kept too.
        num = keep + 1 + (config.trainer.early_stop is not None)
    return num * checkpoint_bytes(size, is_final=False) + checkpoint_bytes(size, is_final=True)


def run_seconds(
    config: TrainConfig, speed: Speed, *, steps: int, epoch_tokens: int, held_out_share: float
) -> float:
    """Returns the seconds of all steps, including validation and DPO's reference."""
    epochs = config.trainer.num_epochs
    # DPO's reference scores all rows once; held-out rows are scored after each epoch.
    num_passes = (config.dataset_type == "dpo") * (1 + held_out_share) + held_out_share * epochs
    # A forward pass takes a third of a forward and backward pass.
    return steps * speed.step_s + (epochs + num_passes / 3) * epoch_tokens * speed.token_s


def fits(need: float, free: float) -> bool:
    """Returns whether `need` bytes fit into `free` bytes with some margin."""
    return need <= _USABLE_SHARE * free


@dataclass(frozen=True, slots=True)
class SftSettings:
    """The settings of SFT that suit a model of some size."""

    qlora_rank: int
    """The adapter's rank; 0 trains all weights."""
    learning_rate: float


def suitable_sft_settings(num_parameters: int) -> SftSettings:
    """Returns the settings with which a model of this size learnt most in our measurements."""
    if num_parameters < _TINY_MODEL:
        return SftSettings(0, _TINY_RATE)
    if num_parameters < _SMALL_MODEL:
        return SftSettings(0, _SMALL_FULL_RATE)
    return SftSettings(32, _LORA_RATE)


def describe_learning(config: TrainConfig, num_parameters: int) -> list[str]:
    """Returns notes on a learning rate or an adapter that is unusual for a model of this size."""
    rate, is_lora, note = config.trainer.learning_rate, config.model.qlora_rank > 0, None
    is_sft = config.dataset_type == "sft"
    if is_lora and num_parameters < _TINY_MODEL:
        note = (
            "an adapter learns little in a model below 100 million parameters; model.qlora_rank=0 "
            f"trains all weights, at a learning rate of {_TINY_RATE:.0e} or more"
        )
    elif is_lora and is_sft and num_parameters < _SMALL_MODEL and rate < _SMALL_LORA_RATE / 2:
        note = (
            f"an adapter with a learning rate of {rate:.0e} learns little in a model of 100 to "
            f"400 million parameters: use trainer.learning_rate={_SMALL_LORA_RATE:.0e}, or train "
            "all weights, which learnt more: model.qlora_rank=0 and "
            f"trainer.learning_rate={_SMALL_FULL_RATE:.0e}"
        )
    elif not is_lora and num_parameters >= _SMALL_MODEL and rate > _MAX_FULL_RATE:
        note = (
            f"full fine-tuning with a learning rate of {rate:.0e}, which suits adapters: "
            "trainer.learning_rate=1e-5 is usual"
        )
    elif is_lora and is_sft and rate < _MIN_LORA_RATE:
        note = (
            f"an adapter with a learning rate of {rate:.0e}, which suits full fine-tuning: "
            "trainer.learning_rate=1e-4 is usual"
        )
    return [] if note is None else [note]


def describe_steps(config: TrainConfig, steps: int) -> list[str]:
    """Returns notes on a run with too few steps to learn, or fewer than configured."""
    notes: list[str] = []
    if "batch_size" not in config.data.model_fields_set:
        rows = {"sft": "rows", "dpo": "pairs"}.get(config.dataset_type, "prompts")
        notes.append(
            f"data.batch_size is {config.data.batch_size}, its default: each step takes "
            f"{config.data.batch_size} {rows}; fewer give more steps with noisier gradients"
        )
    max_steps = config.trainer.max_steps if config.dataset_type == "distill" else None
    if max_steps is not None and steps < max_steps:
        notes.append(
            f"the prompts give {steps} iterations with trainer.num_epochs "
            f"{config.trainer.num_epochs}, fewer than trainer.max_steps {max_steps}: "
            "raise trainer.num_epochs"
        )
    substeps = config.algorithm.substeps if config.dataset_type == "distill" else 1
    if steps * substeps < _FEW_STEPS:
        is_capped = max_steps is not None and steps >= max_steps
        key = "trainer.max_steps" if is_capped else "trainer.num_epochs or lower data.batch_size"
        notes.append(
            f"only {steps * substeps} optimiser steps, which hardly change a model; for about "
            f"100, raise {key}"
        )
    return notes


def describe_limit(
    config: TrainConfig, steps: int, seconds: float | None, start_s: float | None
) -> list[str]:
    """Returns a note if the run would reach its time limit before its last step."""
    minutes = config.trainer.max_minutes
    if minutes is None or seconds is None or seconds <= 60 * minutes:
        return []
    start_s = start_s or 0.0
    done = max(1, int(steps * max(0.0, 60 * minutes - start_s) / max(1e-9, seconds - start_s)))
    return [f"trainer.max_minutes {minutes:g} ends the run after about {done} of {steps} steps"]


def describe_settings(needs: Mapping[str, float], free: float) -> list[str]:
    """Returns the settings that make a run fit, with their memory; if none, the smallest one."""
    fitting = [name for name, need in needs.items() if fits(need, free)]
    if fitting:
        return [f"{name} needs {needs[name] / GB:.2f} GB" for name in fitting]
    if not needs:
        return []
    least = min(needs, key=lambda name: needs[name])
    return [
        f"{least} needs {needs[least] / GB:.2f} GB, which is still too much: use a smaller model"
    ]


def combined_forecast(
    requests: Sequence[PlanTraining], forecasts: Sequence[TrainingForecast]
) -> TrainingForecast:
    """Returns one forecast for runs in sequence.

    Its memory is the maximum over the runs, its disk and time are the sums, and its notes list
    each run.
    """
    if len(forecasts) == 1:
        return forecasts[0]
    largest = max(forecasts, key=lambda forecast: (not forecast.fits, forecast.memory_gb))
    seconds = [each.seconds for each in forecasts if each.seconds is not None]
    notes = [
        f"{request.overrides[-1]}: {each.steps} steps, {each.memory_gb:.2f} GB"
        + (f", {each.seconds:.0f} s" if each.seconds is not None else "")
        + ("" if each.fits else ", does not fit")
        for request, each in zip(requests, forecasts, strict=True)
    ]
    return msgspec.structs.replace(
        largest,
        seconds=sum(seconds) if len(seconds) == len(forecasts) else None,
        start_s=sum(each.start_s or 0.0 for each in forecasts),
        disk_gb=sum(each.disk_gb for each in forecasts),
        fits=all(each.fits for each in forecasts),
        machines=forecast_sequence([each.machines for each in forecasts]),
        notes=[
            f"{len(forecasts)} runs in sequence; the memory is the maximum over the runs",
            *notes,
            *largest.notes,
        ],
    )
