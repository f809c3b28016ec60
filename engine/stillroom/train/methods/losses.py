"""The losses of training as pure functions of log-probabilities (nats).

Shapes: N trained tokens of a batch, P pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor

from stillroom.models.divergence import (
    Divergence,
    bucket_reverse_kl,
    jensen_shannon,
    reverse_kl,
    top_k_reverse_kl,
)
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.losses import LossName

# Adam scales even the smallest gradient up to a whole step, so rounding differences between a
# student and a teacher that agree would move the student. In fp32 they stay below these bounds.
_ROUNDING_NATS = 1e-4
_ROUNDING_KL = 1e-6


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The preference loss of each pair, and its implicit reward margin."""

    losses_P: Tensor
    margins_P: Tensor
    """β × (log-ratio of chosen - log-ratio of rejected), without gradient."""


def preference_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> PreferenceLoss:
    """Returns the DPO (sigmoid) or IPO loss of pairs of sequence log-probabilities.

    The inputs are means over tokens for ipo, and sums for sigmoid.
    Source: Rafailov et al. 2023, eq. 7; Azar et al. 2023, eq. 17; smoothing: Mitchell 2023 (cDPO).
    """
    log_ratio_P = (chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P)
    margins_P = beta * log_ratio_P
    if kind == "ipo":
        losses_P = (log_ratio_P - 1 / (2 * beta)) ** 2
    else:
        losses_P = -(
            (1 - label_smoothing) * F.logsigmoid(margins_P)
            + label_smoothing * F.logsigmoid(-margins_P)
        )
    return PreferenceLoss(losses_P, margins_P.detach())


def reverse_kl_advantages(student_N: Tensor, teacher_N: Tensor, *, coef: float) -> Tensor:
    """Returns per-token advantages `-coef * (log p_student - log p_teacher)`, [N].

    student_N, teacher_N: logprobs of the student's own sampled tokens; no gradient.
    Differences within rounding count as 0.
    This is the one-sample estimate of KL(student || teacher) per token, without discounting.
    """
    ratio_N = student_N - teacher_N
    return -coef * torch.where(ratio_N.abs() <= _ROUNDING_NATS, 0.0, ratio_N)


def zero_rounding(divergence_N: Tensor) -> Tensor:
    """Returns the divergences, with those within rounding set to 0, without gradient."""
    # The condition is "small", not "large", so that NaN is kept.
    return torch.where(divergence_N <= _ROUNDING_KL, 0.0, divergence_N)


def subtract_expected_advantage(
    advantages_N: Tensor, divergence_N: Tensor, *, coef: float
) -> Tensor:
    """Returns reverse KL advantages minus their expected value `-coef * KL`, [N].

    divergence_N: the exact KL(student || teacher) at each position; no gradient. A baseline that
    depends on the position alone leaves the expected gradient unchanged and lowers its variance.
    Source: arXiv 2605.07865.
    """
    return advantages_N + coef * divergence_N


def truncated_ratios(trainer_N: Tensor, sampler_N: Tensor, *, cap: float) -> Tensor:
    """Returns each token's importance weight min(p_trainer / p_sampler, cap).

    trainer_N: log-probabilities under the weights before the iteration's first step; no gradient.
    Source: truncated importance sampling by token, arXiv 2510.26788.
    """
    return torch.exp(trainer_N - sampler_N).clamp(max=cap)


def importance_sampling_losses(
    logprobs_N: Tensor, sampler_N: Tensor, advantages_N: Tensor
) -> Tensor:
    """Returns `-ratio * advantage` of each token; ratio = p_now / p_when_sampled."""
    return -torch.exp(logprobs_N - sampler_N) * advantages_N


def ppo_losses(
    logprobs_N: Tensor, sampler_N: Tensor, advantages_N: Tensor, *, clip_ratio: float
) -> Tensor:
    """Returns the clipped surrogate loss of each token.

    Source: Schulman et al. 2017, eq. 7.
    """
    ratio_N = torch.exp(logprobs_N - sampler_N)
    clipped_N = ratio_N.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def sum_by_sequence(values_N: Tensor, rows_N: Tensor, num_sequences: int) -> Tensor:
    """Returns the sum of the values over each sequence's tokens, [num_sequences]."""
    return values_N.new_zeros(num_sequences).index_add(0, rows_N, values_N)


DivergenceFunction = Callable[[Tensor, Tensor, Tensor], Divergence]
"""Takes the student's and the teacher's log-probabilities and the student's probabilities, [N, V]
each."""
ListedDivergence = Callable[[Tensor, Tensor, Tensor, Tensor], Divergence]
"""Like `DivergenceFunction`, but the teacher's log-probabilities are those of its top K tokens and
of all others together, [N, K + 1], and the last argument has the ids of the top K, [N, K]."""


def _no_divergence(*_: object) -> Divergence:
    raise NotImplementedError("this loss does not compare a server's top tokens")


@dataclass(frozen=True, slots=True)
class LossFunctions:
    """The functions of a loss that compares distributions."""

    divergence: Callable[[AlgorithmSection], DivergenceFunction]
    """Returns the divergence from a teacher in this process."""
    listed_divergence: ListedDivergence = _no_divergence
    """The divergence from the top tokens that a server returns; raises an error if the loss has
    none."""


_FUNCTIONS: Mapping[LossName, LossFunctions] = {
    "full_reverse_kl": LossFunctions(lambda _: reverse_kl),
    "jsd": LossFunctions(lambda settings: partial(jensen_shannon, beta=settings.jsd_beta)),
    "top_k_reverse_kl": LossFunctions(
        lambda settings: partial(top_k_reverse_kl, k=settings.top_k), bucket_reverse_kl
    ),
    # Used if the teacher turns out to have the student's tokenizer; bytes are compared in
    # on_policy/token_scores.py.
    "byte_reverse_kl": LossFunctions(lambda _: reverse_kl, bucket_reverse_kl),
}
"""The functions of each loss that compares distributions, by its name in `config/losses.py`."""


def loss_functions(algorithm: AlgorithmSection) -> LossFunctions:
    """Returns the functions of the configured loss."""
    return _FUNCTIONS[algorithm.loss.name]
