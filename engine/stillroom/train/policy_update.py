"""What one iteration of on-policy distillation teaches: the teacher scores, the student moves.

Shapes: N sampled tokens of a microbatch, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stillroom.models.batches import TokenBatch, collate, microbatches
from stillroom.models.divergence import full_reverse_kl
from stillroom.models.heads import OutputHead, in_tiles, token_logprobs
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config import AlgorithmSection, TrainConfig
from stillroom.train.losses import (
    importance_sampling_losses,
    ppo_losses,
    reverse_kl_advantages,
)
from stillroom.train.optimizer import Optimizer, StepInfo
from stillroom.train.session import epoch_order
from stillroom.train.student import Student
from stillroom.train.student_rollouts import SampledSequence


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


def update_student(
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
