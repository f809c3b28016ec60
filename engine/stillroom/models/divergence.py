"""Divergences between two models' next-token distributions, each with its gradient in closed form.

Each divergence is written once. On the CPU the output head uses its gradient directly
(models/cpu); elsewhere `differentiable` passes it to autograd, which on its own would keep
several buffers as large as the vocabulary.

For any divergence D of the student's probabilities p, the gradient with respect to the student's
logits is p (g - E[g]), where g is dD/dp and the expectation is over p.
Shapes: N positions, V vocabulary (the columns that both models have), K most likely tokens of the
teacher, B = K + 1 with a bucket that holds all other tokens (B = K if there are none).
Everything is in nats. Log-probabilities and probabilities are given without gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stillroom.models.placement import to_float64

# Rounded probabilities of the K tokens may add up to 1. A bucket of probability 0 would make the
# divergence infinite as soon as the student gives any other token a probability.
_MIN_BUCKET = 1e-7


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence at each position, with a function that computes its gradient."""

    value_N: Tensor
    compute_gradient: Callable[[], Tensor]
    """Returns the gradient with respect to the student's logits, [N, V]; call it at most once,
    since it overwrites the buffers of the value."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Student and teacher scores of each sampled token, the input of losses."""

    student_N: Tensor
    """The student's log-probability (nats), with gradient."""
    teacher_N: Tensor
    """The teacher's log-probability (nats), without gradient."""
    divergence_N: Tensor
    """The divergence in the loss (with gradient) or its baseline (without), or zeros."""
    entropy_N: Tensor
    """The student's entropy, without gradient: exact if the loss uses the whole vocabulary, else
    the negative log-probability of the token."""


def shared_logprobs(student_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both models' log-probabilities, from logits, over the columns that both have.

    Columns of only one model are padding of its vocabulary.
    """
    shared = min(student_NV.shape[1], teacher_NV.shape[1])
    student_NV, teacher_NV = student_NV[:, :shared], teacher_NV[:, :shared]
    return torch.log_softmax(student_NV, dim=-1), torch.log_softmax(teacher_NV, dim=-1)


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor, probabilities_NV: Tensor) -> Divergence:
    """Returns KL(student || teacher). Overwrites `teacher_NV`.

    student_NV, teacher_NV: log-probabilities. probabilities_NV: the student's probabilities.
    """
    value_N, gaps_NV = _kl(probabilities_NV, student_NV, teacher_NV, out=teacher_NV)
    return Divergence(value_N, lambda: _centred(gaps_NV, value_N, probabilities_NV))


def jensen_shannon(
    student_NV: Tensor, teacher_NV: Tensor, probabilities_NV: Tensor, *, beta: float
) -> Divergence:
    """Returns the generalised Jensen-Shannon divergence. Overwrites `teacher_NV`.

    β KL(teacher || M) + (1 - β) KL(student || M) with M = β teacher + (1 - β) student. As β
    approaches 0, the value divided by β approaches KL(teacher || student); as β approaches 1,
    divided by 1 - β, KL(student || teacher). β = 0 and β = 1 are these two.
    Source: Agarwal et al. 2023 (arXiv 2306.13649), eq. 1.
    """
    if beta == 1:
        return reverse_kl(student_NV, teacher_NV, probabilities_NV)
    teacher_probabilities_NV = teacher_NV.exp()
    if beta == 0:
        value_N, _ = _kl(teacher_probabilities_NV, teacher_NV, student_NV, out=teacher_NV)
        out = teacher_probabilities_NV
        return Divergence(value_N, lambda: torch.sub(probabilities_NV, out, out=out))
    mixture_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
    teacher_kl_N, _ = _kl(teacher_probabilities_NV, teacher_NV, mixture_NV, out=teacher_NV)
    student_kl_N, gaps_NV = _kl(probabilities_NV, student_NV, mixture_NV, out=mixture_NV)
    return Divergence(
        beta * teacher_kl_N + (1 - beta) * student_kl_N,
        # The terms from the mixture's dependence on the student cancel.
        lambda: _centred(gaps_NV, student_kl_N, probabilities_NV).mul_(1 - beta),
    )


def top_k_reverse_kl(
    student_NV: Tensor, teacher_NV: Tensor, probabilities_NV: Tensor, *, k: int
) -> Divergence:
    """Returns KL(student || teacher) over the teacher's k most likely tokens and a bucket.

    The bucket holds all other tokens, so that no probability is ignored: the divergence is 0 only
    if the student gives these tokens the teacher's probabilities, and it never exceeds the
    divergence over the whole vocabulary.
    Source: arXiv 2603.25562 (top k of the teacher: the student could avoid its own).
    """
    ids_NK = teacher_NV.topk(min(k, teacher_NV.shape[1]), dim=-1).indices
    teacher_NB = bucket_logprobs(teacher_NV, ids_NK)
    return bucket_reverse_kl(student_NV, teacher_NB, probabilities_NV, ids_NK)


def bucket_reverse_kl(
    student_NV: Tensor, teacher_NB: Tensor, probabilities_NV: Tensor, ids_NK: Tensor
) -> Divergence:
    """Returns KL(student || teacher) over the K tokens `ids_NK` and a bucket of the others.

    teacher_NB: the teacher's log-probabilities of the K tokens and of the bucket.
    """
    student_NB = bucket_logprobs(student_NV, ids_NK)
    student_probabilities_NB = student_NB.exp()
    # Tokens to which the student gives probability 0 cost nothing.
    gaps_NB = torch.where(student_probabilities_NB > 0, student_NB - teacher_NB, 0.0)
    value_N = (student_probabilities_NB * gaps_NB).sum(-1)

    def compute_gradient() -> Tensor:
        slopes_NB = gaps_NB - value_N[:, None]
        # All tokens of the bucket share its gradient. Where the K tokens are the whole vocabulary
        # there is no bucket: the last column is then a token's, and the scatter overwrites this.
        gradient_NV = probabilities_NV * slopes_NB[:, -1:]
        token_gradient_NK = (student_probabilities_NB * slopes_NB)[:, : ids_NK.shape[1]]
        return gradient_NV.scatter_(1, ids_NK, token_gradient_NK)

    return Divergence(value_N, compute_gradient)


def bucket_logprobs(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Returns the log-probabilities of K tokens and, last, of all others together, [N, K + 1].

    If the K tokens are the whole vocabulary there is no bucket: [N, K].
    """
    norms_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    tokens_NK = logits_NV.gather(1, ids_NK) - norms_N1
    if ids_NK.shape[1] == logits_NV.shape[1]:
        return tokens_NK
    # Not log(1 - the K tokens' sum), because near 0 that difference has no correct digit.
    others_NV = logits_NV.scatter(1, ids_NK, -math.inf)
    others_N1 = torch.logsumexp(others_NV, dim=-1, keepdim=True) - norms_N1
    return torch.cat([tokens_NK, others_N1], dim=1)


def with_bucket(logprobs_NK: Tensor) -> Tensor:
    """Appends a bucket: the log-probability of all tokens but the K given ones, [N, K + 1].

    For a teacher that reports only the K tokens' log-probabilities.
    """
    others_N1 = 1 - to_float64(logprobs_NK).exp().sum(dim=-1, keepdim=True)
    bucket_N1 = others_N1.clamp_min(_MIN_BUCKET).log().to(logprobs_NK)
    return torch.cat([logprobs_NK, bucket_N1], dim=1)


def entropy(logprobs_NV: Tensor, probabilities_NV: Tensor) -> Tensor:
    """Returns the entropy at each position, [N]."""
    mean_N = _dot(probabilities_NV, logprobs_NV)
    if torch.isfinite(mean_N).all():
        return -mean_N
    return -_dot(probabilities_NV, logprobs_NV.masked_fill(probabilities_NV == 0, 0.0))


def differentiable(logits_NV: Tensor, divergence: Divergence) -> Tensor:
    """Returns the divergence's values, [N], with their gradient with respect to the logits.

    logits_NV: the student's logits over the columns that both models have.
    """
    return _WithGradient.apply(logits_NV, divergence)


class _WithGradient(torch.autograd.Function):
    """Passes a divergence's closed-form gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, divergence: Divergence) -> Tensor:
        if ctx.needs_input_grad[0]:
            # Saved as a tensor, not as a closure, because activation checkpointing can drop only
            # tensors.
            ctx.save_for_backward(divergence.compute_gradient())
        return divergence.value_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor) -> tuple[Tensor, None]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * grads_N[0][:, None], None


def _kl(
    probabilities_NV: Tensor, logprobs_NV: Tensor, other_NV: Tensor, *, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns KL(probabilities || other), [N], and the log-probability differences, in `out`."""
    gaps_NV = torch.sub(logprobs_NV, other_NV, out=out)
    value_N = _dot(probabilities_NV, gaps_NV)
    if not torch.isfinite(value_N).all():
        # 0 × (-inf - -inf) is NaN, but a token of probability 0 must count as 0.
        gaps_NV.masked_fill_(probabilities_NV == 0, 0.0)
        value_N = _dot(probabilities_NV, gaps_NV)
    return value_N, gaps_NV


def _centred(gaps_NV: Tensor, mean_N: Tensor, probabilities_NV: Tensor) -> Tensor:
    """Returns p (g - E[g]), written over `gaps_NV`, which holds g."""
    return gaps_NV.sub_(mean_N[:, None]).mul_(probabilities_NV)


def _dot(left_NV: Tensor, right_NV: Tensor) -> Tensor:
    """Returns the dot product at each position, [N]."""
    if left_NV.device.type == "cpu":
        # vecdot takes one pass without a buffer; on a GPU it would multiply matrices of one row
        # each.
        return torch.linalg.vecdot(left_NV, right_NV)
    return (left_NV * right_NV).sum(dim=-1)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The teacher's most likely tokens at each position, and the probability of all others."""

    ids_NK: Tensor
    """Most likely first, so that the first k columns are the top k."""
    logprobs_NK: Tensor
    rest_N: Tensor
    """The log-probability of all other tokens together; -inf if there are none."""

    def __getitem__(self, positions: slice) -> "TopTokens":
        """Returns the tokens at the positions of a slice."""
        return TopTokens(
            self.ids_NK[positions], self.logprobs_NK[positions], self.rest_N[positions]
        )

    def first(self, k: int) -> "TopTokens":
        """Returns the top `k` tokens; the probability of the others moves to `rest_N`."""
        if k >= self.ids_NK.shape[1]:
            return self
        parts = [self.logprobs_NK[:, k:], self.rest_N[:, None]]
        return TopTokens(
            self.ids_NK[:, :k], self.logprobs_NK[:, :k], torch.cat(parts, dim=1).logsumexp(dim=1)
        )


def top_tokens(logits_NV: Tensor, k: int) -> TopTokens:
    """Returns the `k` most likely tokens of a distribution, or all of its tokens if fewer."""
    ids_NK = logits_NV.topk(min(k, logits_NV.shape[1]), dim=-1).indices
    logprobs_NB = bucket_logprobs(logits_NV, ids_NK)
    num = ids_NK.shape[1]
    if logprobs_NB.shape[1] == num:
        return TopTokens(ids_NK, logprobs_NB, logprobs_NB.new_full((len(ids_NK),), -torch.inf))
    return TopTokens(ids_NK, logprobs_NB[:, :num], logprobs_NB[:, num])


def at_temperature(
    divergence: Callable[[Tensor, Tensor, Tensor], Divergence],
    student_NV: Tensor,
    teacher_NV: Tensor,
    probabilities_NV: Tensor,
    *,
    temperature: float,
) -> Divergence:
    """Returns T² times `divergence`, computed from both distributions at temperature T.

    T² keeps the gradient's scale; at T = 1 this is the divergence itself.
    May overwrite `teacher_NV`.
    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2.
    """
    if temperature == 1:
        return divergence(student_NV, teacher_NV, probabilities_NV)
    student_NV = torch.log_softmax(student_NV / temperature, dim=-1)
    teacher_NV = torch.log_softmax(teacher_NV / temperature, dim=-1)
    scaled = divergence(student_NV, teacher_NV, student_NV.exp())
    return Divergence(
        temperature**2 * scaled.value_N,
        # The logits are divided by T, and so is their gradient.
        lambda: scaled.compute_gradient().mul_(temperature),
    )


def top_k_forward_kl(
    student_NV: Tensor, teacher: TopTokens, probabilities_NV: Tensor, *, temperature: float
) -> Divergence:
    """Returns KL(teacher || student) within the top K tokens, plus that of K versus the rest.

    The first part compares the distributions within the K tokens at temperature T, times T² and
    the teacher's total probability of them. The second compares the total probability of the K
    tokens with that of the rest, at temperature 1, since the rest is known at no other. At
    temperature 1 the sum is the divergence over the K tokens and a bucket of all others; where the
    K tokens are the whole vocabulary it equals `at_temperature` over all of it.
    student_NV: the student's log-probabilities. probabilities_NV: its probabilities.
    """
    ids_NK = teacher.ids_NK
    student_NB = bucket_logprobs(student_NV, ids_NK)
    student_NK = student_NB[:, : ids_NK.shape[1]]
    # Rounding in the stored targets leaves a sum that is not exactly 1.
    norm_N1 = torch.logaddexp(teacher.logprobs_NK.logsumexp(dim=1), teacher.rest_N)[:, None]
    logprobs_NK, rest_N = teacher.logprobs_NK - norm_N1, teacher.rest_N - norm_N1[:, 0]
    mass_N, student_mass_N = logprobs_NK.logsumexp(dim=1), student_NK.logsumexp(dim=1)
    within_NK = torch.log_softmax(logprobs_NK / temperature, dim=-1)
    student_within_NK = torch.log_softmax(student_NK / temperature, dim=-1)
    weights_NK = within_NK.exp()
    # A token of teacher probability 0 adds nothing, whatever the student gives it.
    gaps_NK = torch.where(weights_NK > 0, within_NK - student_within_NK, 0.0)
    value_N = mass_N.exp() * (
        temperature**2 * (weights_NK * gaps_NK).sum(dim=1) + mass_N - student_mass_N
    )
    has_rest, student_rest_N = student_NB.shape[1] > ids_NK.shape[1], student_NB[:, -1]
    rest_share_N = rest_N.exp() if has_rest else torch.zeros_like(value_N)
    if has_rest:
        gap_N = rest_N - student_rest_N
        value_N = value_N + torch.where(rest_share_N > 0, rest_share_N * gap_N, 0.0)

    def compute_gradient() -> Tensor:
        mass_N1 = mass_N.exp()[:, None]
        slopes_NK = temperature * (student_within_NK.exp() - weights_NK)
        slopes_NK = slopes_NK - (student_NK - student_mass_N[:, None]).exp()
        token_gradient_NK = mass_N1 * slopes_NK + student_NK.exp()
        if not has_rest:
            return torch.empty_like(probabilities_NV).scatter_(1, ids_NK, token_gradient_NK)
        tiny = torch.finfo(value_N.dtype).tiny
        others_N1 = 1 - (rest_share_N / student_rest_N.exp().clamp_min(tiny))[:, None]
        return (probabilities_NV * others_N1).scatter_(1, ids_NK, token_gradient_NK)

    return Divergence(value_N, compute_gradient)
