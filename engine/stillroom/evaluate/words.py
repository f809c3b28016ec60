"""What an evaluation measured beside the accuracy, as short sentences for the report and cards."""

from collections.abc import Iterator

from stillroom.evaluate.files import EvaluationResult
from stillroom.evaluate.intervals import Estimate


def besides(result: EvaluationResult) -> Iterator[str]:
    """Yields what was measured at temperature 1, on the guard set and of costs; maybe nothing."""
    if result.sampled_accuracy is not None:
        yield f"at temperature 1: {_percent(result.sampled_accuracy)}"
    if (guard := result.guard) is not None:
        right = "" if guard.accuracy is None else f"{_percent(guard.accuracy)} right, "
        yield f"guard set: {right}needless tool calls at {_percent(guard.over_calling)}"
    if (cost := result.per_task) is not None:
        usd = "at an unknown price" if cost.usd is None else f"{dollars(cost.usd)}"
        yield f"a task: {cost.seconds:.2g} s, {usd}, {cost.tokens:.0f} tokens"
    if result.unjudged:
        yield f"{result.unjudged} tasks were left out, as nothing judges them"
    if result.stopped_by is not None:
        yield f"{result.stopped_by} ended it, {result.omitted} rollouts were not done"


def dollars(usd: float) -> str:
    """Returns an amount with three significant digits."""
    return f"${usd:.3g}"


def _percent(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.1%}"
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
