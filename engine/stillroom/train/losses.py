"""Pure losses over log-probabilities. Everything is in nats.

Shapes: N trained tokens of a batch, P pairs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The preference loss of each pair, and the implied reward margins."""

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

    For ipo the inputs are means over tokens, for sigmoid sums.
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
    Source: one-sample estimate of KL(student || teacher) per token, discount 0.
    """
    return -coef * (student_N - teacher_N)


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
    """Returns the sum of the tokens' values of each sequence."""
    return values_N.new_zeros(num_sequences).index_add(0, rows_N, values_N)
