"""Divergences at a temperature, from a teacher's whole distribution or from its likeliest tokens.

Both have their gradient in closed form, as those in `divergence`, on which they are built.
Shapes: N positions, V vocabulary, K tokens that the teacher finds likeliest. Everything is in nats.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.models.divergence import Divergence, bucket_logprobs


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The teacher's likeliest tokens at each position, and what all others have together."""

    ids_NK: Tensor
    """Likeliest first, so that the first k columns are the k likeliest."""
    logprobs_NK: Tensor
    rest_N: Tensor
    """The log-probability of all other tokens together; -inf if there are none."""

    def part(self, part: slice) -> "TopTokens":
        """Returns the tokens at some of the positions."""
        return TopTokens(self.ids_NK[part], self.logprobs_NK[part], self.rest_N[part])

    def first(self, k: int) -> "TopTokens":
        """Returns the `k` likeliest tokens; the others count to the rest."""
        if k >= self.ids_NK.shape[1]:
            return self
        parts = [self.logprobs_NK[:, k:], self.rest_N[:, None]]
        return TopTokens(
            self.ids_NK[:, :k], self.logprobs_NK[:, :k], torch.cat(parts, dim=1).logsumexp(dim=1)
        )


def top_tokens(logits_NV: Tensor, k: int) -> TopTokens:
    """Returns the `k` likeliest tokens of a distribution; all of them if there are no more."""
    ids_NK = logits_NV.topk(min(k, logits_NV.shape[1]), dim=-1).indices
    logprobs_NB = bucket_logprobs(logits_NV, ids_NK)
    num = ids_NK.shape[1]
    if logprobs_NB.shape[1] == num:
        return TopTokens(ids_NK, logprobs_NB, logprobs_NB.new_full((len(ids_NK),), -torch.inf))
    return TopTokens(ids_NK, logprobs_NB[:, :num], logprobs_NB[:, num])


def at_temperature(
    form: Callable[[Tensor, Tensor, Tensor], Divergence],
    student_NV: Tensor,
    teacher_NV: Tensor,
    probabilities_NV: Tensor,
    *,
    temperature: float,
) -> Divergence:
    """Returns T² times a divergence of both distributions at the temperature T.

    The square keeps the gradient as large as at temperature 1, where it is the divergence itself.
    May overwrite `teacher_NV`.
    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2.
    """
    if temperature == 1:
        return form(student_NV, teacher_NV, probabilities_NV)
    student_NV = torch.log_softmax(student_NV / temperature, dim=-1)
    teacher_NV = torch.log_softmax(teacher_NV / temperature, dim=-1)
    divergence = form(student_NV, teacher_NV, student_NV.exp())
    return Divergence(
        temperature**2 * divergence.value_N,
        # The logits are divided by T, and so is their gradient.
        lambda: divergence.form_gradient().mul_(temperature),
    )


def top_k_forward_kl(
    student_NV: Tensor, teacher: TopTokens, probabilities_NV: Tensor, *, temperature: float
) -> Divergence:
    """Returns KL(teacher || student) in two parts: which of K tokens it is, and whether it is one.

    The first part compares the distributions among the K tokens at the temperature T, times T² and
    the probability that the teacher gives them. The second compares the probability of these
    tokens together at temperature 1, since the rest cannot be known at another one. At temperature
    1 the sum is the divergence over the K tokens and a bucket of all others; where the K tokens are
    the whole vocabulary it is `at_temperature` over all of it.
    student_NV: log-probabilities; probabilities_NV: those of the student.
    """
    ids_NK = teacher.ids_NK
    student_NB = bucket_logprobs(student_NV, ids_NK)
    own_NK = student_NB[:, : ids_NK.shape[1]]
    # Rounding in a store leaves a sum that is not exactly 1.
    norm_N1 = torch.logaddexp(teacher.logprobs_NK.logsumexp(dim=1), teacher.rest_N)[:, None]
    logprobs_NK, rest_N = teacher.logprobs_NK - norm_N1, teacher.rest_N - norm_N1[:, 0]
    mass_N, own_mass_N = logprobs_NK.logsumexp(dim=1), own_NK.logsumexp(dim=1)
    among_NK = torch.log_softmax(logprobs_NK / temperature, dim=-1)
    own_among_NK = torch.log_softmax(own_NK / temperature, dim=-1)
    weights_NK = among_NK.exp()
    # A token that the teacher never takes counts nothing, whatever the student gives it.
    gaps_NK = torch.where(weights_NK > 0, among_NK - own_among_NK, 0.0)
    value_N = mass_N.exp() * (
        temperature**2 * (weights_NK * gaps_NK).sum(dim=1) + mass_N - own_mass_N
    )
    has_rest, own_rest_N = student_NB.shape[1] > ids_NK.shape[1], student_NB[:, -1]
    rest_share_N = rest_N.exp() if has_rest else torch.zeros_like(value_N)
    if has_rest:
        value_N = value_N + torch.where(rest_share_N > 0, rest_share_N * (rest_N - own_rest_N), 0.0)

    def form_gradient() -> Tensor:
        mass_N1 = mass_N.exp()[:, None]
        of_tokens_NK = mass_N1 * (
            temperature * (own_among_NK.exp() - weights_NK) - (own_NK - own_mass_N[:, None]).exp()
        )
        of_tokens_NK = of_tokens_NK + own_NK.exp()
        if not has_rest:
            return torch.empty_like(probabilities_NV).scatter_(1, ids_NK, of_tokens_NK)
        tiny = torch.finfo(value_N.dtype).tiny
        others_N1 = 1 - (rest_share_N / own_rest_N.exp().clamp_min(tiny))[:, None]
        return (probabilities_NV * others_N1).scatter_(1, ids_NK, of_tokens_NK)

    return Divergence(value_N, form_gradient)
