"""One evaluation: rollouts on held-out tasks, accuracy with intervals, KL to a teacher."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from stillroom.data.formats import Task, load_tasks
from stillroom.errors import InputError, RunCancelledError, TeacherError
from stillroom.evaluate.files import RESULT_FILE, Evaluation, EvaluationResult, TaskScore
from stillroom.evaluate.intervals import Estimate, mean_estimate, share_estimate
from stillroom.evaluate.request import EvaluateModel
from stillroom.files import AppendLog, write_json
from stillroom.lineage import write_manifest
from stillroom.models.identity import identify
from stillroom.models.resolve import locate_model
from stillroom.reporting import Reporter
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    collect_rollouts,
    key_of,
    specs_for,
)
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.request import sampling_settings, select_entries
from stillroom.rollout.results import RolloutOrigin, origin_of
from stillroom.rollout.rewards.judge_request import check_judge
from stillroom.settings import Workspace
from stillroom.types import SamplingSettings, Trajectory

ROLLOUTS_FILE = "rollouts.jsonl"
PHASE = "evaluate"
_OTHER = "(none)"


async def evaluate_model(
    workspace: Workspace, request: EvaluateModel, *, folder: Path, reporter: Reporter
) -> EvaluationResult:
    """Evaluates as asked; rollouts and evaluation.json are written to the run's folder."""
    started = time.monotonic()
    data = workspace.existing(request.data, what="data")
    tasks = select_entries(load_tasks(data), n=request.n, entries=request.entries)
    sampling = sampling_settings(request, temperature=request.temperature)
    origin = await _origin(workspace, request, data)
    outcomes = await _answers(workspace, request, sampling, tasks, reporter, PHASE)
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    if not rollouts:
        first = next(o for o in outcomes if isinstance(o, FailedRollout))
        raise TeacherError(
            f"every rollout failed, the first with: {first.failure.message}",
            "check the endpoint and the model's name, then evaluate again",
        )
    rows = folder / ROLLOUTS_FILE
    with AppendLog(rows) as log:
        for rollout in rollouts:
            log.append(rollout)
    scores = score_tasks(rollouts, request.group_by)
    is_single = request.samples_per_prompt == 1
    result = EvaluationResult(
        name=request.name or request.model,
        model=request.model,
        data=request.data,
        accuracy=accuracy_of(scores, is_single=is_single),
        by_group=_by_group(scores, request.group_by, is_single=is_single),
        mean_reward=sum(score.reward for score in scores) / len(scores),
        mean_turns=sum(rollout.turns for rollout in rollouts) / len(rollouts),
        tool_errors=sum(rollout.tool_errors for rollout in rollouts),
        truncated=sum(rollout.truncated for rollout in rollouts),
        failed=len(outcomes) - len(rollouts),
        teacher=request.teacher,
        teacher_kl=await _teacher_kl(workspace, request, tasks, reporter),
        rollouts=workspace.shown(rows),
        seconds=round(time.monotonic() - started, 3),
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


async def _origin(workspace: Workspace, request: EvaluateModel, data: Path) -> RolloutOrigin:
    origin = await origin_of(workspace, request, data)
    if request.teacher is None:
        return origin
    teacher = locate_model(workspace, request.teacher)
    record = await anyio.to_thread.run_sync(functools.partial(identify, teacher, role="teacher"))
    return RolloutOrigin(origin.inputs, [*origin.models, record])


async def _answers(
    workspace: Workspace,
    request: EvaluateModel,
    sampling: SamplingSettings,
    tasks: Sequence[Task],
    reporter: Reporter,
    phase: str,
) -> list[Outcome]:
    """Returns the outcome of every rollout, in the order of the tasks."""
    specs = specs_for(tasks, request.samples_per_prompt)
    judge = check_judge(workspace, request)
    done: dict[RolloutKey, Outcome] = {}
    async with open_rollout_context(workspace, request, sampling, tasks, judge=judge) as context:
        unjudged = [task for task in tasks if not context.rewarder.can_judge(task)]
        if unjudged:
            raise InputError(
                f"nothing judges {len(unjudged)} of {len(tasks)} tasks, e.g. {unjudged[0].task_id}",
                "give rewards=rewards.py, or put the answer in each row's metadata.expected_answer",
            )

        async def keep(outcome: Outcome) -> None:
            if reporter.is_cancelled():
                raise RunCancelledError
            done[key_of(outcome)] = outcome
            reporter.progress(len(done), len(specs), unit="rollouts", phase=phase)

        await collect_rollouts(specs, context, concurrency=request.concurrency, on_outcome=keep)
    return [done[spec.key] for spec in specs]


async def _teacher_kl(
    workspace: Workspace, request: EvaluateModel, tasks: Sequence[Task], reporter: Reporter
) -> Estimate | None:
    if request.teacher is None:
        return None
    from stillroom.evaluate.teacher_kl import measure_teacher_kl

    sampled = request.model_copy(update={"samples_per_prompt": 1})
    sampling = sampling_settings(request, temperature=1.0)
    outcomes = await _answers(
        workspace, sampled, sampling, tasks[: request.kl_prompts], reporter, "sample for the KL"
    )
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    return measure_teacher_kl(workspace, request, request.teacher, rollouts)


def score_tasks(rollouts: Sequence[Trajectory], group_by: Sequence[str]) -> list[TaskScore]:
    """Returns each task's mean success and reward, in the order in which tasks first appear."""
    by_task: dict[str, list[Trajectory]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.task_id, []).append(rollout)
    return [
        TaskScore(
            task_id=task_id,
            success=_mean(group, lambda rollout: float(rollout.success is True)),
            reward=_mean(group, lambda rollout: rollout.reward or 0.0),
            groups={
                name: str(group[0].metadata[name]) if name in group[0].metadata else _OTHER
                for name in group_by
            },
        )
        for task_id, group in by_task.items()
    ]


def accuracy_of(scores: Sequence[TaskScore], *, is_single: bool) -> Estimate:
    """Returns the share of success: Wilson's interval for one sample a task, else Student's."""
    if is_single:
        return share_estimate(round(sum(score.success for score in scores)), len(scores))
    return mean_estimate([score.success for score in scores], limits=(0.0, 1.0))


def _by_group(
    scores: Sequence[TaskScore], group_by: Sequence[str], *, is_single: bool
) -> dict[str, dict[str, Estimate]]:
    grouped: dict[str, dict[str, Estimate]] = {}
    for name in group_by:
        values = sorted({score.groups[name] for score in scores})
        if values == [_OTHER]:
            continue
        grouped[name] = {
            value: accuracy_of(
                [score for score in scores if score.groups[name] == value], is_single=is_single
            )
            for value in values
        }
    return grouped


def _mean(group: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> float:
    return sum(map(value, group)) / len(group)
