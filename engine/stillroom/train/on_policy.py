"""On-policy distillation: the student answers, the teacher scores every token, the student learns.

Each iteration samples rollouts from the student as it is now, with tools; the update lowers the
reverse KL to the teacher on exactly the tokens that were sampled.

Shapes: N sampled tokens of a microbatch, H hidden size, V vocabulary.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import torch
from torch import Tensor

from stillroom.data.formats import Task
from stillroom.errors import DataError, EngineError, RunError
from stillroom.models.batches import (
    TokenBatch,
    TokenSequence,
    collate,
    microbatches,
    sampled_sequence,
)
from stillroom.models.divergence import full_reverse_kl
from stillroom.models.heads import OutputHead, in_tiles, token_logprobs
from stillroom.policy.hf import HFPolicy
from stillroom.rollout.arena import check_tools, open_user_pool
from stillroom.rollout.collect import (
    Arena,
    FailedRollout,
    Outcome,
    RolloutSpec,
    collect_rollouts,
    key_of,
)
from stillroom.rollout.loop import nudge_for
from stillroom.rollout.records import RolloutKey
from stillroom.rollout.rewards import Rewarder
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.tools.user_pool import UserPool
from stillroom.train.config import AlgorithmSection, TrainConfig
from stillroom.train.losses import (
    importance_sampling_losses,
    ppo_losses,
    reverse_kl_advantages,
)
from stillroom.train.optimizer import Optimizer, StepInfo
from stillroom.train.session import Session, TrainResult, epoch_order
from stillroom.train.student import Student
from stillroom.types import SamplingSettings, StopReason, TeacherRecord, Trajectory

# Iterations' sampling seeds must not meet those of other training seeds.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One rollout of the student as tokens, with the log-probabilities it was sampled with."""

    tokens: TokenSequence
    sampler_logprobs: list[float]
    """Of the sampled tokens only, in order (nats)."""


@dataclass(slots=True)
class UpdateStats:
    """Sums over the tokens of one iteration's update."""

    loss: float = 0.0
    teacher_kl: float = 0.0
    logprob_gap: float = 0.0
    """|trainer - sampler| log-probability of tokens seen before the first optimiser step."""
    num_tokens: int = 0
    num_fresh_tokens: int = 0
    steps: list[StepInfo] = field(default_factory=list[StepInfo])


async def train_on_policy(
    session: Session,
    tasks: Sequence[Task],
    teacher: LocalTeacher,
    *,
    tools_file: Path | None,
    rewards_file: Path | None,
) -> TrainResult:
    """Trains for the configured iterations and returns the result with the final checkpoint."""
    config = session.config
    prompts = _prompt_batches(tasks, config)
    algorithm = config.algorithm
    optimizer = Optimizer(
        session.student.trainable(), config.trainer, total_steps=len(prompts) * algorithm.substeps
    )
    session.begin(optimizer, substeps=algorithm.substeps)
    async with AsyncExitStack() as stack:
        pool = await open_user_pool(
            stack,
            tools_file=tools_file,
            rewards_file=rewards_file,
            tool_timeout_s=config.rollout.tool_timeout,
            reward_timeout_s=config.rollout.reward_timeout,
        )
        check_tools(tasks, pool)
        rewarder = Rewarder(pool)
        rewarder.check(tasks, is_judge_optional=True)
        for iteration in range(session.step, len(prompts)):
            chosen = prompts[iteration]
            clock = time.monotonic()
            outcomes = await _sample(session, chosen, pool, rewarder, iteration)
            sampled_s, clock = time.monotonic() - clock, time.monotonic()
            metrics = await _learn(session, outcomes, teacher, optimizer, iteration)
            metrics |= {"sample_s": sampled_s, "update_s": time.monotonic() - clock}
            session.after_step(iteration + 1, len(prompts), metrics)
    num_prompts = min(len(tasks), sum(map(len, prompts)))
    return session.finish(len(prompts), rows=num_prompts, skipped={})


async def _learn(
    session: Session,
    outcomes: Sequence[Outcome],
    teacher: LocalTeacher,
    optimizer: Optimizer,
    iteration: int,
) -> dict[str, float]:
    """Updates the student on an iteration's rollouts and returns its metrics."""
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    sequences = sequences_of(rollouts)
    if not sequences:
        raise _nothing_sampled(outcomes, iteration)
    stats = await anyio.to_thread.run_sync(
        _update, session.student, teacher, sequences, optimizer, session.config, iteration
    )
    session.trained_tokens += stats.num_tokens
    failed = (len(outcomes) - len(rollouts)) / len(outcomes)
    return {**_metrics(rollouts, stats), "failed": failed}


def _prompt_batches(tasks: Sequence[Task], config: TrainConfig) -> list[list[Task]]:
    """Returns the prompts of each iteration; a batch may reach into the next epoch."""
    size, seed = config.data.batch_size, config.trainer.seed
    stream = [
        tasks[index]
        for epoch in range(config.trainer.num_epochs)
        for index in epoch_order(len(tasks), epoch, seed)
    ]
    batches = [stream[start : start + size] for start in range(0, len(stream), size)]
    return batches[: config.trainer.max_steps]


async def _sample(
    session: Session,
    tasks: Sequence[Task],
    pool: UserPool | None,
    rewarder: Rewarder,
    iteration: int,
) -> list[Outcome]:
    """Returns what became of the student's rollouts of the tasks, in the order of the tasks."""
    config, student = session.config, session.student
    sampling = SamplingSettings(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=config.trainer.seed * _SEED_STRIDE + iteration,
    )
    group = config.data.group_size
    specs = [RolloutSpec(t, i * group + g) for i, t in enumerate(tasks) for g in range(group)]
    done: dict[RolloutKey, Outcome] = {}

    async def keep(outcome: Outcome) -> None:
        done[key_of(outcome)] = outcome
        session.stop_before_update(iteration)

    student.module.eval()
    policy = HFPolicy(
        student.loaded,
        sampling,
        max_rows=min(config.rollout.concurrency, len(specs)),
        max_context=config.rollout.max_context_window,
        include_thinking=config.rollout.include_thinking,
    )
    teacher = TeacherRecord(provider="student", model=config.model.path, settings=sampling)
    async with policy:
        nudge = nudge_for(config.rollout.termination_policy, config.rollout.nudge)
        arena = Arena(
            policy,
            teacher,
            pool,
            rewarder,
            config.rollout.max_turns,
            nudge,
            timeout_s=config.rollout.rollout_timeout,
        )
        await collect_rollouts(
            specs, arena, concurrency=config.rollout.concurrency, on_outcome=keep
        )
    return [done[spec.key] for spec in specs]


def _nothing_sampled(outcomes: Sequence[Outcome], iteration: int) -> EngineError:
    """Returns the error of an iteration that has nothing to learn from."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    if failed:
        return RunError(
            f"every rollout of iteration {iteration + 1} failed, the first with: "
            f"{failed[0].failure.message}",
            "mend tools.py or rewards.py, then start again",
        )
    return DataError(
        f"no rollout of iteration {iteration + 1} holds a sampled token: the prompts fill the "
        "context",
        "shorten the prompts, or raise rollout.max_context_window",
    )


def sequences_of(rollouts: Sequence[Trajectory]) -> list[SampledSequence]:
    """Returns the rollouts' exact tokens; one in which nothing was sampled teaches nothing."""
    sequences: list[SampledSequence] = []
    for rollout in rollouts:
        trace = rollout.tokens
        if trace is None or not any(trace.sampled):
            continue
        marked = zip(trace.sampled, trace.logprobs, strict=True)
        logprobs = [logprob for is_sampled, logprob in marked if is_sampled]
        sequences.append(SampledSequence(sampled_sequence(trace), logprobs))
    return sequences


def _update(
    student: Student,
    teacher: LocalTeacher,
    sequences: Sequence[SampledSequence],
    optimizer: Optimizer,
    config: TrainConfig,
    iteration: int,
) -> UpdateStats:
    """Takes the iteration's optimiser steps, each on its share of the rollouts."""
    stats = UpdateStats()
    # Not train(): with dropout the trainer's probabilities would not be the sampler's.
    student.module.eval()
    order = epoch_order(len(sequences), iteration, config.trainer.seed + 1)
    num_steps = config.algorithm.substeps
    shares = [order[i::num_steps] for i in range(num_steps)]
    for share in shares:
        chosen = [sequences[i] for i in share]
        accumulate_reverse_kl(student, teacher, chosen, config.algorithm, stats)
        # Also with an empty share, so that the schedule goes on as planned.
        stats.steps.append(optimizer.step())
    return stats


def accumulate_reverse_kl(
    student: Student,
    teacher: LocalTeacher,
    sequences: Sequence[SampledSequence],
    algorithm: AlgorithmSection,
    stats: UpdateStats,
) -> None:
    """Adds the gradient of the mean token loss of one optimiser step's rollouts."""
    num_tokens = sum(sequence.tokens.num_trained for sequence in sequences)
    lengths = [len(sequence.tokens.ids) for sequence in sequences]
    for group in microbatches(lengths, max_tokens=student.max_microbatch_tokens):
        members = [sequences[i] for i in group]
        batch = collate([member.tokens for member in members], device=student.loaded.device)
        sampler_N = torch.tensor(
            [logprob for member in members for logprob in member.sampler_logprobs],
            device=student.loaded.device,
        )
        scores = _score(student, teacher, batch, is_full=algorithm.loss_fn == "full_reverse_kl")
        losses_N = _token_losses(scores, sampler_N, algorithm, stats)
        loss = losses_N.sum() / num_tokens
        loss.backward()
        stats.loss += losses_N.sum().item()
        stats.num_tokens += batch.num_trained


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What student and teacher say of each sampled token."""

    student_N: Tensor
    """Its log-probability (nats), with gradient."""
    teacher_N: Tensor
    divergence_N: Tensor
    """Reverse KL over the whole vocabulary, with gradient; zeros unless asked for."""


def _score(
    student: Student, teacher: LocalTeacher, batch: TokenBatch, *, is_full: bool
) -> TokenScores:
    """Returns the scores; neither model's logits are held for all tokens at once."""
    teacher_head = OutputHead(teacher.loaded.model)

    def score(student_NH: Tensor, teacher_NH: Tensor, targets_N: Tensor) -> Tensor:
        with student.autocast():
            student_NV = student.head.logits(student_NH)
        with torch.no_grad():
            teacher_NV = teacher_head.logits(teacher_NH)
        student_N = token_logprobs(student_NV, targets_N)
        teacher_N = token_logprobs(teacher_NV, targets_N)
        divergence_N = (
            full_reverse_kl(student_NV, teacher_NV) if is_full else teacher_N.new_zeros(1)
        )
        return torch.stack([student_N, teacher_N, divergence_N.expand_as(student_N)], dim=1)

    with student.autocast():
        student_NH = student.head.batch_hidden(batch)
    with torch.no_grad():
        teacher_NH = teacher_head.batch_hidden(batch)
    most = min(student.head.max_positions, teacher_head.max_positions)
    scores_N3 = in_tiles(score, student_NH, teacher_NH, batch.targets_N, most=most)
    return TokenScores(scores_N3[:, 0], scores_N3[:, 1].detach(), scores_N3[:, 2])


def _token_losses(
    scores: TokenScores, sampler_N: Tensor, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the loss of each sampled token and adds to the statistics."""
    student_N, teacher_N = scores.student_N, scores.teacher_N
    stats.teacher_kl += (sampler_N - teacher_N).sum().item()
    if not stats.steps:
        stats.logprob_gap += (student_N.detach() - sampler_N).abs().sum().item()
        stats.num_fresh_tokens += len(sampler_N)
    if algorithm.loss_fn == "full_reverse_kl":
        return scores.divergence_N
    advantages_N = reverse_kl_advantages(sampler_N, teacher_N, coef=algorithm.kl_penalty_coef)
    if algorithm.loss_fn == "ppo":
        return ppo_losses(student_N, sampler_N, advantages_N, clip_ratio=algorithm.clip_ratio)
    return importance_sampling_losses(student_N, sampler_N, advantages_N)


def _metrics(rollouts: Sequence[Trajectory], stats: UpdateStats) -> dict[str, float]:
    num, tokens = max(1, len(rollouts)), max(1, stats.num_tokens)
    metrics = {
        "teacher_kl": stats.teacher_kl / tokens,
        "loss": stats.loss / tokens,
        "logprob_gap": stats.logprob_gap / max(1, stats.num_fresh_tokens),
        "response_tokens": stats.num_tokens / num,
        "turns": sum(rollout.turns for rollout in rollouts) / num,
        "truncated": sum(rollout.truncated for rollout in rollouts) / num,
        "out_of_turns": sum(r.stop_reason is StopReason.MAX_TURNS for r in rollouts) / num,
        "tool_errors": sum(rollout.tool_errors for rollout in rollouts) / num,
        "grad_norm": stats.steps[-1].grad_norm,
        "learning_rate": stats.steps[-1].learning_rate,
    }
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    return metrics
