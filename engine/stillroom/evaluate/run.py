"""Runs an evaluation: rollouts on held-out tasks, their accuracy, and the KL to a teacher."""

import functools
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import anyio

from stillroom.data.formats import Task
from stillroom.errors import TeacherError
from stillroom.evaluate.answers import Answers, EvaluationPart
from stillroom.evaluate.files import (
    RESULT_FILE,
    Evaluation,
    EvaluationResult,
    GuardScore,
    TaskScore,
)
from stillroom.evaluate.intervals import Estimate
from stillroom.evaluate.request import EvaluateModel, EvaluationPlan, plan_evaluation
from stillroom.evaluate.scores import (
    accuracy_by_group,
    accuracy_of,
    commonest_answer_of,
    count_truncated,
    exact_accuracy_of,
    guard_result,
    score_guard,
    score_tasks,
    task_cost,
)
from stillroom.evaluate.unfinished import answers_folder, take_over_answers
from stillroom.files import AppendLog, write_json
from stillroom.home_paths import is_remote_process
from stillroom.lineage import write_manifest
from stillroom.models.resolve import ModelLocation, adapter_base, identify
from stillroom.reporting import Reporter
from stillroom.rollout.dry_run import forecast_rollouts
from stillroom.rollout.episode.collect import FailedRollout, RolloutSpec, specs_for
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.results import RolloutOrigin, origin_of
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget
from stillroom.teachers.endpoint.client import Spending
from stillroom.teachers.providers import Endpoint
from stillroom.teachers.run_limits import machine_usd_of, usd_per_hour_of
from stillroom.types import Trajectory, total_usd

_ROLLOUTS_FILE = "rollouts.jsonl"
_PHASE = "evaluate"


async def evaluate_model(
    workspace: Workspace, request: EvaluateModel, *, folder: Path, reporter: Reporter
) -> EvaluationResult | Forecast:
    """Evaluates a model and returns the result; a dry run returns a forecast instead.

    The rollouts and evaluation.json are written to the run folder `folder`.
    Raises TeacherError if every rollout failed, and InputError if no task can be judged.
    """
    started = time.monotonic()
    plan = plan_evaluation(workspace, request)
    tasks = plan.rollouts.load_tasks()
    parts = _Parts(plan, tasks, machine_usd_of(folder))
    if request.dry_run:
        return await forecast_rollouts(plan.rollouts, plan.price, parts.specs, output=request.data)
    origin = await _origin(plan)
    kept = folder / answers_folder(plan, origin)
    if (earlier := take_over_answers(workspace, folder, plan, origin)) is not None:
        reporter.note(f"reuses the answers of {earlier}, which did not finish")
    answers = await parts.main.run(
        reporter,
        kept / "main.jsonl",
        on_open=functools.partial(_on_open, RunFolder(folder), reporter),
    )
    if not answers.rollouts:
        raise _no_answers_error(answers)
    rows = folder / _ROLLOUTS_FILE
    with AppendLog(rows) as log:
        for rollout in answers.rollouts:
            log.append(rollout)
    scores = score_tasks(answers.rollouts, request.group_by)
    others = await _measure_others(plan, parts, answers, reporter, kept)
    result = _result(
        plan, answers, scores, others, folder=folder, seconds=time.monotonic() - started
    )
    output = folder / RESULT_FILE
    write_json(
        output, Evaluation(result=result, tasks=scores, sampled=others.sampled, guard=others.guard)
    )
    for path, inputs in ((rows, [*origin.inputs, *origin.models]), (output, [rows])):
        write_manifest(
            path,
            operation="evaluate_model",
            inputs=inputs,
            request=request.model_dump(mode="json"),
            counts={"tasks": len(scores), "failed": result.failed},
            run_id=folder.name,
        )
    if others.stopped_by is None:
        shutil.rmtree(kept)
    return result


def _result(
    plan: EvaluationPlan,
    answers: Answers,
    scores: Sequence[TaskScore],
    others: "_OtherMeasures",
    *,
    folder: Path,
    seconds: float,
) -> EvaluationResult:
    """Returns the result, from the answers, their scores and the other measurements."""
    request, workspace = plan.request, plan.rollouts.workspace
    rollouts, instruction = answers.rollouts, plan.rollouts.instruction
    usd_per_hour = usd_per_hour_of(workspace, folder)
    return EvaluationResult(
        name=request.name or request.model,
        model=request.model,
        data=request.data,
        temperature=request.temperature,
        accuracy=accuracy_of(scores),
        by_group=accuracy_by_group(scores, request.group_by),
        mean_reward=fmean(score.reward for score in scores),
        mean_turns=fmean(rollout.turns for rollout in rollouts),
        tool_errors=sum(rollout.tool_errors for rollout in rollouts),
        truncated=sum(rollout.truncated for rollout in rollouts),
        cut_by=count_truncated(rollouts, request.max_tokens),
        failed=len(answers.outcomes) - len(rollouts),
        teacher=request.teacher,
        teacher_kl=others.teacher_kl,
        sampled_accuracy=accuracy_of(others.sampled) if others.sampled else None,
        rollouts=workspace.shown(folder / _ROLLOUTS_FILE),
        seconds=round(seconds, 3),
        instruction=None if instruction.is_empty else instruction.describe(),
        cost_usd=total_usd((answers.cost_usd, others.cost_usd)),
        machine_time_usd=_machine_time_usd(plan, usd_per_hour, seconds),
        per_task=task_cost(
            rollouts,
            seconds=answers.seconds,
            is_local=_is_local(plan),
            usd_per_hour=usd_per_hour,
        ),
        guard=guard_result(others.guard, str(request.guard)) if others.guard else None,
        commonest_answer=commonest_answer_of(rollouts),
        reused=answers.num_reused,
        unjudged=answers.num_unjudged,
        contained=len(answers.contained),
        exact_accuracy=exact_accuracy_of(rollouts, answers.contained),
        omitted=answers.num_omitted,
        stopped_by=others.stopped_by,
    )


class _Parts:
    """The parts of an evaluation: all tasks, some at temperature 1, the guard set; one budget."""

    def __init__(
        self, plan: EvaluationPlan, tasks: Sequence[Task], machine_usd: Callable[[], float]
    ) -> None:
        request, limit = plan.request, plan.request.budget_usd
        spending = None
        if limit is not None or plan.rollouts.judge or isinstance(plan.rollouts.policy, Endpoint):
            budget = Budget(usd=limit or math.inf, other_usd=machine_usd)
            spending = Spending(plan.price, budget)
        make = functools.partial(EvaluationPart, spending=spending)
        self.main = make(
            plan.rollouts,
            specs_for(tasks, request.samples_per_prompt),
            request.temperature,
            _PHASE,
        )
        some, guard = tasks[: plan.num_sampled], plan.load_guard()
        self.sampled = (
            make(
                plan.rollouts,
                specs_for(some, 1),
                1.0,
                "sample at temperature 1",
                skips_unjudged=False,
            )
            if some
            else None
        )
        self.guard = (
            make(
                plan.guard, specs_for(guard, 1), request.temperature, "guard", skips_unjudged=False
            )
            if plan.guard is not None
            else None
        )

    @property
    def specs(self) -> list[RolloutSpec]:
        """The rollouts of all parts."""
        parts = (self.main, self.sampled, self.guard)
        return [spec for part in parts if part is not None for spec in part.specs]


@dataclass(frozen=True, slots=True)
class _OtherMeasures:
    """The measurements other than the accuracy."""

    cost_usd: float | None
    """The cost of their calls in US dollars; None if a price is unknown."""
    sampled: list[TaskScore]
    teacher_kl: Estimate | None
    guard: list[GuardScore]
    stopped_by: str | None


async def _measure_others(
    plan: EvaluationPlan, parts: _Parts, main: Answers, reporter: Reporter, kept: Path
) -> _OtherMeasures:
    """Runs the rollouts at temperature 1 and on the guard set, and measures the KL.

    `kept` is the folder in which rollouts are kept until the evaluation has ended.
    Once the budget is spent, the remaining measurements are skipped.
    """
    stopped_by = main.stopped_by
    sampled, guard, costs = list[Trajectory](), list[Trajectory](), list[float | None]()
    if parts.sampled is not None and stopped_by is None:
        answers = await parts.sampled.run(reporter, kept / "sampled.jsonl")
        sampled, stopped_by = answers.rollouts, answers.stopped_by
        costs.append(answers.cost_usd)
    if parts.guard is not None and stopped_by is None:
        answers = await parts.guard.run(reporter, kept / "guard.jsonl")
        guard, stopped_by = answers.rollouts, answers.stopped_by
        costs.append(answers.cost_usd)
    kl = None
    if plan.kl_models is not None and stopped_by is None:
        # Imported here because only the KL needs torch.
        from stillroom.evaluate.teacher_kl import measure_teacher_kl

        chosen = sampled[: plan.request.kl_prompts]
        kl = measure_teacher_kl(plan.rollouts.workspace, plan.kl_models, chosen, note=reporter.note)
    judged = [rollout for rollout in sampled if rollout.reward is not None]
    return _OtherMeasures(
        total_usd(costs), score_tasks(judged, ()), kl, score_guard(guard), stopped_by
    )


def _no_answers_error(answers: Answers) -> TeacherError:
    """Returns the error for an evaluation in which no rollout was finished."""
    failed = next((one for one in answers.outcomes if isinstance(one, FailedRollout)), None)
    if failed is None:
        return TeacherError(
            f"{answers.stopped_by} was reached before the first task was answered",
            "raise that limit; dry_run forecasts what the evaluation costs",
        )
    return TeacherError(
        f"every rollout failed, the first with: {failed.failure.message}",
        "fix the cause (endpoint, model name, tools.py or rewards.py), then evaluate again",
    )


def _is_local(plan: EvaluationPlan) -> bool:
    """Returns whether the model runs on this machine: in this process, or on a local server."""
    policy = plan.rollouts.policy
    return isinstance(policy, ModelLocation) or policy.provider.is_local


def _machine_time_usd(
    plan: EvaluationPlan, usd_per_hour: float | None, seconds: float
) -> float | None:
    """Returns the price of the machine's time; None without one, or for an endpoint's model."""
    if usd_per_hour is None or not (_is_local(plan) or is_remote_process()):
        return None
    return usd_per_hour * seconds / 3600


async def _origin(plan: EvaluationPlan) -> RolloutOrigin:
    """Returns the inputs and models of the rollouts, an adapter's base and the KL's teacher."""
    origin = await origin_of(plan.rollouts)
    policy, kl_models = plan.rollouts.policy, plan.kl_models
    others = dict[str, ModelLocation]()
    if isinstance(policy, ModelLocation) and policy.is_adapter:
        others["base"] = adapter_base(plan.rollouts.workspace, policy)
    if kl_models is not None:
        others["teacher"] = kl_models.teacher
    for role, location in others.items():
        record = await anyio.to_thread.run_sync(
            functools.partial(identify, plan.rollouts.workspace, location, role=role)
        )
        origin = replace(origin, models=[*origin.models, record])
    return origin


def _on_open(folder: RunFolder, reporter: Reporter, notes: Sequence[str]) -> None:
    """Checks before the first rollout that the run's inputs are unchanged; reports the notes."""
    folder.check_inputs()
    for note in notes:
        reporter.note(note)
