"""Detects failures of on-policy distillation in the metrics of its iterations.

These are pure functions. Each threshold is a value that a healthy run never reaches, and at which a
failure mode from the literature is well under way. Windows are compared by trimmed means, so that a
few bad rollouts do not sway them. Iterations with different curriculum limits are not compared with
each other. An alarm suggests only what the configuration does not do already.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from stillroom.train.config.schema import DistillConfig

History = Sequence[Mapping[str, float]]
"""The metrics of the iterations so far, in order."""

_WINDOW = 5
"""The number of iterations in a window, because a single one varies too much."""
_RISE_WINDOW = 8
_RECENT = 3
"""The number of latest iterations over which a share is averaged."""
_MIN_ITERATIONS = 4 * _WINDOW
# With a quarter of the rollouts truncated, the student learns from answers without an end.
_MAX_TRUNCATED = 0.25
# Answers that grow by half and are truncated more often, or that double in length, lead to
# truncation collapse.
_LONGER, _MUCH_LONGER, _RISE = 1.5, 2.0, 0.05
# The share of repeated 4-grams of tokens; prose has a few percent, tool calls up to a fifth in
# one turn.
_MAX_REPEATED, _REPEATED_RISE = 0.3, 0.1
# A sharp teacher makes a sharper student, so low entropy is a collapse only if the student's
# divergence from the teacher does not fall.
_MIN_ENTROPY, _NO_NEARER = 0.25, 0.5
# Within this many nats per token of the teacher, a student is as close as students get.
_NEAR_KL = 0.02
_NOT_FALLEN, _RISEN = 0.95, 1.5
# The difference in nats per token between sampler and trainer; bf16 rounding causes about 0.01.
MAX_GAP = 0.05
_MAX_FAILED = 0.2
# Markers of templates cannot always be compared, text nearly always.
_MAX_NOT_COMPARED, _MIN_COMPARED = 0.5, 0.5
# Once most rollouts have a token that the teacher finds a hundred times less likely than the
# student, and fail, correct greedy answers do not help users who sample.
_MAX_WITH_TAIL, _TAIL_FALLS, _SUCCESS = 0.5, 0.7, 0.5
_LOWER_RATE = "lower trainer.learning_rate to a third"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem for which a person would stop the run and investigate."""

    name: str
    text: str
    """The problem and how to fix it."""


def find_alarms(
    history: History, config: DistillConfig, *, is_trained: bool = False
) -> list[Alarm]:
    """Returns the current alarms, worst first; a run that has just started has none.

    is_trained: whether the student is a checkpoint of an earlier training, such as SFT.
    """
    steady = _since_limits_changed([metrics for metrics in history if "teacher_kl" in metrics])
    detectors = (
        *_DETECTORS,
        partial(_detect_kl_not_falling, is_trained=is_trained),
        *_LAST_DETECTORS,
    )
    results = (detect(steady, config) for detect in detectors)
    return [alarm for alarm in results if alarm is not None]


def _detect_failed_rollouts(history: History, config: DistillConfig) -> Alarm | None:
    share = _recent_mean(history, "failed", _RECENT)
    if share is None or share <= _MAX_FAILED:
        return None
    return Alarm(
        "failed_rollouts",
        f"{share:.0%} of the rollouts fail and are not trained on: see log.txt for what tools.py, "
        "rewards.py or a server reports; raise rollout.tool_timeout or rollout.rollout_timeout if "
        "they time out",
    )


def _detect_left_out_rollouts(history: History, config: DistillConfig) -> Alarm | None:
    share = _recent_mean(history, "left_out", _RECENT)
    if share is None or share <= _MAX_FAILED:
        return None
    return Alarm(
        "beyond_the_teachers_context",
        f"{share:.0%} of the rollouts are longer than the teacher's context and are not trained "
        "on: shorten teacher.context_file, or lower rollout.max_context_window "
        f"({config.rollout.max_context_window}) or rollout.max_tokens",
    )


def _detect_uncompared_text(history: History, config: DistillConfig) -> Alarm | None:
    left_out = _recent_mean(history, "not_compared", _RECENT)
    share = _recent_mean(history, "byte_share", _RECENT)
    if left_out is None or share is None:
        return None
    if left_out <= _MAX_NOT_COMPARED and share >= _MIN_COMPARED:
        return None
    return Alarm(
        "not_compared",
        f"only {share:.0%} of the student's text could be compared with the teacher, and "
        f"{left_out:.0%} of the student's tokens are not trained on: the teacher's chat template "
        "may not render some turns, or rollouts may exceed its context; inspect rollouts, lower "
        "rollout.max_context_window or rollout.max_turns, or use another teacher",
    )


def _detect_truncation(history: History, config: DistillConfig) -> Alarm | None:
    share = _recent_mean(history, "truncated", _RECENT)
    if share is None or share < _MAX_TRUNCATED:
        return None
    return Alarm(
        "truncation",
        f"{share:.0%} of the rollouts are truncated: raise rollout.max_tokens "
        f"({config.rollout.max_tokens}) or rollout.max_context_window; if answers became so long "
        f"only recently, go back to an earlier checkpoint and {_LOWER_RATE}",
    )


def _detect_length_inflation(history: History, config: DistillConfig) -> Alarm | None:
    before, now = _first_and_last_means(history, "response_tokens")
    if before is None or now is None or before <= 0:
        return None
    cut_before, cut_now = _first_and_last_means(history, "truncated")
    is_cut_more = (cut_now or 0.0) - (cut_before or 0.0) >= _RISE
    if now < _LONGER * before or (now < _MUCH_LONGER * before and not is_cut_more):
        return None
    advice = _join_advice(
        (True, _LOWER_RATE),
        (
            config.algorithm.mask_special_tokens,
            "set algorithm.mask_special_tokens: false so that end-of-turn tokens are trained",
        ),
        (
            config.curriculum.prefix_tokens is None,
            "shorten rollouts with curriculum.prefix_tokens",
        ),
    )
    return Alarm(
        "length_inflation",
        f"answers grew from {before:.0f} to {now:.0f} tokens: compare with the teacher's answers "
        f"(evaluate_model); if those are shorter, {advice}",
    )


def _detect_repetition(history: History, config: DistillConfig) -> Alarm | None:
    before, now = _first_and_last_means(history, "repetition")
    if before is None or now is None:
        return None
    if now < _MAX_REPEATED or now - before < _REPEATED_RISE:
        return None
    has_no_prefix = config.curriculum.prefix_tokens is None
    prefix = " or set curriculum.prefix_tokens" if has_no_prefix else ""
    return Alarm(
        "repetition",
        f"{now:.0%} of the student's 4-grams repeat within a turn (at first {before:.0%}): its "
        "answers loop, and the teacher finds loops likely; go back to an earlier checkpoint, "
        f"{_LOWER_RATE}, and lower rollout.max_tokens{prefix}",
    )


def _detect_entropy_collapse(history: History, config: DistillConfig) -> Alarm | None:
    before, now = _first_and_last_means(history, "entropy")
    kl_first, kl_last = _first_and_last_means(history, "teacher_kl")
    if before is None or now is None or kl_first is None or kl_last is None:
        return None
    if now >= _MIN_ENTROPY * before or kl_last <= max(_NEAR_KL, _NO_NEARER * kl_first):
        return None
    advice = _join_advice(
        (True, _LOWER_RATE),
        (_could_use_distribution(config), "use algorithm.loss_fn: full_reverse_kl"),
        (
            not config.teacher.is_served and config.algorithm.loss_fn != "jsd",
            "use algorithm.loss_fn: jsd, which covers more of the teacher's modes",
        ),
    )
    return Alarm(
        "entropy_collapse",
        f"the student's entropy fell from {before:.3f} to {now:.3f} nats per token, without a "
        f"lower teacher_kl: mode collapse; go back to an earlier checkpoint, {advice}",
    )


def _detect_kl_not_falling(
    history: History, config: DistillConfig, *, is_trained: bool
) -> Alarm | None:
    if len(history) < _MIN_ITERATIONS:
        return None
    window = max(_WINDOW, len(history) // 4)
    before, now = _first_and_last_means(history, "teacher_kl", window)
    if before is None or now is None or now <= max(_NEAR_KL, _NOT_FALLEN * before):
        return None
    advice = _join_advice(
        (
            config.cold_start is None and not is_trained,
            "start with SFT if the student had none (cold_start, in the same run)",
        ),
        (
            is_trained,
            "stop if evaluate_model shows no gain over the checkpoint that the student began from",
        ),
        (True, f"{_LOWER_RATE} if teacher_kl jumps, raise it if grad_norm stays small"),
        (_could_use_distribution(config), "use algorithm.loss_fn: full_reverse_kl"),
    )
    return Alarm(
        "kl_not_falling",
        f"teacher_kl is {now:.3f} nats per token after {len(history)} iterations, from "
        f"{before:.3f}: {advice}",
    )


def _detect_rising_kl(history: History, config: DistillConfig) -> Alarm | None:
    values = _values(history, "teacher_kl")
    if len(values) < 2 * _RISE_WINDOW:
        return None
    num_windows = len(values) - _RISE_WINDOW + 1
    windows = [sorted(values[i : i + _RISE_WINDOW]) for i in range(num_windows)]
    lowest, last = min(windows, key=median), windows[-1]
    # Among many windows the lowest is low by chance too, so all but one of the last values must
    # exceed all but one of the lowest. A bad rollout in every other iteration then raises no alarm
    # in 100 iterations, and a rise by half raises one after 7.
    if median(last) <= max(_NEAR_KL, _RISEN * median(lowest)) or last[1] <= lowest[-2]:
        return None
    has_turns = config.rollout.max_turns > 1 and config.curriculum.first_turns is None
    advice = _LOWER_RATE
    if has_turns:
        advice += "; errors accumulate over turns: curriculum.first_turns limits them at first"
    return Alarm(
        "kl_rising",
        f"teacher_kl rose from {median(lowest):.3f} to {median(last):.3f} nats per token: go back "
        f"to the checkpoint with the lowest teacher_kl and {advice}",
    )


def _detect_sampler_mismatch(history: History, config: DistillConfig) -> Alarm | None:
    gap = _recent_mean(history, "logprob_gap", _RECENT)
    # Tokens sampled by older weights have other probabilities for that reason alone.
    is_stale = any(metrics.get("staleness", 0.0) > 0 for metrics in history[-_RECENT:])
    if gap is None or gap <= MAX_GAP or is_stale:
        return None
    algorithm = config.algorithm
    advice = _join_advice(
        (config.model.precision != "fp32", "set model.precision: fp32"),
        (
            algorithm.loss.is_policy_gradient and algorithm.importance_cap is None,
            "set algorithm.importance_cap: 2.0 to limit the effect",
        ),
    )
    return Alarm(
        "sampler_mismatch",
        f"sampler and trainer differ by {gap:.3f} nats per token on the same weights: "
        + (advice or "leave rollout.server out, so that this process samples"),
    )


def _detect_tail(history: History, config: DistillConfig) -> Alarm | None:
    before = _recent_mean(history[:-_WINDOW], "tail", _WINDOW)
    now = _recent_mean(history, "tail", _WINDOW)
    length = _recent_mean(history, "response_tokens", _WINDOW)
    reward = _recent_mean(history, "reward", _WINDOW)
    if len(history) < _MIN_ITERATIONS or before is None or now is None or length is None:
        return None
    is_rare = (1 - now) ** length > 1 - _MAX_WITH_TAIL
    if is_rare or now < _TAIL_FALLS * before or (reward is not None and reward >= _SUCCESS):
        return None
    advice = _join_advice(
        (
            config.model.qlora_rank > 0,
            "train all weights (model.qlora_rank: 0) if the model is small, or raise the rank",
        ),
        (True, "train longer, or raise trainer.learning_rate while teacher_kl falls steadily"),
    )
    return Alarm(
        "tail",
        f"{now:.1%} of the sampled tokens are a hundred times less likely under the teacher than "
        "under the student, so most rollouts have such a token even if greedy answers are right: "
        "compare "
        f"evaluate_model at temperature 0 and 1; {advice}",
    )


_DETECTORS: Sequence[Callable[[History, DistillConfig], Alarm | None]] = (
    _detect_failed_rollouts,
    _detect_left_out_rollouts,
    _detect_uncompared_text,
    _detect_truncation,
    _detect_length_inflation,
    _detect_repetition,
    _detect_entropy_collapse,
    _detect_rising_kl,
)
"""The detectors of the worst alarms, the worst first."""
_LAST_DETECTORS: Sequence[Callable[[History, DistillConfig], Alarm | None]] = (
    _detect_sampler_mismatch,
    _detect_tail,
)


def _join_advice(*options: tuple[bool, str]) -> str:
    """Returns the suggestions that apply to the configuration, joined by "or"."""
    return ", or ".join(text for applies, text in options if applies)


def _could_use_distribution(config: DistillConfig) -> bool:
    """Returns whether a teacher in this process has distributions that the loss does not use."""
    return not config.teacher.is_served and not config.algorithm.needs_distribution


def _since_limits_changed(history: History) -> History:
    """Returns the iterations since the curriculum's limits last changed."""
    if not history:
        return history
    limits = [
        tuple(metrics.get(name) for name in ("max_turns", "prefix_tokens", "teacher_share"))
        for metrics in history
    ]
    start = len(limits)
    while start > 0 and limits[start - 1] == limits[-1]:
        start -= 1
    return history[start:]


def _values(history: History, name: str) -> list[float]:
    return [metrics[name] for metrics in history if name in metrics]


def _recent_mean(history: History, name: str, count: int) -> float | None:
    """Returns the trimmed mean of the last `count` values; None if there are fewer."""
    values = _values(history, name)
    return _trimmed_mean(values[-count:]) if len(values) >= count else None


def _first_and_last_means(
    history: History, name: str, window: int = _WINDOW
) -> tuple[float | None, float | None]:
    """Returns the trimmed means of the first and last `window` values; None if they overlap."""
    values = _values(history, name)
    if len(values) < 2 * window:
        return None, None
    return _trimmed_mean(values[:window]), _trimmed_mean(values[-window:])


def _trimmed_mean(values: Sequence[float]) -> float:
    """Returns the mean of three or more values, without the highest and the lowest fifth."""
    num_cut = max(1, len(values) // 5)
    return fmean(sorted(values)[num_cut:-num_cut])
