"""Runs an evaluation: rollouts on held-out tasks, their accuracy, and the KL to a teacher."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import anyio

from stillroom.concurrency import background_tasks
from stillroom.data.categories import category_in
from stillroom.data.formats import Task
from stillroom.errors import InputError, TeacherError
from stillroom.evaluate.files import RESULT_FILE, Evaluation, EvaluationResult, TaskScore
from stillroom.evaluate.intervals import Estimate, mean_estimate, share_estimate
from stillroom.evaluate.request import EvaluateModel, EvaluationPlan, plan_evaluation
from stillroom.files import AppendLog, write_json
from stillroom.lineage import write_manifest
from stillroom.models.resolve import identify
from stillroom.reporting import Reporter, cancel_when_asked, stop_if_cancelled
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    collect_rollouts,
    key_of,
    specs_for,
)
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.request import RolloutPlan, sampling_settings
from stillroom.rollout.results import RolloutOrigin, origin_of
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.types import Trajectory

_ROLLOUTS_FILE = "rollouts.jsonl"
_PHASE = "evaluate"
_NO_GROUP = "(none)"


async def evaluate_model(
    workspace: Workspace, request: EvaluateModel, *, folder: Path, reporter: Reporter
) -> EvaluationResult:
    """Evaluates a model and returns the result.

    The rollouts and evaluation.json are written to the run folder `folder`.
    Raises TeacherError if every rollout failed, and InputError if nothing judges a task.
    """
    started = time.monotonic()
    plan = plan_evaluation(workspace, request)
    tasks = plan.rollouts.load_tasks()
    origin = await _origin(plan)
    outcomes = await _collect(
        plan.rollouts,
        tasks,
        request.temperature,
        request.samples_per_prompt,
        reporter,
        _PHASE,
        on_open=functools.partial(_begin, RunFolder(folder), reporter),
    )
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    if not rollouts:
        failed = next(outcome for outcome in outcomes if isinstance(outcome, FailedRollout))
        raise TeacherError(
            f"every rollout failed, the first with: {failed.failure.message}",
            "check the endpoint and the model's name, then evaluate again",
        )
    rows = folder / _ROLLOUTS_FILE
    with AppendLog(rows) as log:
        for rollout in rollouts:
            log.append(rollout)
    scores = score_tasks(rollouts, request.group_by)
    is_single = request.samples_per_prompt == 1
    kl = await _teacher_kl(plan, tasks, reporter)
    instruction = plan.rollouts.instruction
    result = EvaluationResult(
        name=request.name or request.model,
        model=request.model,
        data=request.data,
        accuracy=accuracy_of(scores, is_single=is_single),
        by_group=_by_group(scores, request.group_by, is_single=is_single),
        mean_reward=fmean(score.reward for score in scores),
        mean_turns=fmean(rollout.turns for rollout in rollouts),
        tool_errors=sum(rollout.tool_errors for rollout in rollouts),
        truncated=sum(rollout.truncated for rollout in rollouts),
        failed=len(outcomes) - len(rollouts),
        teacher=request.teacher,
        teacher_kl=kl and kl.value,
        sampled_accuracy=kl and kl.accuracy,
        rollouts=workspace.shown(rows),
        seconds=round(time.monotonic() - started, 3),
        instruction=None if instruction.is_empty else instruction.describe(),
    )
    output = folder / RESULT_FILE
    write_json(output, Evaluation(result=result, tasks=scores))
    for path, inputs in ((rows, [*origin.inputs, *origin.models]), (output, [rows])):
        write_manifest(
            path,
            operation="evaluate_model",
            inputs=inputs,
            request=request.model_dump(mode="json"),
            counts={"tasks": len(scores), "failed": result.failed},
            run_id=folder.name,
        )
    return result


async def _origin(plan: EvaluationPlan) -> RolloutOrigin:
    origin = await origin_of(plan.rollouts)
    if plan.kl_models is None:
        return origin
    identify_teacher = functools.partial(identify, plan.kl_models.teacher, role="teacher")
    record = await anyio.to_thread.run_sync(identify_teacher)
    return RolloutOrigin(origin.inputs, [*origin.models, record])


def _begin(folder: RunFolder, reporter: Reporter, notes: Sequence[str]) -> None:
    folder.check_inputs()
    for note in notes:
        reporter.note(note)


async def _collect(
    plan: RolloutPlan,
    tasks: Sequence[Task],
    temperature: float,
    samples_per_task: int,
    reporter: Reporter,
    phase: str,
    *,
    on_open: Callable[[Sequence[str]], None] = lambda _notes: None,
) -> list[Outcome]:
    """Returns the outcome of every rollout, in the order of the tasks.

    `on_open` is called with notes for the user when the tools and the model are open, before the
    first rollout.
    """
    specs = specs_for(tasks, samples_per_task)
    sampling = sampling_settings(plan.options, temperature=temperature)
    done: dict[RolloutKey, Outcome] = {}
    async with open_rollout_context(plan, sampling, tasks) as context:
        on_open(context.notes)
        unjudged = [task for task in tasks if not context.rewarder.can_judge(task)]
        if unjudged:
            raise InputError(
                f"nothing judges {len(unjudged)} of {len(tasks)} tasks, e.g. {unjudged[0].task_id}",
                "give rewards=rewards.py, or put the answer in each row's metadata.expected_answer",
            )

        async def keep(outcome: Outcome) -> None:
            done[key_of(outcome)] = outcome
            reporter.progress(len(done), len(specs), unit="rollouts", phase=phase)

        async with background_tasks() as watching:
            # Not only between rollouts: one of them may take minutes.
            watching.start_soon(cancel_when_asked, reporter, watching.cancel_scope)
            await collect_rollouts(
                specs, context, concurrency=plan.options.concurrency, on_outcome=keep
            )
    stop_if_cancelled(reporter)
    return [done[spec.key] for spec in specs]


@dataclass(frozen=True, slots=True)
class _TeacherKL:
    """The reverse KL per token on samples at temperature 1, and the accuracy of these samples."""

    value: Estimate
    accuracy: Estimate


async def _teacher_kl(
    plan: EvaluationPlan, tasks: Sequence[Task], reporter: Reporter
) -> _TeacherKL | None:
    """Returns the reverse KL on one sample per task.

    Returns None if the request has no teacher. Only the first `kl_prompts` tasks are sampled.
    """
    if plan.kl_models is None:
        return None
    # Imported here because only the KL needs torch.
    from stillroom.evaluate.teacher_kl import measure_teacher_kl

    outcomes = await _collect(
        plan.rollouts, tasks[: plan.request.kl_prompts], 1.0, 1, reporter, "sample for the KL"
    )
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    value = measure_teacher_kl(plan.rollouts.workspace, plan.kl_models, rollouts)
    return _TeacherKL(value, accuracy_of(score_tasks(rollouts, ()), is_single=True))


def score_tasks(rollouts: Sequence[Trajectory], group_by: Sequence[str]) -> list[TaskScore]:
    """Returns each task's mean success and reward, in the order of the tasks' first rollouts."""
    by_task: dict[str, list[Trajectory]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.task_id, []).append(rollout)
    return [
        TaskScore(
            task_id=task_id,
            success=fmean(rollout.success is True for rollout in group),
            reward=fmean(rollout.reward or 0.0 for rollout in group),
            groups={name: _group_of(group[0], name) for name in group_by},
        )
        for task_id, group in by_task.items()
    ]


def _group_of(rollout: Trajectory, name: str) -> str:
    group = category_in(rollout.metadata, name)
    return _NO_GROUP if group is None else group


def accuracy_of(scores: Sequence[TaskScore], *, is_single: bool) -> Estimate:
    """Returns the accuracy, with Wilson's interval for one sample per task, else with Student's."""
    if is_single:
        return share_estimate(round(sum(score.success for score in scores)), len(scores))
    return mean_estimate([score.success for score in scores], limits=(0.0, 1.0))


def _by_group(
    scores: Sequence[TaskScore], group_by: Sequence[str], *, is_single: bool
) -> dict[str, dict[str, Estimate]]:
    grouped: dict[str, dict[str, Estimate]] = {}
    for name in group_by:
        values = sorted({score.groups[name] for score in scores})
        if values == [_NO_GROUP]:
            continue
        grouped[name] = {
            value: accuracy_of(
                [score for score in scores if score.groups[name] == value], is_single=is_single
            )
            for value in values
        }
    return grouped
