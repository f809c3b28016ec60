"""What each sampled token costs by the configured loss, and what the update tells of it.

Shapes: N sampled tokens of a microbatch, or of a tile of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.models.divergence import TokenScores
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.methods.losses import (
    above_expected,
    beyond_rounding,
    importance_sampling_losses,
    ppo_losses,
    reverse_kl_advantages,
    truncated_ratios,
)
from stillroom.train.on_policy.update_stats import UpdateStats


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What is known of sampled tokens before they are scored."""

    sampler_N: Tensor
    """Their log-probabilities as they were sampled."""
    rewards_N: Tensor
    """What rewards add to their advantages."""
    old_N: Tensor | None
    """By the student as it was before the iteration's first step; None: as it is now."""
    dataset: int
    """Whose teacher scores them."""

    def part(self, part: slice) -> "KnownTokens":
        """Returns it for some of the tokens."""
        old_N = None if self.old_N is None else self.old_N[part]
        return KnownTokens(self.sampler_N[part], self.rewards_N[part], old_N, self.dataset)


def token_losses(
    scores: TokenScores, known: KnownTokens, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the loss of each sampled token and adds to the statistics."""
    student_N, teacher_N = scores.student_N, scores.teacher_N
    now_N = student_N.detach()
    sampler_N, rewards_N = known.sampler_N, known.rewards_N
    stats.add_teacher_kl(sampler_N - teacher_N, dataset=known.dataset)
    stats.entropy += scores.entropy_N.sum().item()
    stats.add_ratios((now_N - sampler_N).exp())
    if not stats.steps:
        stats.logprob_gap += (now_N - sampler_N).abs().sum().item()
        stats.num_fresh_tokens += len(sampler_N)
    if algorithm.is_sampled_loss:
        return _sampled_losses(scores, known, algorithm, stats)
    losses_N = algorithm.kl_coef * beyond_rounding(scores.divergence_N)
    if algorithm.reward_coef > 0:
        stats.add_advantages(rewards_N)
        losses_N = losses_N + importance_sampling_losses(student_N, sampler_N, rewards_N)
    return losses_N


def _sampled_losses(
    scores: TokenScores, known: KnownTokens, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the losses that know of the sampled token alone."""
    student_N, cap, coef = scores.student_N, algorithm.importance_cap, algorithm.kl_coef
    sampler_N = old_N = known.sampler_N
    weights_N = torch.ones_like(sampler_N)
    if cap is not None:
        old_N = student_N.detach() if known.old_N is None else known.old_N
        weights_N = truncated_ratios(old_N, sampler_N, cap=cap)
        stats.num_capped += int((weights_N >= cap).sum())
    advantages_N = reverse_kl_advantages(old_N, scores.teacher_N, coef=coef)
    if algorithm.kl_baseline == "exact":
        expected_N = beyond_rounding(scores.divergence_N.detach())
        advantages_N = above_expected(advantages_N, expected_N, coef=coef)
    advantages_N = advantages_N + known.rewards_N
    stats.add_advantages(advantages_N)
    if algorithm.loss_fn == "importance_sampling":
        return weights_N * importance_sampling_losses(student_N, old_N, advantages_N)
    clip = algorithm.clip_ratio
    ratios_N = (student_N.detach() - old_N).exp()
    is_clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + clip, ratios_N < 1 - clip)
    stats.num_clipped += int(is_clipped_N.sum())
    return weights_N * ppo_losses(student_N, old_N, advantages_N, clip_ratio=clip)
