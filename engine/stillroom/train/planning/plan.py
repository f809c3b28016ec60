"""plan_training: forecasts a run's memory, disk and time, and suggests changes if it won't fit."""

import functools
import itertools
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import torch

from stillroom.data.formats import RowFormat, read_rows
from stillroom.evaluate.intervals import smallest_difference
from stillroom.settings import Workspace
from stillroom.train.config.request import PlanTraining, TrainingPlan, plan_request
from stillroom.train.config.schema import DistillConfig, TrainConfig
from stillroom.train.planning import forecast, trial
from stillroom.train.planning.forecast import GB, TrainingForecast
from stillroom.train.planning.model_checks import check_models
from stillroom.train.planning.trial import (
    RenderedRows,
    RolloutTrial,
    render_rows,
    try_iteration,
)
from stillroom.train.planning.weightless_models import (
    WeightlessStudent,
    combined_speed,
    largest_pass,
    layout_notes,
    load_teachers_without_weights,
    load_without_weights,
    suggest_settings,
)

# An evaluation that can show differences below this (percentage points) suits most decisions.
_COARSE_POINTS = 10


def plan_training(
    workspace: Workspace,
    request: PlanTraining,
    *,
    started: float | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> TrainingForecast:
    """Returns the forecast of a run. Raises EngineError for anything that would end the run.

    started: the monotonic time (s) before the libraries were imported. All rows are rendered. A
    model that fits is loaded and tried for two steps (distill: for one short iteration); before
    that, `report` is called with the estimate so far.
    """
    started = time.monotonic() if started is None else started
    plan = plan_request(workspace, request)
    student = load_without_weights(workspace, plan.config)
    import_s = time.monotonic() - started
    teachers = load_teachers_without_weights(workspace, student)
    rows = render_rows(plan, student)
    checks = check_models(workspace, plan, student, teachers, rows.tasks, rows.units)
    tokens, cache_bytes = largest_pass(student, rows.tokens)
    layout = student.layout
    # All libraries are loaded by now but no weights, so this is the process's own memory.
    is_cuda = student.device.type == "cuda"
    process_bytes = 0 if is_cuda else psutil.Process().memory_info().rss
    parts_of = functools.partial(
        student.memory_parts, process_bytes=process_bytes, teacher_bytes=teachers.weight_bytes
    )
    parts = parts_of(tokens, cache_bytes)
    # The trial steps run in this process alone, even if the run has several processes.
    trial_parts = forecast.memory_parts(student.size, tokens=tokens, process_bytes=process_bytes)
    need, free = max(sum(parts.values()), sum(trial_parts.values())), _free_bytes(student.device)
    result = _forecast(workspace, student, rows, parts, free, None, tokens)
    report(_estimate(result))
    trial_run = None
    if rows.units and forecast.fits(need, free):
        trial_run = trial.try_steps(workspace, plan.config, rows.units)
        result = _forecast(workspace, student, rows, parts, free, trial_run, tokens)
    if plan.config.dataset_type == "distill" and result.fits:
        tasks = [task for task in rows.tasks if task.dataset == 0]
        iteration_trial = try_iteration(workspace, plan.config, tasks, plan.views)
        if iteration_trial is not None:
            if not iteration_trial.is_cut and plan.config.rollout.max_turns == 1:
                # Some rollouts are longer than those of the trial.
                expected = math.ceil(1.5 * iteration_trial.longest_tokens)
                tokens, cache = largest_pass(student, rows.tokens, rollout_tokens=expected)
                parts = parts_of(tokens, cache)
                result = _with_memory(result, parts, rollout_tokens=expected)
            result = _with_iteration(plan.config, result, layout, iteration_trial)
            checks += iteration_trial.checks
    if result.seconds is not None and result.start_s is not None:
        start_s = import_s + result.start_s
        result = msgspec.structs.replace(result, start_s=start_s, seconds=start_s + result.seconds)
    limit = forecast.describe_limit(plan.config, result.steps, result.seconds, result.start_s)
    notes = [*plan.notes, *rows.notes, *limit, *result.notes, *_eval_notes(plan)]
    return msgspec.structs.replace(result, checks=checks, notes=notes)


def _with_memory(
    result: TrainingForecast, parts: dict[str, float], *, rollout_tokens: int
) -> TrainingForecast:
    """Returns the forecast with the memory for rollouts like the trial's, if that is less."""
    if (memory_gb := sum(parts.values()) / GB) >= result.memory_gb:
        return result
    note = (
        f"memory is for rollouts of {rollout_tokens} tokens with their prompts, as in a short "
        f"trial; if all used rollout.max_tokens it would be {result.memory_gb:.2f} GB"
    )
    return msgspec.structs.replace(
        result,
        memory_gb=memory_gb,
        memory_parts_gb={name: value / GB for name, value in parts.items()},
        notes=[*result.notes, note],
    )


def _estimate(result: TrainingForecast) -> str:
    """Returns the estimate before the trial, in one line."""
    trial_text = "a short iteration is" if result.method == "distill" else "two steps are"
    following = (
        f"{trial_text} tried now to measure the time: about a minute, more on a busy machine"
        if result.fits
        else "no trial, as it would not fit"
    )
    return (
        f"{result.steps} steps on {result.device}, at most {result.memory_gb:.1f} GB of memory "
        f"({result.memory_free_gb or 0:.1f} GB are free), {result.disk_gb:.1f} GB of disk; "
        + following
    )


def _with_iteration(
    config: DistillConfig,
    result: TrainingForecast,
    layout: forecast.ProcessLayout,
    trial_run: RolloutTrial,
) -> TrainingForecast:
    """Returns the forecast with the measured time of a short iteration."""
    speed = combined_speed(forecast.Speed(token_s=trial_run.token_s, step_s=0.0), layout)
    assumed = "the maximum" if trial_run.is_cut else "as in a short trial"
    note = (
        f"the time is for one turn per rollout of {trial_run.answer_tokens:.0f} tokens "
        f"({assumed}), without tools: multiply by the turns you expect, at most "
        f"rollout.max_turns ({config.rollout.max_turns})"
    )
    return msgspec.structs.replace(
        result,
        seconds=trial_run.seconds(config, result.steps, token_s=speed.token_s),
        start_s=trial_run.load_s,
        tokens_per_s=1 / speed.token_s,
        measured_memory_gb=trial_run.memory_gb,
        notes=[*result.notes, note],
    )


def _forecast(
    workspace: Workspace,
    student: WeightlessStudent,
    rendered: RenderedRows,
    parts: dict[str, float],
    free: float,
    trial_run: "trial.Trial | None",
    tokens: int,
) -> TrainingForecast:
    """Returns the forecast; `trial_run` has the measurements of trial steps, if any were made.

    parts: the memory by purpose. free: the free memory in bytes. tokens: the number of tokens in
    the largest forward pass.
    """
    config, rows = student.config, rendered.tokens
    layout = student.layout
    measured = trial_run.memory_gb * GB if trial_run and layout.num_processes == 1 else 0.0
    need = max(sum(parts.values()), measured)
    result = forecast_without_time(
        student, rendered, parts, need=need, free=free, disk_free=_free_disk(workspace.root)
    )
    seconds, tokens_per_s = None, None
    if trial_run is not None and result.epoch_tokens is not None:
        share = rows.num_held_out / max(1, rows.num_rows)
        seconds = forecast.run_seconds(
            config,
            combined_speed(trial_run.speed, layout),
            steps=result.steps,
            epoch_tokens=result.epoch_tokens,
            held_out_share=share,
        )
        tokens_per_s = config.trainer.num_epochs * (result.epoch_trained_tokens or 0) / seconds
        # Held-out rows are scored too.
        seconds += result.epoch_tokens * (1 + share) * trial_run.teacher_s_per_token
    return msgspec.structs.replace(
        result,
        measured_memory_gb=trial_run.memory_gb if trial_run else None,
        seconds=seconds,
        start_s=trial_run.load_s if trial_run else None,
        tokens_per_s=tokens_per_s,
        notes=[
            *_notes(config, trial_run, tokens),
            *student.notes,
            *forecast.describe_learning(config, result.parameters),
            *forecast.describe_steps(config, result.steps),
            *layout_notes(config.launcher, layout),
        ],
    )


def forecast_without_time(
    student: WeightlessStudent,
    rendered: RenderedRows,
    parts: dict[str, float],
    *,
    need: float,
    free: float,
    disk_free: float,
) -> TrainingForecast:
    """Returns the forecast of steps, memory and disk.

    parts: the memory in bytes by purpose. need: the memory that must be free, in bytes. free,
    disk_free: the free memory and disk in bytes; infinite if unknown.
    """
    config, size, rows = student.config, student.size, rendered.tokens
    num_units = len(rows.lengths) or rows.num_rows
    steps = forecast.num_steps(config, num_units) + rows.num_cold_start_steps
    disk = forecast.disk_bytes(config, size, steps=steps)
    fits_memory, fits_disk = forecast.fits(need, free), forecast.fits(disk, disk_free)
    changes = [] if fits_memory else suggest_settings(student, rows, parts, free)
    if not fits_disk:
        changes.append("trainer.keep_checkpoints=1 and a larger trainer.save_step need less disk")
    return TrainingForecast(
        method=config.dataset_type,
        device=student.device.type,
        rows=rows.num_rows,
        skipped=dict(rows.skipped or {}),
        longest_tokens=max(rows.lengths, default=None),
        epoch_tokens=sum(rows.lengths) or None,
        epoch_trained_tokens=sum(map(trial.num_trained, rendered.units)) or None,
        steps=steps,
        parameters=size.num_parameters,
        trained_parameters=size.num_trained,
        memory_gb=sum(parts.values()) / GB,
        memory_parts_gb={name: value / GB for name, value in parts.items()},
        memory_free_gb=free / GB if math.isfinite(free) else None,
        measured_memory_gb=None,
        seconds=None,
        tokens_per_s=None,
        checkpoint_gb=forecast.checkpoint_bytes(size, is_final=False) / GB,
        disk_gb=disk / GB,
        disk_free_gb=disk_free / GB if math.isfinite(disk_free) else None,
        fits=fits_memory and fits_disk,
        changes=changes,
        notes=[],
    )


def _notes(config: TrainConfig, trial_run: "trial.Trial | None", tokens: int) -> list[str]:
    """Returns notes on what the forecast assumes.

    tokens: the number of tokens in the largest forward pass.
    """
    notes = [f"the largest forward pass has {tokens} tokens"]
    if config.dataset_type == "distill":
        if (turns := config.rollout.max_turns) > 1:
            notes[0] += (
                f", as if each of a rollout's {turns} turns had rollout.max_tokens "
                f"({config.rollout.max_tokens}): shorter rollouts take less memory"
            )
        notes.append(
            "sampling time depends on the student's answers and tools: "
            "a run with trainer.max_steps=2 measures it (sample_s and update_s of each step)"
        )
    elif trial_run is None:
        notes.append("no trial step was run, as the run would not fit into memory")
    elif trial_run.is_partial:
        notes.append("the trial's steps had fewer rows than a batch, to save time")
    if (soft := config.soft_targets) is not None and soft.top_k is not None:
        notes.append(
            f"the teacher scores the rows once, before the first step; {soft.store}/ keeps the "
            "result, so that later runs on the same rows do not load the teacher"
        )
    if config.evals:
        notes.append("evaluations during training are not included in the time")
    return notes + (trial_run.notes if trial_run is not None else [])


def _eval_notes(plan: TrainingPlan) -> list[str]:
    """Returns a note on the smallest difference that each evaluation can show."""
    notes: list[str] = []
    for section in plan.config.evals:
        rows = read_rows(plan.eval_files[section.name], RowFormat.PROMPTS)
        num = sum(1 for _ in itertools.islice(rows, section.n))
        points = 100 * smallest_difference(num)
        advice = "; more prompts can show a smaller one" if points > _COARSE_POINTS else ""
        notes.append(
            f"the {num} prompts of the evaluation {section.name!r} can show a difference of about "
            f"{points:.0f} percentage points between two models{advice}"
        )
    return notes


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return float(psutil.virtual_memory().available)


def _free_disk(folder: Path) -> float:
    return float(shutil.disk_usage(folder).free)
