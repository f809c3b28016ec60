"""The advantages of rollouts and of their tokens, computed from rewards.

These are pure functions of plain numbers. A rollout without a reward (because it could not be
judged) has advantage 0 and counts in no other rollout's baseline.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean

from stillroom.train.config.distill_sections import AdvantageEstimator


def reward_advantages(
    rewards: Sequence[float | None],
    prompts: Sequence[Hashable],
    *,
    estimator: AdvantageEstimator,
) -> list[float]:
    """Returns each rollout's advantage: its reward less a baseline.

    grpo: the baseline is the mean of the prompt's rollouts (Shao et al. 2024, arXiv 2402.03300).
    The difference is not divided by their deviation, which would give more weight to prompts that
    are nearly solved or nearly hopeless (Liu et al. 2025, arXiv 2503.20783). reinforce: the
    baseline is the mean of all other rollouts of the iteration, whatever their prompt (Williams
    1992: a baseline that does not depend on the rollout keeps the gradient unbiased). gae: the
    baseline is the mean of the prompt's other rollouts, which stands for the value of every state
    since there is no critic; see `decayed`. A rollout without others to compare with has advantage
    0.
    """
    groups: dict[Hashable, list[float]] = defaultdict(list)
    keys = [None if estimator == "reinforce" else prompt for prompt in prompts]
    for key, reward in zip(keys, rewards, strict=True):
        if reward is not None:
            groups[key].append(reward)
    advantages: list[float] = []
    for key, reward in zip(keys, rewards, strict=True):
        group = groups[key]
        if reward is None or len(group) < 2:
            advantages.append(0.0)
        elif estimator == "grpo":
            advantages.append(reward - fmean(group))
        else:
            advantages.append(reward - (sum(group) - reward) / (len(group) - 1))
    return advantages


def decayed(advantage: float, num_tokens: int, *, gae_lambda: float) -> list[float]:
    """Returns each sampled token's advantage: λ^(number of tokens that follow) × `advantage`.

    Source: Schulman et al. 2015 (arXiv 1506.02438), eq. 16 with no discount, the reward at the end
    and one value for all states before it: only the last step's TD error is not 0.
    """
    return [advantage * gae_lambda ** (num_tokens - 1 - i) for i in range(num_tokens)]
