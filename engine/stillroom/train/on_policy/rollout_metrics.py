"""The metrics of an iteration's rollouts: lengths, endings, repetition, rewards, curriculum."""

import math
from collections.abc import Sequence

from stillroom.models.reread.rereading import sampled_spans
from stillroom.rollout.episode.collect import FailedRollout
from stillroom.train.config.schema import DistillConfig
from stillroom.train.on_policy.student_policy import StudentRollout, limits_at
from stillroom.train.on_policy.student_rollouts import IterationRollouts
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.types import StopReason, TokenTrace, Trajectory

_NGRAM = 4


def rollout_metrics(
    config: DistillConfig, sampled: IterationRollouts, iteration: int
) -> dict[str, float]:
    """Returns the metrics of an iteration's rollouts; all but `failed` exclude failed ones."""
    ended = [
        (one.outcome, one.rollout)
        for one in sampled.ended
        if not isinstance(one.outcome, FailedRollout)
    ]
    trajectories = [trajectory for trajectory, _ in ended]
    # A rollout cut off by the curriculum is not the student's fault, and has no reward.
    uncut = [trajectory for trajectory, rollout in ended if not rollout.is_prefix_cut]
    lengths = [sum(map(len, _sampled_turns(one.tokens))) for one in trajectories]
    metrics = {
        "response_tokens": _mean(lengths),
        "longest_response": float(max(lengths, default=0)),
        "turns": _mean([one.turns for one in trajectories]),
        "truncated": sum(one.truncated for one in uncut) / max(1, len(trajectories)),
        "out_of_turns": _mean([one.stop_reason is StopReason.MAX_TURNS for one in trajectories]),
        "tool_errors": _mean([one.tool_errors for one in trajectories]),
        "repetition": repetition([t for r in trajectories for t in _sampled_turns(r.tokens)]),
        "failed": 1 - len(trajectories) / max(1, len(sampled.ended)),
    }
    if _has_own_prompts(config) or any(one.is_left_out for one in sampled.ended):
        metrics["left_out"] = _mean([one.is_left_out for one in sampled.ended])
    rewards = [one.reward for one in uncut if one.reward is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    return (
        metrics
        | _dataset_rewards(ended)
        | _curriculum_metrics(config, ended, iteration)
        | _staleness_metrics(config, sampled, iteration)
    )


def _has_own_prompts(config: DistillConfig) -> bool:
    """Returns whether student and teacher may have different prompts."""
    teacher = config.teacher
    texts = (config.model.system, teacher.system, teacher.context_file)
    return any(text is not None for text in texts)


def cross_tokenizer_metrics(sequences: Sequence[TrainingSequence]) -> dict[str, float]:
    """Returns the shares of text and tokens compared with a teacher of another tokenizer.

    For a served teacher, also the mean probability outside its listed tokens. {} if all teachers
    score the student's own tokens.
    """
    readings = [one.reading for one in sequences if one.reading is not None]
    if not readings:
        return {}
    num_tokens = sum(one.tokens.num_trained for one in sequences if one.reading is not None)
    metrics = {
        "byte_share": sum(one.num_compared_bytes for one in readings)
        / max(1, sum(one.num_bytes for one in readings)),
        "not_compared": sum(one.num_uncompared_tokens for one in readings) / max(1, num_tokens),
        "teacher_tokens": sum(one.tokens.num_trained for one in readings) / max(1, num_tokens),
    }
    tails = [
        max(0.0, 1 - sum(map(math.exp, logprobs)))
        for one in sequences
        if one.reading is not None and one.teacher is not None
        for logprobs in one.teacher.top_logprobs or []
    ]
    return metrics | ({"teacher_tail": _mean(tails)} if tails else {})


def _dataset_rewards(ended: Sequence[tuple[Trajectory, StudentRollout]]) -> dict[str, float]:
    """Returns the mean reward of each dataset, if there are several."""
    rewards: dict[int, list[float]] = {}
    for trajectory, rollout in ended:
        if trajectory.reward is not None and not rollout.is_prefix_cut:
            rewards.setdefault(rollout.task.dataset, []).append(trajectory.reward)
    if max(rewards, default=0) == 0:
        return {}
    return {f"reward/dataset_{dataset}": _mean(rewards[dataset]) for dataset in sorted(rewards)}


def _curriculum_metrics(
    config: DistillConfig, ended: Sequence[tuple[Trajectory, StudentRollout]], iteration: int
) -> dict[str, float]:
    """Returns the curriculum's limits and their effect; {} without a curriculum."""
    section, limits = config.curriculum, limits_at(config, iteration)
    metrics: dict[str, float] = {}
    if section.first_turns is not None:
        metrics["max_turns"] = limits.max_turns
    if section.prefix_tokens is not None:
        metrics["prefix_cut"] = _mean([rollout.is_prefix_cut for _, rollout in ended])
        if limits.prefix_tokens is not None:
            metrics["prefix_tokens"] = limits.prefix_tokens
    if section.teacher_share:
        num_turns = sum(trajectory.turns for trajectory, _ in ended)
        num_teacher_turns = sum(
            index < trajectory.turns
            for trajectory, rollout in ended
            for index in rollout.teacher_turns
        )
        metrics["teacher_share"] = limits.teacher_share
        metrics["teacher_turns"] = num_teacher_turns / max(1, num_turns)
    return metrics


def _staleness_metrics(
    config: DistillConfig, sampled: IterationRollouts, iteration: int
) -> dict[str, float]:
    if not config.rollout.max_staleness:
        return {}
    return {
        "staleness": _mean([iteration - one.rollout.iteration for one in sampled.ended]),
        "carried": float(len(sampled.carried)),
        "dropped": float(sampled.num_dropped),
    }


def _sampled_turns(trace: TokenTrace | None) -> list[list[int]]:
    """Returns the tokens of each turn that the student sampled."""
    return [trace.ids[start:end] for start, end in sampled_spans(trace)] if trace else []


def repetition(turns: Sequence[Sequence[int]]) -> float:
    """Returns the share of 4-grams of tokens that already occurred in the same turn."""
    num_repeated = total = 0
    for turn in turns:
        grams = [tuple(turn[i : i + _NGRAM]) for i in range(len(turn) - _NGRAM + 1)]
        total += len(grams)
        num_repeated += len(grams) - len(set(grams))
    return num_repeated / max(1, total)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
