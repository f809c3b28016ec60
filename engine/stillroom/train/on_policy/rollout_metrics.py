"""What an iteration's rollouts say of the student: lengths, endings, repetition, rewards."""

from collections.abc import Iterator, Sequence

from stillroom.rollout.episode.collect import FailedRollout
from stillroom.train.config.schema import TrainConfig
from stillroom.train.on_policy.student_policy import StudentRollout
from stillroom.train.on_policy.student_rollouts import IterationRollouts, limits_of
from stillroom.types import StopReason, TokenTrace, Trajectory

_NGRAM = 4


def rollout_metrics(
    config: TrainConfig, sampled: IterationRollouts, iteration: int
) -> dict[str, float]:
    """Returns the metrics of the rollouts that came to their end; shares are of these."""
    played = [
        (one.outcome, one.how)
        for one in sampled.ended
        if not isinstance(one.outcome, FailedRollout)
    ]
    whole = [rollout for rollout, how in played if not how.is_prefix]
    rollouts = [rollout for rollout, _ in played]
    lengths = [sum(map(len, sampled_turns(rollout.tokens))) for rollout in rollouts]
    metrics = {
        "response_tokens": _mean(lengths),
        "longest_response": float(max(lengths, default=0)),
        "turns": _mean([rollout.turns for rollout in rollouts]),
        # What the curriculum cuts off is not the student's fault.
        "truncated": sum(rollout.truncated for rollout in whole) / max(1, len(rollouts)),
        "out_of_turns": _mean([r.stop_reason is StopReason.MAX_TURNS for r in rollouts]),
        "tool_errors": _mean([rollout.tool_errors for rollout in rollouts]),
        "repetition": repetition([t for r in rollouts for t in sampled_turns(r.tokens)]),
        "failed": 1 - len(rollouts) / max(1, len(sampled.ended)),
    }
    rewards = [rollout.reward for rollout in whole if rollout.reward is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    return (
        metrics
        | _rewards(played)
        | _curriculum(config, played, iteration)
        | _queue(config, sampled, iteration)
    )


def _rewards(played: Sequence[tuple[Trajectory, StudentRollout]]) -> dict[str, float]:
    """Returns each dataset's mean reward, where there are several."""
    rewards: dict[int, list[float]] = {}
    for rollout, how in played:
        if rollout.reward is not None and not how.is_prefix:
            rewards.setdefault(how.task.dataset, []).append(rollout.reward)
    if max(rewards, default=0) == 0:
        return {}
    return {f"reward/dataset_{dataset}": _mean(rewards[dataset]) for dataset in sorted(rewards)}


def _curriculum(
    config: TrainConfig, played: Sequence[tuple[Trajectory, StudentRollout]], iteration: int
) -> dict[str, float]:
    """Returns what the curriculum allowed and did, as far as one is asked for."""
    section, limits = config.curriculum, limits_of(config, iteration)
    metrics: dict[str, float] = {}
    if section.first_turns is not None:
        metrics["max_turns"] = limits.max_turns
    if section.prefix_tokens is not None:
        metrics["prefix_cut"] = _mean([how.is_prefix for _, how in played])
        if limits.prefix_tokens is not None:
            metrics["prefix_tokens"] = limits.prefix_tokens
    if section.teacher_share:
        num_turns = sum(rollout.turns for rollout, _ in played)
        taught = sum(
            index < rollout.turns for rollout, how in played for index in how.teacher_turns
        )
        metrics["teacher_share"] = limits.teacher_share
        metrics["teacher_turns"] = taught / max(1, num_turns)
    return metrics


def _queue(config: TrainConfig, sampled: IterationRollouts, iteration: int) -> dict[str, float]:
    if not config.rollout.max_staleness:
        return {}
    return {
        "staleness": _mean([iteration - one.how.iteration for one in sampled.ended]),
        "carried": float(len(sampled.carried)),
        "dropped": float(sampled.num_dropped),
    }


def sampled_turns(trace: TokenTrace | None) -> Iterator[list[int]]:
    """Yields the stretches of tokens that the student sampled, a turn each."""
    turn: list[int] = []
    for token, is_sampled in zip(trace.ids, trace.sampled, strict=True) if trace else ():
        if is_sampled:
            turn.append(token)
        elif turn:
            yield turn
            turn = []
    if turn:
        yield turn


def repetition(turns: Sequence[Sequence[int]]) -> float:
    """Returns the share of four-token stretches that stood in the same turn before."""
    seen = total = 0
    for turn in turns:
        grams = [tuple(turn[i : i + _NGRAM]) for i in range(len(turn) - _NGRAM + 1)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / max(1, total)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
