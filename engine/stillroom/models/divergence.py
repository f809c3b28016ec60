"""Divergences between two models' next-token distributions.

Shapes: N positions, V vocabulary (of the larger model where they differ by padding), K tokens that
the teacher finds likeliest. Everything is in nats; gradients flow into the student's numbers only.
"""

import math

import torch
from torch import Tensor

# Rounded, K tokens may seem to leave nothing: what the student gives the others would cost it all.
_LEAST_REST = 1e-7


def full_reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Returns KL(student || teacher) at each position over the whole vocabulary, [N].

    student_NV, teacher_NV: logits. Columns that only one of them has are padding of its vocabulary
    and are left out.
    """
    return reverse_kl_of(*shared_logprobs(student_NV, teacher_NV))


def shared_logprobs(student_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both models' log-probabilities over the columns that both have."""
    shared = min(student_NV.shape[1], teacher_NV.shape[1])
    student_NV, teacher_NV = student_NV[:, :shared], teacher_NV[:, :shared]
    return torch.log_softmax(student_NV, dim=-1), torch.log_softmax(teacher_NV, dim=-1)


def reverse_kl_of(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Returns KL(student || teacher) at each position, [N], of log-probabilities."""
    probabilities_NV = student_NV.exp()
    # where, not multiply alone: 0 * (-inf - -inf) is nan.
    terms_NV = torch.where(probabilities_NV > 0, probabilities_NV * (student_NV - teacher_NV), 0.0)
    return terms_NV.sum(dim=-1)


def jensen_shannon_of(student_NV: Tensor, teacher_NV: Tensor, *, beta: float) -> Tensor:
    """Returns the generalised Jensen-Shannon divergence of log-probabilities, [N].

    β KL(teacher || M) + (1 - β) KL(student || M) with M = β teacher + (1 - β) student. Divided by
    β it nears KL(teacher || student) as β nears 0, and divided by 1 - β KL(student || teacher) as β
    nears 1; β = 0 and β = 1 are these two.
    Source: Agarwal et al. 2023 (arXiv 2306.13649), eq. 1.
    """
    if beta == 0:
        return reverse_kl_of(teacher_NV, student_NV)
    if beta == 1:
        return reverse_kl_of(student_NV, teacher_NV)
    mixture_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
    of_teacher_N = reverse_kl_of(teacher_NV, mixture_NV)
    return beta * of_teacher_N + (1 - beta) * reverse_kl_of(student_NV, mixture_NV)


def entropy_of(logprobs_NV: Tensor) -> Tensor:
    """Returns the entropy at each position, [N]."""
    probabilities_NV = logprobs_NV.exp()
    return -torch.where(probabilities_NV > 0, probabilities_NV * logprobs_NV, 0.0).sum(dim=-1)


def bucket_logprobs(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Returns the log-probabilities of K tokens and, last, of all others together, [N, K + 1].

    Without the last where K tokens are the whole vocabulary.
    """
    norms_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    tokens_NK = logits_NV.gather(1, ids_NK) - norms_N1
    if ids_NK.shape[1] == logits_NV.shape[1]:
        return tokens_NK
    # Not 1 - the others' sum: near 0 that has neither digits nor a gradient.
    others_NV = logits_NV.scatter(1, ids_NK, -math.inf)
    others_N1 = torch.logsumexp(others_NV, dim=-1, keepdim=True) - norms_N1
    return torch.cat([tokens_NK, others_N1], dim=1)


def with_rest(logprobs_NK: Tensor) -> Tensor:
    """Returns K tokens' log-probabilities as they were told, and what they leave, [N, K + 1]."""
    left_N1 = 1 - logprobs_NK.double().exp().sum(dim=-1, keepdim=True)
    rest_N1 = left_N1.clamp_min(_LEAST_REST).log().to(logprobs_NK.dtype)
    return torch.cat([logprobs_NK, rest_N1], dim=1)


def top_k_reverse_kl(student_NV: Tensor, teacher_NV: Tensor, *, k: int) -> Tensor:
    """Returns KL(student || teacher) over the teacher's k likeliest tokens and a bucket, [N].

    student_NV, teacher_NV: logits; columns that only one has are left out. The bucket holds all
    other tokens, so no mass is out of sight: it is 0 only if the student gives these tokens the
    teacher's probabilities, and never more than the divergence over the whole vocabulary.
    Source: arXiv 2603.25562 (the teacher's top k, since of its own the student could leave them).
    """
    shared = min(student_NV.shape[1], teacher_NV.shape[1])
    teacher_NV = teacher_NV[:, :shared]
    ids_NK = teacher_NV.topk(min(k, shared), dim=-1).indices
    student_NB = bucket_logprobs(student_NV[:, :shared], ids_NK)
    return reverse_kl_of(student_NB, bucket_logprobs(teacher_NV, ids_NK))
