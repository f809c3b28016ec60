"""Compares two evaluations on their shared tasks: paired differences with 95 % intervals."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from stillroom.errors import InputError
from stillroom.evaluate.files import Evaluation, GuardScore, TaskScore
from stillroom.evaluate.intervals import Estimate, excludes_zero, mean_estimate, sign_test_p
from stillroom.evaluate.scores import NO_GROUP
from stillroom.types import OthersText

_Score = TypeVar("_Score", TaskScore, GuardScore)


class GroupDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference in accuracy on the tasks of one group, candidate minus baseline."""

    field: str
    group: str
    difference: Estimate


class GuardComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The differences on the guard set, candidate minus baseline, paired by prompt."""

    accuracy: Estimate | None
    """The difference in right answers; None if no shared prompt expects one."""
    over_calling: Estimate
    """The difference in the share of prompts for which a tool is called."""
    forgets: bool
    """Whether the candidate answers fewer prompts right, with an interval that excludes 0."""
    over_calls: bool
    """Whether the candidate calls tools for more prompts, with an interval that excludes 0."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a candidate with a baseline on the tasks that both answered."""

    baseline: str
    candidate: str
    baseline_accuracy: float
    """The baseline's share of successes (0 to 1) on the shared tasks."""
    candidate_accuracy: float
    """The candidate's share of successes (0 to 1) on the shared tasks."""
    difference: Estimate
    """The candidate's accuracy minus the baseline's, paired by task."""
    p_value: float
    """The exact two-sided p-value of a sign test of the tasks won against the tasks lost."""
    tasks_won: int
    """The number of shared tasks that the candidate solves more often."""
    tasks_lost: int
    """The number of shared tasks that the baseline solves more often."""
    tasks_shared: int
    tasks_unshared: int
    """The number of tasks that only one of the two answered; they are left out."""
    prompts: OthersText | None = None
    """A sentence on the instructions of both models; None if neither had any."""
    is_significant: bool
    """Whether 0 is outside the interval of the difference."""
    by_group: list[GroupDifference]
    """The differences in groups of two or more shared tasks, sorted by field and group."""
    sampled_difference: Estimate | None = None
    """The difference at temperature 1; None unless both evaluations have such answers."""
    guard: GuardComparison | None = None
    """The comparison on the guard set; None unless both evaluations have one."""
    gap_closed: float | None = None
    """The share of the teacher's lead over the baseline that the candidate has made up; None
    without a teacher's evaluation, or if the teacher has no lead."""


def compare(baseline: Evaluation, candidate: Evaluation) -> Comparison:
    """Compares a candidate with a baseline. Raises InputError for fewer than two shared tasks."""
    pairs = shared_scores(baseline.tasks, candidate.tasks)
    names = f"{baseline.result.name!r} and {candidate.result.name!r}"
    if len(pairs) < 2:
        raise InputError(
            f"the evaluations {names} have {'only one' if pairs else 'no'} task in common; a "
            "comparison needs at least 2",
            "evaluate both on the same file with the same n and entries",
        )
    difference = _difference(pairs)
    won = sum(new.success > old.success for old, new in pairs)
    lost = sum(new.success < old.success for old, new in pairs)
    return Comparison(
        baseline=baseline.result.name,
        candidate=candidate.result.name,
        baseline_accuracy=sum(old.success for old, _ in pairs) / len(pairs),
        candidate_accuracy=sum(new.success for _, new in pairs) / len(pairs),
        difference=difference,
        p_value=sign_test_p(won, lost),
        tasks_won=won,
        tasks_lost=lost,
        tasks_shared=len(pairs),
        tasks_unshared=len(baseline.tasks) + len(candidate.tasks) - 2 * len(pairs),
        prompts=_instruction_note(baseline, candidate),
        is_significant=excludes_zero(difference),
        by_group=_by_group(pairs),
        sampled_difference=_sampled_difference(baseline, candidate),
        guard=_compare_guard(baseline, candidate),
    )


def shared_scores(before: Iterable[_Score], after: Iterable[_Score]) -> list[tuple[_Score, _Score]]:
    """Returns the two scores of each shared task, in the order of `before`."""
    by_id = {score.task_id: score for score in after}
    return [(score, by_id[score.task_id]) for score in before if score.task_id in by_id]


def _sampled_difference(baseline: Evaluation, candidate: Evaluation) -> Estimate | None:
    pairs = shared_scores(baseline.sampled, candidate.sampled)
    return _difference(pairs) if len(pairs) > 1 else None


def _compare_guard(baseline: Evaluation, candidate: Evaluation) -> GuardComparison | None:
    pairs = shared_scores(baseline.guard, candidate.guard)
    if len(pairs) < 2:
        return None
    judged = [
        float(new.success) - float(old.success)
        for old, new in pairs
        if old.success is not None and new.success is not None
    ]
    accuracy = mean_estimate(judged, limits=(-1.0, 1.0)) if len(judged) > 1 else None
    calls = [float(new.calls_tool) - float(old.calls_tool) for old, new in pairs]
    over_calling = mean_estimate(calls, limits=(-1.0, 1.0))
    return GuardComparison(
        accuracy=accuracy,
        over_calling=over_calling,
        forgets=accuracy is not None and accuracy.value < 0 and excludes_zero(accuracy),
        over_calls=over_calling.value > 0 and excludes_zero(over_calling),
    )


def _instruction_note(baseline: Evaluation, candidate: Evaluation) -> str | None:
    """Returns a sentence on the instruction that each model read before the prompts."""
    old, new = baseline.result, candidate.result
    if old.instruction is None and new.instruction is None:
        return None
    unchanged = "the prompts' own system messages"
    if old.instruction == new.instruction:
        return f"Both read {old.instruction}."
    return (
        f"{old.name!r} read {old.instruction or unchanged}; "
        f"{new.name!r} read {new.instruction or unchanged}."
    )


def _difference(pairs: Sequence[tuple[TaskScore, TaskScore]]) -> Estimate:
    return mean_estimate([new.success - old.success for old, new in pairs], limits=(-1.0, 1.0))


def _by_group(pairs: Sequence[tuple[TaskScore, TaskScore]]) -> list[GroupDifference]:
    grouped: dict[tuple[str, str], list[tuple[TaskScore, TaskScore]]] = {}
    for old, new in pairs:
        for field, group in old.groups.items():
            grouped.setdefault((field, group), []).append((old, new))
    return [
        GroupDifference(field=field, group=group, difference=_difference(members))
        for (field, group), members in sorted(grouped.items())
        # A field that no task has would give one group: all tasks.
        if len(members) > 1 and not (group == NO_GROUP and len(members) == len(pairs))
    ]
