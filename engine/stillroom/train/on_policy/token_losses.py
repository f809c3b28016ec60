"""The configured loss of each sampled token, and the sums over tokens from which metrics are made.

Shapes: N sampled tokens of a microbatch, or of a tile of it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stillroom.models.divergence import TokenScores
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.methods.losses import (
    above_expected,
    beyond_rounding,
    functions_of,
    importance_sampling_losses,
    reverse_kl_advantages,
    truncated_ratios,
)
from stillroom.train.student.collective import Collective
from stillroom.train.student.optimizer import StepInfo

_SUMS = (
    "loss",
    "entropy",
    "logprob_gap",
    "num_tokens",
    "num_fresh_tokens",
    "num_tail",
    "ratio",
    "num_clipped",
    "num_capped",
    "advantage",
    "squared_advantage",
    "num_advantages",
    "row_loss",
    "num_row_tokens",
)


_TAIL_NATS = math.log(100)
"""A token counts to the tail if the teacher finds it a hundred times less likely."""


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The numbers known of sampled tokens before the teacher scores them."""

    sampler_N: Tensor
    """The log-probabilities (nats) with which the tokens were sampled."""
    rewards_N: Tensor
    """The part of the tokens' advantages that comes from rewards."""
    old_N: Tensor | None
    """The log-probabilities (nats) by the weights before the iteration's first step; None: those
    are the current weights."""
    dataset: int
    """The index of the dataset whose teacher scores the tokens."""

    def part(self, part: slice) -> "KnownTokens":
        """Returns the numbers of some of the tokens."""
        old_N = None if self.old_N is None else self.old_N[part]
        return KnownTokens(self.sampler_N[part], self.rewards_N[part], old_N, self.dataset)


@dataclass(slots=True)
class UpdateStats:
    """Sums over the tokens of one iteration's update."""

    loss: float = 0.0
    entropy: float = 0.0
    """The student's entropy (nats): exact if the loss sees its whole distribution, else -log p of
    the sampled tokens."""
    logprob_gap: float = 0.0
    """|log p_trainer - log p_sampler| of the tokens that were scored before the first optimiser
    step."""
    num_tokens: int = 0
    num_fresh_tokens: int = 0
    num_tail: int = 0
    """The tokens that the sampler finds a hundred times as likely as the teacher, or more."""
    ratio: float = 0.0
    """The ratio p_now / p_when_sampled."""
    largest_ratio: float = 0.0
    num_clipped: int = 0
    num_capped: int = 0
    advantage: float = 0.0
    squared_advantage: float = 0.0
    num_advantages: int = 0
    row_loss: float = 0.0
    """The loss of rows that the student did not sample."""
    num_row_tokens: int = 0
    of_datasets: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """The sum of log p_sampler - log p_teacher over the tokens of each dataset, and their
    number."""
    steps: list[StepInfo] = field(default_factory=list[StepInfo])

    @property
    def teacher_kl(self) -> float:
        """The sum of log p_sampler - log p_teacher over all sampled tokens."""
        return sum(gaps for gaps, _ in self.of_datasets.values())

    def add_teacher_kl(self, gaps_N: Tensor, *, dataset: int) -> None:
        """Adds log p_sampler - log p_teacher of tokens of one dataset."""
        self._add_gaps(dataset, gaps_N.sum().item(), len(gaps_N))
        self.num_tail += int((gaps_N > _TAIL_NATS).sum())

    def add_ratios(self, ratios_N: Tensor) -> None:
        """Adds the tokens' ratios p_now / p_when_sampled."""
        if len(ratios_N):
            self.ratio += ratios_N.sum().item()
            self.largest_ratio = max(self.largest_ratio, ratios_N.max().item())

    def add_advantages(self, advantages_N: Tensor) -> None:
        """Adds the tokens' advantages, from rewards and the teacher together."""
        self.advantage += advantages_N.sum().item()
        self.squared_advantage += advantages_N.square().sum().item()
        self.num_advantages += len(advantages_N)

    def over(self, peers: Collective) -> "UpdateStats":
        """Returns the sums over all processes' tokens."""
        total, *others = peers.gathered(self)
        for part in others:
            total._add(part)
        return total

    def _add(self, other: "UpdateStats") -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_ratio = max(self.largest_ratio, other.largest_ratio)
        for dataset, (gaps, count) in other.of_datasets.items():
            self._add_gaps(dataset, gaps, count)

    def _add_gaps(self, dataset: int, gaps: float, count: int) -> None:
        before, tokens = self.of_datasets.get(dataset, (0.0, 0))
        self.of_datasets[dataset] = before + gaps, tokens + count

    def metrics(self, *, is_clipped: bool, is_capped: bool) -> dict[str, float]:
        """Returns the means over tokens, named as in events.jsonl.

        is_clipped, is_capped: whether the loss clips or caps ratios, so that the share of such
        tokens is a metric.
        """
        tokens = max(1, self.num_tokens)
        metrics = {
            "teacher_kl": self.teacher_kl / tokens,
            "tail": self.num_tail / tokens,
            "loss": self.loss / tokens,
            "logprob_gap": self.logprob_gap / max(1, self.num_fresh_tokens),
            "entropy": self.entropy / tokens,
            "ratio": self.ratio / tokens,
            "ratio_max": self.largest_ratio,
        }
        if len(self.of_datasets) > 1:
            for dataset, (total, count) in sorted(self.of_datasets.items()):
                metrics[f"teacher_kl/dataset_{dataset}"] = total / max(1, count)
        if self.num_advantages:
            mean = self.advantage / self.num_advantages
            variance = self.squared_advantage / self.num_advantages - mean**2
            metrics |= {"advantage": mean, "advantage_std": math.sqrt(max(0.0, variance))}
        if self.num_row_tokens:
            metrics["row_loss"] = self.row_loss / self.num_row_tokens
        if is_clipped:
            metrics["clipped"] = self.num_clipped / tokens
        if is_capped:
            metrics["capped"] = self.num_capped / tokens
        if self.steps:
            metrics["grad_norm"] = self.steps[-1].grad_norm
            metrics["learning_rate"] = self.steps[-1].learning_rate
        return metrics


def token_losses(
    scores: TokenScores, known: KnownTokens, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the loss of each sampled token, [N], and adds the tokens' numbers to `stats`."""
    student_N, teacher_N = scores.student_N, scores.teacher_N
    now_N = student_N.detach()
    sampler_N, rewards_N = known.sampler_N, known.rewards_N
    stats.add_teacher_kl(sampler_N - teacher_N, dataset=known.dataset)
    stats.entropy += scores.entropy_N.sum().item()
    stats.add_ratios((now_N - sampler_N).exp())
    if not stats.steps:
        stats.logprob_gap += (now_N - sampler_N).abs().sum().item()
        stats.num_fresh_tokens += len(sampler_N)
    if algorithm.loss.is_sampled:
        return _sampled_losses(scores, known, algorithm, stats)
    losses_N = algorithm.kl_coef * beyond_rounding(scores.divergence_N)
    if algorithm.reward_coef > 0:
        stats.add_advantages(rewards_N)
        losses_N = losses_N + importance_sampling_losses(student_N, sampler_N, rewards_N)
    return losses_N


def row_losses(scores: TokenScores, algorithm: AlgorithmSection, stats: UpdateStats) -> Tensor:
    """Returns the losses of tokens that the student did not sample, [N], and adds them up."""
    losses_N = algorithm.kl_coef * beyond_rounding(scores.divergence_N)
    stats.row_loss += losses_N.sum().item()
    stats.num_row_tokens += len(losses_N)
    return losses_N


def _sampled_losses(
    scores: TokenScores, known: KnownTokens, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the tokens' losses, [N], if they need only the sampled tokens' probabilities."""
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
    if "clip_ratio" in algorithm.loss.options:
        clip = algorithm.clip_ratio
        ratios_N = (student_N.detach() - old_N).exp()
        is_clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + clip, ratios_N < 1 - clip)
        stats.num_clipped += int(is_clipped_N.sum())
    sampled_loss = functions_of(algorithm).sampled_loss
    return weights_N * sampled_loss(student_N, old_N, advantages_N, algorithm)
