"""Whether a distillation is worth it: the teacher's lead over the student and over better prompts.

The decision is made from evaluations on the same tasks, before anything is spent on rollouts.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from stillroom import fences
from stillroom.errors import InputError
from stillroom.evaluate.compare import Comparison, compare
from stillroom.evaluate.files import Evaluation
from stillroom.evaluate.intervals import Estimate, excludes_zero
from stillroom.types import OwnText

_NEGLIGIBLE_LEAD = 0.02
"""The largest lead in accuracy that is not worth training for."""
_MAX_TASKS = 100_000


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to distil this teacher into this student on tasks like these."""

    verdict: Literal["go", "no_go", "unclear"]
    because: OwnText
    gap: Estimate
    """The teacher's accuracy minus the student's, paired by task."""
    better_prompt: str | None = None
    """The best evaluation of the same student with another instruction; None if none was given."""
    gap_left: Estimate | None = None
    """The teacher's accuracy minus the student's with that instruction."""
    tasks_needed: int | None = None
    """The number of tasks at which a difference as large as measured here would be significant."""


def decide(student: Evaluation, others: Sequence[Evaluation], teacher: Evaluation) -> Decision:
    """Decides from paired comparisons whether to distil the teacher into the student.

    Of `others`, only evaluations of the same student with another instruction count.
    Raises InputError if the teacher's evaluation shares fewer than two tasks with the student's.
    """
    gap = compare(student, teacher).difference
    if not excludes_zero(gap):
        return _decide_unclear_gap(gap, "the student")
    if gap.value < 0:
        because = "the teacher solves fewer of these tasks than the student: use another teacher"
        return Decision(verdict="no_go", because=because, gap=gap)
    prompted = [one for one in others if _has_other_instruction(one, student)]
    lead = f"the teacher's accuracy is {_points(gap.value)} points above the student's"
    if not prompted:
        return Decision(
            verdict="go",
            because=f"{lead}; no better prompt was tried: evaluate the student with system or "
            "context_file too, and give that run among candidates",
            gap=gap,
        )
    comparisons = [(compare(one, teacher), one) for one in prompted]
    closest, best = min(comparisons, key=lambda pair: pair[0].difference.value)
    left, name = closest.difference, fences.safe_name(best.result.name)
    if excludes_zero(left) and left.value > 0:
        with_prompt = f"the student's with the prompt of {name!r}"
        because = f"{lead}, and {_points(left.value)} points above {with_prompt}"
        decision = Decision(verdict="go", because=because, gap=gap)
    elif left.value <= 0 or _is_negligible(left):
        because = (
            f"with the prompt of {name!r} the student does as well as the teacher: use that "
            "prompt, or train it into the weights (skill prompt-distillation)"
        )
        decision = Decision(verdict="no_go", because=because, gap=gap)
    else:
        decision = _decide_unclear_gap(left, f"the student with the prompt of {name!r}")
    return msgspec.structs.replace(decision, gap=gap, better_prompt=best.result.name, gap_left=left)


def gap_closed(comparison: Comparison, candidate: Evaluation, teacher: Evaluation) -> float | None:
    """Returns the share of the gap between baseline and teacher that a candidate has closed.

    None if the teacher is not ahead of the baseline, or shares too few tasks with the candidate.
    """
    try:
        left = compare(candidate, teacher).difference.value
    except InputError:
        return None
    gained = comparison.difference.value
    return gained / (gained + left) if gained + left > 0 else None


def _has_other_instruction(other: Evaluation, student: Evaluation) -> bool:
    """Returns whether `other` evaluates the same model with another instruction."""
    one, two = other.result, student.result
    return one.model == two.model and one.instruction != two.instruction


def _decide_unclear_gap(gap: Estimate, student: str) -> Decision:
    """Returns no_go for a gap that is at most negligible, else unclear; its interval contains 0."""
    if _is_negligible(gap):
        because = (
            f"the teacher is at most {_points(_NEGLIGIBLE_LEAD)} points better than {student} here"
        )
        return Decision(verdict="no_go", because=because, gap=gap)
    needed = _tasks_needed(gap)
    more = f"evaluate all on about {needed} tasks" if needed else "evaluate all on more tasks"
    return Decision(
        verdict="unclear",
        because=f"{gap.n} tasks are too few to tell the teacher from {student}: {more}",
        gap=gap,
        tasks_needed=needed,
    )


def _points(share: float) -> str:
    """Returns a difference of shares in percentage points."""
    return f"{100 * share:.0f}"


def _is_negligible(gap: Estimate) -> bool:
    return gap.high is not None and gap.high <= _NEGLIGIBLE_LEAD


def _tasks_needed(gap: Estimate) -> int | None:
    """Returns how many tasks would make the gap's interval exclude 0, with a margin of 20 %."""
    if gap.low is None or gap.high is None or gap.value <= 0:
        return None
    half = (gap.high - gap.low) / 2
    needed = math.ceil(gap.n * (half / gap.value) ** 2 * 1.2)
    return needed if gap.n < needed <= _MAX_TASKS else None
