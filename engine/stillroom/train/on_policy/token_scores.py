"""What student and teacher say of each sampled token, as far as the loss asks.

Shapes: N sampled tokens of a microbatch, H hidden size, V vocabulary, K tokens that the teacher
finds likeliest, C numbers of each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.errors import TeacherError
from stillroom.models.batches import TokenBatch
from stillroom.models.divergence import (
    bucket_logprobs,
    entropy_of,
    jensen_shannon_of,
    reverse_kl_of,
    shared_logprobs,
    top_k_reverse_kl,
    with_rest,
)
from stillroom.models.heads import in_tiles, token_logprobs
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.scores import TeacherScores
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.student.model import Student


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of each sampled token."""

    student_N: Tensor
    """Its log-probability (nats), with gradient."""
    teacher_N: Tensor
    divergence_N: Tensor
    """The loss's divergence, with gradient; of a baseline without; zeros if it has neither."""
    entropy_N: Tensor
    """The student's, without gradient: exact if the loss sees the whole vocabulary, else -log p."""


def score_with_teacher(
    student: Student,
    teacher: LocalTeacher,
    batch: TokenBatch,
    teacher_batch: TokenBatch,
    algorithm: AlgorithmSection,
) -> TokenScores:
    """Returns the scores; neither model's logits are held for all tokens at once.

    teacher_batch: the same sequences, as the teacher runs them.
    """
    teacher_head = teacher.head

    def score(student_NH: Tensor, teacher_NH: Tensor, targets_N: Tensor) -> Tensor:
        with student.autocast():
            student_NV = student.head.logits(student_NH)
        with torch.no_grad():
            teacher_NV = teacher_head.logits(teacher_NH)
        student_N = token_logprobs(student_NV, targets_N)
        teacher_N = token_logprobs(teacher_NV, targets_N)
        divergence_N, entropy_N = _divergence(student_NV, teacher_NV, student_N, algorithm)
        return torch.stack([student_N, teacher_N, divergence_N, entropy_N], dim=1)

    with student.autocast():
        student_NH = student.head.batch_hidden(batch)
    with torch.no_grad():
        teacher_NH = teacher_head.batch_hidden(teacher_batch)
    most = min(student.head.max_positions, teacher_head.max_positions)
    return _scores(in_tiles(score, student_NH, teacher_NH, batch.targets_N, most=most))


def score_as_told(
    student: Student, told: Sequence[TeacherScores], batch: TokenBatch, algorithm: AlgorithmSection
) -> TokenScores:
    """Returns the scores, those of the teacher as a server told them for each sequence."""
    device = student.loaded.device
    teacher_N = torch.tensor([x for scores in told for x in scores.logprobs], device=device)
    ids_NK, tops_NK = told_tops(told, algorithm, device)

    def score(
        student_NH: Tensor, targets_N: Tensor, teacher_N: Tensor, ids_NK: Tensor, tops_NK: Tensor
    ) -> Tensor:
        with student.autocast():
            student_NV = student.head.logits(student_NH)
        student_N = token_logprobs(student_NV, targets_N)
        divergence_N = torch.zeros_like(teacher_N)
        if algorithm.loss_fn == "top_k_reverse_kl":
            student_NB = bucket_logprobs(student_NV, ids_NK)
            divergence_N = reverse_kl_of(student_NB, with_rest(tops_NK))
        return torch.stack([student_N, teacher_N, divergence_N, -student_N.detach()], dim=1)

    with student.autocast():
        student_NH = student.head.batch_hidden(batch)
    given = (student_NH, batch.targets_N, teacher_N, ids_NK, tops_NK)
    return _scores(in_tiles(score, *given, most=student.head.max_positions))


def _divergence(
    student_NV: Tensor, teacher_NV: Tensor, student_N: Tensor, algorithm: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Returns the divergence that the loss asks for, and the student's entropy."""
    told_N = -student_N.detach()
    if algorithm.loss_fn == "top_k_reverse_kl":
        return top_k_reverse_kl(student_NV, teacher_NV, k=algorithm.top_k), told_N
    if not algorithm.needs_logits:
        return torch.zeros_like(told_N), told_N
    if algorithm.is_sampled_loss:
        # A baseline.
        student_NV = student_NV.detach()
    student_NV, teacher_NV = shared_logprobs(student_NV, teacher_NV)
    if algorithm.loss_fn == "jsd":
        divergence_N = jensen_shannon_of(student_NV, teacher_NV, beta=algorithm.jsd_beta)
    else:
        divergence_N = reverse_kl_of(student_NV, teacher_NV)
    return divergence_N, entropy_of(student_NV.detach())


def told_tops(
    told: Sequence[TeacherScores], algorithm: AlgorithmSection, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the served teacher's likeliest tokens and their log-probabilities, both [N, K]."""
    k = algorithm.top_k if algorithm.loss_fn == "top_k_reverse_kl" else 0
    ids = [row[:k] for scores in told for row in scores.top_ids or []]
    logprobs = [row[:k] for scores in told for row in scores.top_logprobs or []]
    num_tokens = sum(len(scores.logprobs) for scores in told)
    if k == 0:
        ids, logprobs = [[]] * num_tokens, [[]] * num_tokens
    elif len(ids) != num_tokens or any(len(row) < k for row in (*ids, *logprobs)):
        raise TeacherError(
            f"the teacher's server did not tell its {k} likeliest tokens at every position",
            "let it tell as many (vLLM: --max-logprobs), or lower algorithm.top_k",
        )
    ids_NK = torch.tensor(ids, dtype=torch.int64, device=device).reshape(num_tokens, k)
    tops_NK = torch.tensor(logprobs, dtype=torch.float32, device=device).reshape(num_tokens, k)
    return ids_NK, tops_NK


def _scores(numbers_NC: Tensor) -> TokenScores:
    student_N, teacher_N, divergence_N, entropy_N = numbers_NC.unbind(dim=1)
    return TokenScores(student_N, teacher_N.detach(), divergence_N, entropy_N.detach())
