"""Detects failures of on-policy distillation in the metrics of its iterations.

These are pure functions. Each threshold is a value that a healthy run never reaches, and at which a
failure that the literature describes is well under way. Iterations with different curriculum limits
are not compared with each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

History = Sequence[Mapping[str, float]]
"""The metrics of the iterations so far, in order."""

_WINDOW = 5
"""The number of iterations whose mean is compared, because a single one varies too much."""
_FEW = 3
_MANY = 4 * _WINDOW
# With a quarter of the rollouts cut off, the student learns from answers without an end.
_MOST_TRUNCATED = 0.25
# Answers that are longer by half and cut off more often, or twice as long, lead to truncation
# collapse.
_LONGER, _MUCH_LONGER, _RISE = 1.5, 2.0, 0.05
# The share of repeated four-token sequences; prose has a few percent, and tool calls up to a fifth
# in one turn.
_MOST_REPEATED, _REPEATED_RISE = 0.3, 0.1
# A sharp teacher makes a sharper student, so low entropy is a collapse only if the student is no
# nearer to the teacher.
_LEAST_ENTROPY, _NO_NEARER = 0.25, 0.5
# A student within this many nats per token of its teacher is as near to it as students get.
_NEAR = 0.02
_NOT_FALLEN, _RISEN = 0.95, 1.5
# The difference in nats per token between sampler and trainer; the rounding of bf16 causes about
# 0.01.
_MOST_GAP = 0.05
_MOST_FAILED = 0.2


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem for which a person would stop the run and look at it."""

    name: str
    text: str
    """The problem and its remedy."""


def find_alarms(history: History) -> list[Alarm]:
    """Returns the alarms that hold now, the worst first; a run that has just begun has none."""
    steady = _steady([metrics for metrics in history if "teacher_kl" in metrics])
    results = (detect(steady) for detect in _DETECTORS)
    return [alarm for alarm in results if alarm is not None]


def _failed(history: History) -> Alarm | None:
    share = _last(history, "failed", _FEW)
    if share is None or share <= _MOST_FAILED:
        return None
    return Alarm(
        "failed_rollouts",
        f"{share:.0%} of the rollouts fail and are not learnt from: see log.txt for what tools.py, "
        "rewards.py or a server says; raise rollout.tool_timeout or rollout.rollout_timeout if "
        "they take too long",
    )


def _truncated(history: History) -> Alarm | None:
    share = _last(history, "truncated", _FEW)
    if share is None or share < _MOST_TRUNCATED:
        return None
    return Alarm(
        "truncation",
        f"{share:.0%} of the rollouts are cut off before their end: raise rollout.max_tokens or "
        "rollout.max_context_window; if answers have only now become so long, go back to a "
        "checkpoint before and lower trainer.learning_rate to a third",
    )


def _longer(history: History) -> Alarm | None:
    before, now = _ends(history, "response_tokens")
    if before is None or now is None or before <= 0:
        return None
    cut_before, cut_now = _ends(history, "truncated")
    is_cut_more = (cut_now or 0.0) - (cut_before or 0.0) >= _RISE
    if now < _LONGER * before or (now < _MUCH_LONGER * before and not is_cut_more):
        return None
    return Alarm(
        "length_inflation",
        f"answers grow from {before:.0f} to {now:.0f} tokens: compare with the teacher's own "
        "(evaluate_model); if they are shorter, lower trainer.learning_rate to a third, set "
        "algorithm.mask_special_tokens: false so that ending is learnt, or cut rollouts with "
        "curriculum.prefix_tokens",
    )


def _repeats(history: History) -> Alarm | None:
    before, now = _ends(history, "repetition")
    if before is None or now is None:
        return None
    if now < _MOST_REPEATED or now - before < _REPEATED_RISE:
        return None
    return Alarm(
        "repetition",
        f"{now:.0%} of what the student writes it has written before in the same turn (at first "
        f"{before:.0%}): it runs in circles, where the teacher scores every round well; go back to "
        "a checkpoint before, lower trainer.learning_rate to a third, and lower "
        "rollout.max_tokens or set curriculum.prefix_tokens",
    )


def _collapsed(history: History) -> Alarm | None:
    before, now = _ends(history, "entropy")
    kl_first, kl_last = _ends(history, "teacher_kl")
    if before is None or now is None or kl_first is None or kl_last is None:
        return None
    if now >= _LEAST_ENTROPY * before or kl_last <= max(_NEAR, _NO_NEARER * kl_first):
        return None
    return Alarm(
        "entropy_collapse",
        f"the student's entropy fell from {before:.3f} to {now:.3f} nats per token and it is not "
        "nearer to the teacher: it says one thing only; go back to a checkpoint before, lower "
        "trainer.learning_rate to a third, or use algorithm.loss_fn: full_reverse_kl (jsd covers "
        "more of what the teacher would say)",
    )


def _not_nearer(history: History) -> Alarm | None:
    if len(history) < _MANY:
        return None
    window = max(_WINDOW, len(history) // 4)
    before, now = _ends(history, "teacher_kl", window)
    if before is None or now is None or now <= max(_NEAR, _NOT_FALLEN * before):
        return None
    return Alarm(
        "kl_not_falling",
        f"teacher_kl is {now:.3f} nats per token after {len(history)} iterations and was "
        f"{before:.3f}: start from an SFT student (cold_start does it in the same run); then raise "
        "algorithm.kl_penalty_coef or take loss_fn: full_reverse_kl if nothing moves (grad_norm "
        "is small), or lower trainer.learning_rate to a third if it jumps",
    )


def _risen(history: History) -> Alarm | None:
    values = _values(history, "teacher_kl")
    if len(values) < 2 * _WINDOW:
        return None
    means = [fmean(values[i : i + _WINDOW]) for i in range(len(values) - _WINDOW + 1)]
    lowest, last = min(means), means[-1]
    if last <= max(_NEAR, _RISEN * lowest):
        return None
    return Alarm(
        "kl_rising",
        f"teacher_kl was down to {lowest:.3f} nats per token and is {last:.3f}: go back to the "
        "checkpoint of that time and lower trainer.learning_rate to a third; over many turns "
        "errors add up: curriculum.first_turns lets turns grow",
    )


def _mismatch(history: History) -> Alarm | None:
    gap = _last(history, "logprob_gap", _FEW)
    # Tokens that older weights sampled have other probabilities for that reason alone.
    is_stale = any(metrics.get("staleness", 0.0) > 0 for metrics in history[-_FEW:])
    if gap is None or gap <= _MOST_GAP or is_stale:
        return None
    return Alarm(
        "sampler_mismatch",
        f"sampler and trainer differ by {gap:.3f} nats per token on the same weights: set "
        "model.precision: fp32, or algorithm.importance_cap: 2.0 to bound what it does",
    )


_DETECTORS: Sequence[Callable[[History], Alarm | None]] = (
    _failed,
    _truncated,
    _longer,
    _repeats,
    _collapsed,
    _risen,
    _not_nearer,
    _mismatch,
)


def _steady(history: History) -> History:
    """Returns the iterations since the curriculum's limits last changed."""
    if not history:
        return history
    allowed = [
        tuple(metrics.get(name) for name in ("max_turns", "prefix_tokens", "teacher_share"))
        for metrics in history
    ]
    start = len(allowed)
    while start > 0 and allowed[start - 1] == allowed[-1]:
        start -= 1
    return history[start:]


def _values(history: History, name: str) -> list[float]:
    return [metrics[name] for metrics in history if name in metrics]


def _last(history: History, name: str, count: int) -> float | None:
    """Returns the mean of the last `count` values; None while there are fewer."""
    values = _values(history, name)
    return fmean(values[-count:]) if len(values) >= count else None


def _ends(history: History, name: str, window: int = _WINDOW) -> tuple[float | None, float | None]:
    """Returns the means of the first and last `window` values; None while they would overlap."""
    values = _values(history, name)
    if len(values) < 2 * window:
        return None, None
    return fmean(values[:window]), fmean(values[-window:])
