"""Divergences of a tile's tokens with their gradients, formed by hand while the logits are at hand.

As in divergence.py, without autograd and with few buffers as large as the vocabulary. For any
divergence D of the student's probabilities p the gradient with regard to the student's logits is
p (g - E[g]), where g is dD/dp and the mean is over p.
Shapes: n tokens of a tile, V vocabulary, K tokens of the teacher's, B of these and a bucket.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.models.divergence import bucket_logprobs


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of each token, and its gradient with regard to the student's logits."""

    value_n: Tensor
    gradient_nV: Tensor


def reverse_kl_gradient(student_nV: Tensor, teacher_nV: Tensor, shares_nV: Tensor) -> Divergence:
    """Returns KL(student || teacher). Overwrites `teacher_nV`.

    student_nV, teacher_nV: log-probabilities; shares_nV: the student's probabilities.
    """
    gaps_nV = torch.sub(student_nV, teacher_nV, out=teacher_nV)
    value_n = _mean(gaps_nV, shares_nV)
    return Divergence(value_n, gaps_nV.sub_(value_n[:, None]).mul_(shares_nV))


def jensen_shannon_gradient(
    student_nV: Tensor, teacher_nV: Tensor, shares_nV: Tensor, *, beta: float
) -> Divergence:
    """Returns the generalised Jensen-Shannon divergence. Overwrites `teacher_nV`.

    Source: see divergence.jensen_shannon_of; the mixture's own terms cancel in its gradient.
    """
    if beta == 1:
        return reverse_kl_gradient(student_nV, teacher_nV, shares_nV)
    theirs_nV = teacher_nV.exp()
    if beta == 0:
        value_n = _mean(teacher_nV.sub_(student_nV), theirs_nV)
        return Divergence(value_n, torch.sub(shares_nV, theirs_nV, out=theirs_nV))
    mixture_nV = torch.logaddexp(teacher_nV + math.log(beta), student_nV + math.log1p(-beta))
    of_teacher_n = _mean(teacher_nV.sub_(mixture_nV), theirs_nV)
    gaps_nV = torch.sub(student_nV, mixture_nV, out=mixture_nV)
    of_student_n = _mean(gaps_nV, shares_nV)
    gradient_nV = gaps_nV.sub_(of_student_n[:, None]).mul_(shares_nV).mul_(1 - beta)
    return Divergence(beta * of_teacher_n + (1 - beta) * of_student_n, gradient_nV)


def buckets_gradient(
    student_nV: Tensor, shares_nV: Tensor, ids_nK: Tensor, teacher_nB: Tensor
) -> Divergence:
    """Returns KL(student || teacher) over K tokens and, if there are others, a bucket of these.

    teacher_nB: the teacher's log-probabilities of the K tokens and of the bucket.
    """
    student_nB = bucket_logprobs(student_nV, ids_nK)
    shares_nB = student_nB.exp()
    # where: what the student never takes costs nothing, however little the teacher gives it.
    gaps_nB = torch.where(shares_nB > 0, student_nB - teacher_nB, 0.0)
    value_n = (shares_nB * gaps_nB).sum(-1)
    slopes_nB = gaps_nB - value_n[:, None]
    num = ids_nK.shape[1]
    # Where the K tokens are the vocabulary there is no bucket, and all of this is overwritten.
    gradient_nV = shares_nV * slopes_nB[:, -1:]
    gradient_nV.scatter_(1, ids_nK, (shares_nB * slopes_nB)[:, :num])
    return Divergence(value_n, gradient_nV)


def _mean(values_nV: Tensor, shares_nV: Tensor) -> Tensor:
    """Returns each row's mean; values without a share count nothing, and become 0 if need be."""
    mean_n = torch.linalg.vecdot(shares_nV, values_nV)
    if torch.isfinite(mean_n).all():
        return mean_n
    values_nV.masked_fill_(shares_nV == 0, 0.0)
    return torch.linalg.vecdot(shares_nV, values_nV)
