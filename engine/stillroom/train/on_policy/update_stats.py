"""What an update of on-policy distillation tells of itself."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from stillroom.train.student.collective import Collective
from stillroom.train.student.optimizer import StepInfo

_SUMS = (
    "loss",
    "entropy",
    "logprob_gap",
    "num_tokens",
    "num_fresh_tokens",
    "ratio",
    "num_clipped",
    "num_capped",
    "advantage",
    "squared_advantage",
    "num_advantages",
)


@dataclass(slots=True)
class UpdateStats:
    """Sums over the tokens that one iteration's update learnt."""

    loss: float = 0.0
    entropy: float = 0.0
    """Of the student: exact if the loss sees its whole distribution, else -log p of the tokens."""
    logprob_gap: float = 0.0
    """|trainer - sampler| log-probability of tokens seen before the first optimiser step."""
    num_tokens: int = 0
    num_fresh_tokens: int = 0
    ratio: float = 0.0
    """p_now / p_when_sampled."""
    largest_ratio: float = 0.0
    num_clipped: int = 0
    num_capped: int = 0
    advantage: float = 0.0
    squared_advantage: float = 0.0
    num_advantages: int = 0
    of_datasets: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """Of each dataset: log p_sampler - log p_teacher of the sampled tokens, and their number."""
    steps: list[StepInfo] = field(default_factory=list[StepInfo])

    @property
    def teacher_kl(self) -> float:
        """log p_sampler - log p_teacher of all sampled tokens."""
        return sum(gaps for gaps, _ in self.of_datasets.values())

    def add_teacher_kl(self, gaps_N: Tensor, *, dataset: int) -> None:
        """Takes in log p_sampler - log p_teacher of tokens of one dataset."""
        self._add_gaps(dataset, gaps_N.sum().item(), len(gaps_N))

    def add_ratios(self, ratios_N: Tensor) -> None:
        """Takes in how far the student has moved from what was sampled with."""
        if len(ratios_N):
            self.ratio += ratios_N.sum().item()
            self.largest_ratio = max(self.largest_ratio, ratios_N.max().item())

    def add_advantages(self, advantages_N: Tensor) -> None:
        """Takes in what the tokens' advantages are, rewards and teacher together."""
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
        """Returns the means, named as in events.jsonl; of shares those that are asked for."""
        tokens = max(1, self.num_tokens)
        found = {
            "teacher_kl": self.teacher_kl / tokens,
            "loss": self.loss / tokens,
            "logprob_gap": self.logprob_gap / max(1, self.num_fresh_tokens),
            "entropy": self.entropy / tokens,
            "ratio": self.ratio / tokens,
            "ratio_max": self.largest_ratio,
        }
        if len(self.of_datasets) > 1:
            for dataset, (total, count) in sorted(self.of_datasets.items()):
                found[f"teacher_kl/dataset_{dataset}"] = total / max(1, count)
        if self.num_advantages:
            mean = self.advantage / self.num_advantages
            variance = self.squared_advantage / self.num_advantages - mean**2
            found |= {"advantage": mean, "advantage_std": math.sqrt(max(0.0, variance))}
        if is_clipped:
            found["clipped"] = self.num_clipped / tokens
        if is_capped:
            found["capped"] = self.num_capped / tokens
        if self.steps:
            found["grad_norm"] = self.steps[-1].grad_norm
            found["learning_rate"] = self.steps[-1].learning_rate
        return found
