"""Plans a training run on remote machines: whether it fits, its time and its price.

There is no trial, since the planning machine is not the one that trains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
import torch

from stillroom.settings import Workspace
from stillroom.train.config.request import PlanTraining, TrainingPlan, plan_request
from stillroom.train.config.schema import TrainConfig
from stillroom.train.planning import forecast, trial
from stillroom.train.planning.forecast import GB, TrainingForecast
from stillroom.train.planning.hardware import Hardware, MachineForecast, Work, forecast_on
from stillroom.train.planning.model_checks import check_models
from stillroom.train.planning.plan import forecast_without_time
from stillroom.train.planning.trial import RenderedRows, render_rows
from stillroom.train.planning.weightless_models import (
    WeightlessStudent,
    WeightlessTeachers,
    active_parameters,
    largest_pass,
    layout_notes,
    load_teachers_without_weights,
    load_without_weights,
)

_PROCESS_BYTES = int(1.2e9)
"""The CPU memory of torch and transformers before a model is loaded."""
_CHARACTERS_PER_TOKEN = 4
_NOTED_UPLOAD_GB = 0.1
"""The upload size in GB from which a note reports it."""


@dataclass(frozen=True, slots=True)
class _DeviceForecast:
    """The forecast of a run on one kind of device."""

    student: WeightlessStudent
    teachers: WeightlessTeachers
    parts: dict[str, float]
    """The peak bytes, by purpose."""
    tokens: int
    """The tokens of the largest pass."""

    @property
    def need(self) -> float:
        """The peak bytes of the run's process."""
        return sum(self.parts.values())


def plan_on_machines(
    workspace: Workspace, request: PlanTraining, machines: Sequence[Hardware]
) -> TrainingForecast:
    """Returns the forecast of a run on the first machine, with time and price on all of them.

    Raises EngineError for anything that would end the run.
    """
    plan = plan_request(workspace, request)
    first = machines[0]
    student = _load_student_for(workspace, plan, first)
    rows = render_rows(plan, student)
    on_first = _forecast_on_device(workspace, student, rows)
    checks = check_models(workspace, plan, student, on_first.teachers, rows.tasks, rows.units)
    turns = plan.config.rollout.max_turns if plan.config.dataset_type == "distill" else 1
    least, most = (_work(plan.config, on_first, rows, turns=number) for number in (1, turns))
    by_device = {first.device: on_first}
    forecasts: list[MachineForecast] = []
    for machine in machines:
        if machine.is_known and machine.device not in by_device:
            other = _load_student_for(workspace, plan, machine)
            by_device[machine.device] = _forecast_on_device(workspace, other, rows)
        on_device = by_device.get(machine.device, on_first)
        forecasts.append(_forecast_on_machine(machine, on_device, least, most))
    return _forecast(plan, on_first, rows, forecasts, first, checks)


def _load_student_for(
    workspace: Workspace, plan: TrainingPlan, machine: Hardware
) -> WeightlessStudent:
    """Returns the student without weights, as it would be on a machine."""
    device = torch.device(machine.device)
    num_gpus = len(machine.gpus)
    return load_without_weights(workspace, plan.config, device=device, num_gpus=num_gpus)


def _forecast_on_device(
    workspace: Workspace, student: WeightlessStudent, rows: RenderedRows
) -> _DeviceForecast:
    """Returns the memory of the run on the device of the student without weights."""
    teachers = load_teachers_without_weights(workspace, student)
    tokens, cache_bytes = largest_pass(student, rows.tokens)
    parts = student.memory_parts(
        tokens,
        cache_bytes,
        process_bytes=0 if student.device.type == "cuda" else _PROCESS_BYTES,
        teacher_bytes=teachers.weight_bytes,
    )
    return _DeviceForecast(student, teachers, parts, tokens)


def _forecast_on_machine(
    machine: Hardware, on_device: _DeviceForecast, least: Work, most: Work
) -> MachineForecast:
    """Returns the time and price of the run on a machine, and whether it fits."""
    free = machine.free_memory_gb
    fits = None if free is None else forecast.fits(on_device.need, free * GB)
    return forecast_on(machine, least, need_gb=on_device.need / GB, fits=fits, most=most)


def _work(
    config: TrainConfig, on_first: _DeviceForecast, rows: RenderedRows, *, turns: int
) -> Work:
    """Returns the computation of the run, at 2 operations per parameter and token in a pass.

    `turns` is the number of turns of each rollout, all of `rollout.max_tokens` tokens.
    """
    student, teachers = on_first.student, on_first.teachers
    num_active = active_parameters(student.empty)
    # The backward pass takes twice a forward pass; with frozen weights, once.
    passes = 2 if config.model.qlora_rank > 0 else 3
    flops_per_token = 2.0 * num_active * (passes + config.model.gradient_checkpointing)
    common = {
        "num_parameters": num_active,
        "num_layers": int(student.empty.config.get_text_config().num_hidden_layers),
        "load_bytes": student.size.weight_bytes + teachers.weight_bytes,
        "num_processes": student.layout.num_processes,
    }
    if config.dataset_type == "distill":
        num = config.data.batch_size * config.data.group_size
        rollouts = forecast.num_steps(config, rows.tokens.num_rows) * num
        longest = min(turns * config.rollout.max_tokens, config.rollout.max_context_window)
        sampled = float(rollouts * longest)
        num_tokens = sampled + rollouts * _prompt_tokens(rows)
        scoring_flops = 2.0 * num_tokens * (teachers.num_active / max(1, len(set(config.teachers))))
        return Work(
            learning_flops=flops_per_token * num_tokens + scoring_flops,
            counted_tokens=sampled,
            sampled_tokens=sampled,
            rows_at_once=min(config.rollout.concurrency, num),
            **common,
        )
    epochs = config.trainer.num_epochs
    num_tokens = float(sum(rows.tokens.lengths))
    share = rows.tokens.num_held_out / max(1, rows.tokens.num_rows)
    # DPO's reference and soft targets score all rows once; held-out rows are scored after each
    # epoch.
    num_scored = num_tokens * (1 + share)
    num_forward = (config.dataset_type == "dpo") * num_scored + share * epochs * num_tokens
    return Work(
        learning_flops=flops_per_token * num_tokens * epochs
        + 2.0 * (num_active * num_forward + teachers.num_active * num_scored),
        counted_tokens=float(epochs * sum(map(trial.num_trained, rows.units))),
        **common,
    )


def _prompt_tokens(rows: RenderedRows) -> float:
    """Returns a prompt's approximate number of tokens, from the first prompts' characters."""
    texts = [str(task.messages) for task in rows.tasks[:200]]
    return mean(map(len, texts)) / _CHARACTERS_PER_TOKEN if texts else 0.0


def _forecast(
    plan: TrainingPlan,
    on_first: _DeviceForecast,
    rows: RenderedRows,
    forecasts: list[MachineForecast],
    first: Hardware,
    checks: list[str],
) -> TrainingForecast:
    """Returns the forecast for the first machine, with `forecasts` for all of them."""
    free, disk_free = (
        math.inf if free_gb is None else free_gb * GB
        for free_gb in (first.free_memory_gb, first.free_disk_gb)
    )
    result = forecast_without_time(
        on_first.student, rows, on_first.parts, need=on_first.need, free=free, disk_free=disk_free
    )
    seconds = forecasts[0].seconds_most
    return msgspec.structs.replace(
        result,
        seconds=seconds,
        tokens_per_s=first.measured.tokens_per_s if first.measured else None,
        notes=[
            *plan.notes,
            *rows.notes,
            *_notes(plan, on_first, first),
            *forecast.describe_limit(plan.config, result.steps, seconds, None),
            *forecast.describe_steps(plan.config, result.steps),
        ],
        checks=checks,
        machines=forecasts,
    )


def _notes(plan: TrainingPlan, on_first: _DeviceForecast, first: Hardware) -> list[str]:
    config, student = plan.config, on_first.student
    notes = [f"the largest forward pass has {on_first.tokens} tokens"]
    if first.measured is None:
        notes.append(
            f"the time is a range, since no trial ran on {first.machine}; it narrows after a run "
            "of this training on that machine"
        )
    if config.dataset_type == "distill":
        turns, per_rollout = config.rollout.max_turns, "per rollout (rollout.max_turns)"
        assumed = f"the estimates assume 1 turn {per_rollout} and"
        if turns > 1:
            assumed = (
                f"the upper estimates assume {turns} turns {per_rollout}, the lower ones 1 turn, "
                "and all"
            )
        notes.append(
            f"{assumed} {config.rollout.max_tokens} tokens per turn (rollout.max_tokens); the time "
            "that tools take and the tokens of their results are not included"
        )
    if (figures := first.figures) is not None and not figures.has_bf16:
        notes.append(f"{first.gpus[0]} has no fast bf16: a newer GPU trains many times faster")
    if len(first.gpus) > 1 and config.launcher.kind == "local":
        notes.append(
            f"only one of the {len(first.gpus)} GPUs of {first.machine} trains; "
            "launcher.kind=accelerate uses all of them"
        )
    upload_gb = sum(map(_num_bytes, plan.inputs)) / GB
    if upload_gb >= _NOTED_UPLOAD_GB:
        notes.append(f"{upload_gb:.1f} GB of models and rows are uploaded, once")
    if config.evals:
        notes.append("evaluations during training are not included in the time")
    return [
        *notes,
        *student.notes,
        *forecast.describe_learning(config, student.size.num_parameters),
        *layout_notes(config.launcher, student.layout, is_time_of_all=first.measured is not None),
    ]


def _num_bytes(path: Path) -> int:
    """Returns the size of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
