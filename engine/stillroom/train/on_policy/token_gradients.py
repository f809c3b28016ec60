"""The gradient of a loss of sampled tokens by hand: tile by tile, with few products of matrices.

Of a tile the student's and the teacher's logits are formed once, the losses are built on their
scores, and what the losses ask for goes back into the logits while these are at hand. The hidden
states' gradient, and the head's, are one more product each.
Shapes: N sampled tokens of a microbatch, n of a tile, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stillroom.models.batches import TokenBatch
from stillroom.models.cpu.divergence_gradients import (
    Divergence,
    buckets_gradient,
    jensen_shannon_gradient,
    reverse_kl_gradient,
)
from stillroom.models.divergence import bucket_logprobs, with_rest
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.scores import TeacherScores
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.on_policy.token_scores import TokenScores, told_tops
from stillroom.train.student.model import Student

Losses = Callable[[slice, TokenScores], Tensor]
"""The losses of some of the microbatch's tokens, as their gradient is wanted."""

# Numbers of one tile's logits; there are four buffers of this size.
_TILE_NUMBERS = 1 << 24


def can_form(student: Student, teacher: LocalTeacher | None) -> bool:
    """Whether both heads are plain matrices in main memory, over the same vocabulary."""
    matrix = student.head.matrix
    if student.root is not None or matrix is None:
        return False
    if teacher is None:
        return True
    theirs = teacher.head.matrix
    return theirs is not None and theirs.weight.shape[0] == matrix.weight.shape[0]


def add_gradient_with_teacher(
    student: Student,
    teacher: LocalTeacher,
    batch: TokenBatch,
    teacher_batch: TokenBatch,
    algorithm: AlgorithmSection,
    losses: Losses,
) -> None:
    """Adds the gradient of the losses' sum; the teacher runs in this process.

    teacher_batch: the same sequences, as the teacher runs them.
    """
    matrix = teacher.head.matrix
    if matrix is None:
        raise ValueError("the teacher's head is no matrix")
    with torch.no_grad():
        teacher_NH = teacher.head.batch_hidden(teacher_batch)

    def learn(part: slice, student_nV: Tensor) -> Tensor:
        teacher_nV = _normalised(matrix.logits(teacher_NH[part]))
        targets_n = batch.targets_N[part]
        teacher_n = _chosen(teacher_nV, targets_n)
        _normalised(student_nV)
        shares_nV = student_nV.exp()
        entropy_n = -_chosen(student_nV, targets_n)
        if algorithm.needs_logits:
            entropy_n = _entropy(student_nV, shares_nV)
        found = _divergence(student_nV, teacher_nV, shares_nV, algorithm)
        tile = _Tile(student_nV, shares_nV, targets_n, teacher_n, found, entropy_n)
        return tile.gradient(part, algorithm, losses)

    student.head.add_gradient(batch, learn, most=_most(student))


def add_gradient_as_told(
    student: Student,
    told: Sequence[TeacherScores],
    batch: TokenBatch,
    algorithm: AlgorithmSection,
    losses: Losses,
) -> None:
    """Adds the gradient of the losses' sum; a server told the teacher's scores."""
    device = student.loaded.device
    teacher_N = torch.tensor([x for scores in told for x in scores.logprobs], device=device)
    ids_NK, tops_NK = told_tops(told, algorithm, device)

    def learn(part: slice, student_nV: Tensor) -> Tensor:
        _normalised(student_nV)
        shares_nV = student_nV.exp()
        found = None
        if algorithm.loss_fn == "top_k_reverse_kl":
            found = buckets_gradient(student_nV, shares_nV, ids_NK[part], with_rest(tops_NK[part]))
        targets_n = batch.targets_N[part]
        entropy_n = -_chosen(student_nV, targets_n)
        tile = _Tile(student_nV, shares_nV, targets_n, teacher_N[part], found, entropy_n)
        return tile.gradient(part, algorithm, losses)

    student.head.add_gradient(batch, learn, most=_most(student))


class _Tile:
    """What is known of a tile's tokens."""

    def __init__(
        self,
        student_nV: Tensor,
        shares_nV: Tensor,
        targets_n: Tensor,
        teacher_n: Tensor,
        divergence: Divergence | None,
        entropy_n: Tensor,
    ) -> None:
        self._student_n = _chosen(student_nV, targets_n)
        self._shares_nV, self._targets_n = shares_nV, targets_n
        self._teacher_n, self._entropy_n = teacher_n, entropy_n
        self._divergence = divergence

    def gradient(self, part: slice, algorithm: AlgorithmSection, losses: Losses) -> Tensor:
        """Returns the gradient of the losses' sum with regard to the student's logits, [n, V]."""
        found = self._divergence
        value_n = torch.zeros_like(self._teacher_n) if found is None else found.value_n
        student_n, value_n = (
            numbers_n.detach().requires_grad_() for numbers_n in (self._student_n, value_n)
        )
        with torch.enable_grad():
            scores = TokenScores(student_n, self._teacher_n, value_n, self._entropy_n)
            losses(part, scores).sum().backward()
        of_token_n, of_divergence_n = student_n.grad, value_n.grad
        # A baseline's divergence has no gradient of its own.
        if found is None or of_divergence_n is None or algorithm.is_sampled_loss:
            gradient_nV = self._shares_nV
            gradient_nV.mul_(0.0 if of_token_n is None else -of_token_n[:, None])
        else:
            gradient_nV = found.gradient_nV.mul_(of_divergence_n[:, None])
            if of_token_n is not None:
                gradient_nV.addcmul_(self._shares_nV, of_token_n[:, None], value=-1.0)
        if of_token_n is not None:
            gradient_nV.scatter_add_(1, self._targets_n[:, None], of_token_n[:, None])
        return gradient_nV


def _divergence(
    student_nV: Tensor, teacher_nV: Tensor, shares_nV: Tensor, algorithm: AlgorithmSection
) -> Divergence | None:
    """Returns the divergence that the loss asks for, of log-probabilities."""
    if algorithm.loss_fn == "top_k_reverse_kl":
        k = min(algorithm.top_k, teacher_nV.shape[1])
        ids_nK = teacher_nV.topk(k, dim=-1).indices
        return buckets_gradient(student_nV, shares_nV, ids_nK, bucket_logprobs(teacher_nV, ids_nK))
    if not algorithm.needs_logits:
        return None
    if algorithm.loss_fn == "jsd":
        return jensen_shannon_gradient(student_nV, teacher_nV, shares_nV, beta=algorithm.jsd_beta)
    return reverse_kl_gradient(student_nV, teacher_nV, shares_nV)


def _normalised(logits_nV: Tensor) -> Tensor:
    """Returns log-probabilities in the logits' place."""
    return logits_nV.sub_(logits_nV.logsumexp(dim=-1, keepdim=True))


def _chosen(logprobs_nV: Tensor, targets_n: Tensor) -> Tensor:
    return logprobs_nV.gather(1, targets_n[:, None])[:, 0]


def _entropy(logprobs_nV: Tensor, shares_nV: Tensor) -> Tensor:
    entropy_n = -torch.linalg.vecdot(shares_nV, logprobs_nV)
    if torch.isfinite(entropy_n).all():
        return entropy_n
    return -torch.where(shares_nV > 0, shares_nV * logprobs_nV, 0.0).sum(dim=-1)


def _most(student: Student) -> int:
    matrix = student.head.matrix
    return max(1, _TILE_NUMBERS // (matrix.weight.shape[0] if matrix is not None else 1))
