"""Dollars and seconds per task of a student and its teacher, and when the student pays off."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from stillroom import fences
from stillroom.errors import DataError, noun_for
from stillroom.evaluate.files import EvaluationResult, TaskCost, task_time
from stillroom.run_folder import RunFolder, all_runs, read_remote_state
from stillroom.settings import Workspace
from stillroom.teachers.pricing import MACHINE, PRICES_FILE, machine_usd_per_hour
from stillroom.teachers.providers import IN_PROCESS, PROVIDERS
from stillroom.types import OwnText, RunKind, dollars, total_usd

_KINDS_WITH_CALLS = (RunKind.ROLLOUTS, RunKind.SCORE, RunKind.EVALUATE)
_TRAINING_KINDS = (RunKind.SFT, RunKind.DPO, RunKind.DISTILL)


class CostComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What a task costs with the student and with the teacher, and what the student has cost."""

    student: str
    student_usd: float | None
    """Dollars per task; None if a price is unknown (see `note`)."""
    student_seconds: float
    """Seconds from a prompt to the end of its rollout, while others run concurrently."""
    teacher: str
    teacher_usd: float | None
    teacher_seconds: float
    spent_usd: float | None
    """The cost in dollars of all calls of the workspace's runs, of remote machines and of this
    machine's time, if that has a price; None if another price is unknown."""
    machine_hours: float
    """The hours of training, and of rollouts of local models, on this machine."""
    break_even_tasks: int | None
    """The number of tasks after which the student has saved what was spent."""
    note: OwnText

    sentence: OwnText
    """The comparison in one sentence."""


@dataclass(frozen=True, slots=True)
class RunCosts:
    """The costs of a workspace's runs."""

    calls_usd: float | None
    """The cost in dollars of calls and of remote machines; None if a price is unknown."""
    machine_hours: float
    """The hours of training, and of rollouts of local models, on this machine."""


def cost_of_runs(workspace: Workspace) -> RunCosts:
    """Returns the cost of all runs of a workspace, including failed and cancelled ones."""
    calls, seconds = list[float | None](), 0.0
    for folder in all_runs(workspace):
        with suppress(DataError, OSError):
            state, request = folder.read(), _recorded_request(folder)
            result = state.result or {}
            if result.get("dry_run"):
                continue
            is_local = _is_local(request)
            if state.kind in _KINDS_WITH_CALLS and not (is_local and "cost_usd" not in result):
                # The metrics of an interrupted run have its cost so far. If they have none, the
                # price of its calls is unknown.
                fallback_usd = None if state.metrics.get("calls") and not is_local else 0.0
                usd_so_far = state.metrics.get("cost_usd", fallback_usd)
                calls.append(result.get("cost_usd", usd_so_far))
            if (remote_state := read_remote_state(folder.path)) is not None:
                calls.append(remote_state.spent_usd)
            elif state.kind in _TRAINING_KINDS or (state.kind in _KINDS_WITH_CALLS and is_local):
                seconds += state.seconds or 0.0
    return RunCosts(total_usd(calls), seconds / 3600)


_MAX_NAME = 60


def display_name(name: str) -> str:
    """Returns an evaluation's name on one short line, so that it cannot pass for instructions."""
    return fences.short_line(name, max_characters=_MAX_NAME)


def compare_costs(
    workspace: Workspace,
    student: EvaluationResult,
    teacher: EvaluationResult,
    *,
    format_name: Callable[[str], str] = fences.safe_name,
) -> CostComparison | None:
    """Returns the costs per task; None if an evaluation of an earlier version has none.

    `format_name` returns an evaluation's name as it appears in the sentence.
    """
    student_cost, teacher_cost = student.per_task, teacher.per_task
    if student_cost is None or teacher_cost is None:
        return None
    costs = [cost_of_runs(each) for each in _workspaces(workspace, student)]
    machine_hours = sum(each.machine_hours for each in costs)
    total = total_usd(each.calls_usd for each in costs)
    if total is not None:
        total += (machine_usd_per_hour(workspace) or 0.0) * machine_hours
    tasks = break_even(student_cost.usd, teacher_cost.usd, total)
    note = _break_even_note(student_cost, teacher_cost, total, tasks)
    if len(costs) > 1:
        note += " (including the runs of the workspace in which the student was trained)"
    student_text, teacher_text = (
        f"{task_time(cost)}" + ("" if cost.usd is None else f" and {dollars(cost.usd)}")
        for cost in (student_cost, teacher_cost)
    )
    names = [format_name(each.name) for each in (student, teacher)]
    return CostComparison(
        student=student.name,
        student_usd=student_cost.usd,
        student_seconds=student_cost.seconds,
        teacher=teacher.name,
        teacher_usd=teacher_cost.usd,
        teacher_seconds=teacher_cost.seconds,
        spent_usd=total,
        machine_hours=round(machine_hours, 4),
        break_even_tasks=tasks,
        note=note,
        sentence=f"Per task, {names[0]} takes {student_text}, {names[1]} {teacher_text}; {note}.",
    )


def _workspaces(workspace: Workspace, student: EvaluationResult) -> list[Workspace]:
    """Returns this workspace, and the one in which the student was trained, if that is another."""
    folders = workspace.path(student.model).parents
    others = (Workspace(f.parent) for f in folders if f.name == workspace.runs.name)
    roots = {one.root.resolve(): one for one in (workspace, *others) if one.runs.is_dir()}
    return list(roots.values()) or [workspace]


def break_even(
    student_usd: float | None, teacher_usd: float | None, spent_usd: float | None
) -> int | None:
    """Returns the number of tasks after which the student has saved what was spent on it.

    None if a price is unknown, or if a task is not cheaper with the student.
    """
    if student_usd is None or teacher_usd is None or spent_usd is None:
        return None
    saved_per_task = teacher_usd - student_usd
    # Rounding must not add a task.
    return math.ceil(round(spent_usd / saved_per_task, 6)) if saved_per_task > 0 else None


def _break_even_note(
    student: TaskCost, teacher: TaskCost, spent_usd: float | None, tasks: int | None
) -> str:
    """Returns after how many `tasks` the student pays back its costs, or why that is not known."""
    if tasks is not None:
        after = f"after {tasks} {noun_for(tasks, 'task')}"
        return f"{after} the student has paid back all costs so far"
    if (student.usd is None and student.is_local) or (teacher.usd is None and teacher.is_local):
        return (
            f"this machine's time has no price: write `{MACHINE}: {{usd_per_hour: 1.2}}` to "
            f"{PRICES_FILE} and evaluate again"
        )
    if student.usd is None or teacher.usd is None or spent_usd is None:
        return (
            "the price of some calls or machines is unknown: write a model's price to "
            f"{PRICES_FILE}, a machine's to machines.yml"
        )
    return "a task costs no less with the student than with the teacher"


def _recorded_request(folder: RunFolder) -> Mapping[str, Any]:
    recorded = folder.try_read_request()
    return recorded.request if recorded is not None else {}


def _is_local(request: Mapping[str, Any]) -> bool:
    provider = request.get("provider", "hf")
    return provider in IN_PROCESS or (provider in PROVIDERS and PROVIDERS[provider].is_local)
