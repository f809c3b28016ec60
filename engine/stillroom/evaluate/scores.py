"""Computes the scores, accuracy, group accuracies and costs of evaluated tasks."""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean

import msgspec

from stillroom.data.statistics import category_in
from stillroom.evaluate.files import GuardResult, GuardScore, TaskCost, TaskScore
from stillroom.evaluate.intervals import Estimate, accuracy_estimate, share_estimate
from stillroom.rollout.rewards.rewards import gives_expected_answer
from stillroom.types import StopReason, Trajectory, total_usd

NO_GROUP = "(none)"
_HOUR_S = 3600.0


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
    return NO_GROUP if group is None else group


def accuracy_of(scores: Sequence[TaskScore]) -> Estimate:
    """Returns the accuracy over tasks."""
    return accuracy_estimate([score.success for score in scores])


def accuracy_by_group(
    scores: Sequence[TaskScore], group_by: Sequence[str]
) -> dict[str, dict[str, Estimate]]:
    """Returns the accuracy of each group of tasks, by metadata field and its value."""
    grouped: dict[str, dict[str, Estimate]] = {}
    for name in group_by:
        values = sorted({score.groups[name] for score in scores})
        if values != [NO_GROUP]:
            grouped[name] = {
                value: accuracy_of([score for score in scores if score.groups[name] == value])
                for value in values
            }
    return grouped


def exact_accuracy_of(
    rollouts: Sequence[Trajectory], contained: AbstractSet[str]
) -> Estimate | None:
    """Returns the accuracy if a right answer must say nothing else; None without such tasks.

    contained: the ids of the tasks whose answers are right if they contain the expected one.
    """
    if not contained:
        return None
    exact = [
        rollout
        if rollout.task_id not in contained
        or gives_expected_answer(rollout.messages, rollout.metadata, and_nothing_else=True)
        else msgspec.structs.replace(rollout, success=False)
        for rollout in rollouts
    ]
    return accuracy_of(score_tasks(exact, ()))


def commonest_answer_of(rollouts: Sequence[Trajectory]) -> Estimate | None:
    """Returns the accuracy of always giving the expected answer that most tasks have.

    None if a task has no single expected answer, or if most tasks have different ones.
    """
    expected = {one.task_id: one.metadata.get("expected_answer") for one in rollouts}
    texts = [answer for answer in expected.values() if isinstance(answer, str)]
    if len(texts) < len(expected) or 2 * len(set(texts)) > len(texts):
        return None
    return share_estimate(Counter(texts).most_common(1)[0][1], len(texts))


def count_truncated(rollouts: Sequence[Trajectory], max_tokens: int) -> dict[str, int]:
    """Returns the number of truncated answers, by stop reason.

    Endpoints report the same stop reason for `max_tokens` and for a full context window. An answer
    shorter than `max_tokens` was truncated by the context window.
    """
    reasons = Counter[str]()
    for rollout in rollouts:
        if rollout.truncated:
            is_short = 0 < rollout.usage.completion_tokens < max_tokens
            is_full = rollout.stop_reason is StopReason.MAX_TOKENS and is_short
            reasons[StopReason.CONTEXT_WINDOW if is_full else rollout.stop_reason] += 1
    return dict(reasons)


def score_guard(rollouts: Sequence[Trajectory]) -> list[GuardScore]:
    """Returns the outcome of each prompt of the guard set."""
    return [
        GuardScore(
            task_id=rollout.task_id,
            success=rollout.success,
            calls_tool=any(message.get("tool_calls") for message in rollout.messages),
        )
        for rollout in rollouts
    ]


def guard_result(scores: Sequence[GuardScore], data: str) -> GuardResult:
    """Returns the shares of right answers and of needless tool calls on a guard set."""
    judged = [score.success for score in scores if score.success is not None]
    return GuardResult(
        data=data,
        accuracy=share_estimate(sum(judged), len(judged)) if judged else None,
        over_calling=share_estimate(sum(score.calls_tool for score in scores), len(scores)),
    )


def task_cost(
    rollouts: Sequence[Trajectory],
    *,
    seconds: float,
    is_local: bool,
    usd_per_hour: float | None,
) -> TaskCost:
    """Returns the average cost of one task.

    seconds: the wall time of all rollouts. usd_per_hour: the price of this machine, the only cost
    of a local model; None if it is unknown.
    """
    num = len(rollouts)
    usage = [rollout.usage for rollout in rollouts]
    machine_seconds = seconds / num
    if is_local:
        usd = None if usd_per_hour is None else machine_seconds * usd_per_hour / _HOUR_S
    else:
        total = total_usd(rollout.cost_usd for rollout in rollouts)
        usd = None if total is None else total / num
    return TaskCost(
        usd=usd,
        seconds=fmean(rollout.duration_s for rollout in rollouts),
        machine_seconds=machine_seconds,
        tokens=sum(one.prompt_tokens + one.completion_tokens for one in usage) / num,
        is_local=is_local,
    )
