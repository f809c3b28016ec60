"""95 % confidence intervals of shares, means, ratios and paired differences."""

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean, variance

import msgspec

_LEVEL = 0.95
_NEGLIGIBLE_TERM = 1e-17
_MAX_EXACT = 1000
"""The maximum number of tasks for exact integer arithmetic, which is slow for large numbers."""
_Z = NormalDist().inv_cdf(0.5 + _LEVEL / 2)
_POWER_Z = NormalDist().inv_cdf(0.8)
_DISCORDANT_SHARE = 0.2


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A value with its 95 % interval, from `n` independent tasks."""

    value: float
    low: float | None
    """The lower end of the interval; None for a single task, which shows no spread."""
    high: float | None
    """The upper end of the interval; None for a single task, which shows no spread."""
    n: int


def share_estimate(successes: int, n: int) -> Estimate:
    """Returns a share with Wilson's interval."""
    if n == 0:
        raise ValueError("a share needs at least one task")
    return Estimate(value=successes / n, **_wilson_interval(successes / n, n), n=n)


def accuracy_estimate(shares: Sequence[float]) -> Estimate:
    """Returns the mean of the tasks' shares of right samples (0 to 1), with Wilson's interval.

    Several samples of one task are worth more than one sample, but less than samples of as many
    tasks. So the interval is Wilson's for an effective number of tasks: as many tasks with one
    sample each as would give the mean the same variance. One unseen task of each outcome is added
    to estimate that variance: equal shares then do not look certain, and a perfect group's interval
    is never wider than that of an imperfect one.
    """
    n = len(shares)
    if n == 0:
        raise ValueError("an accuracy needs at least one task")
    seen_and_unseen = [*shares, 0.0, 1.0]
    expected = fmean(seen_and_unseen)
    factor = expected * (1 - expected) / variance(seen_and_unseen)
    mean = fmean(shares)
    return Estimate(value=mean, **_wilson_interval(mean, n * max(1.0, factor)), n=n)


def _wilson_interval(share: float, n: float) -> dict[str, float]:
    """Returns the bounds of a share's interval. Source: Wilson 1927; Brown, Cai, DasGupta 2001."""
    spread = _Z**2 / n
    centre = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    # For a share of 0 or 1 one bound is the share itself, which rounding must not move past it.
    return {"low": min(share, max(0.0, centre - half)), "high": max(share, min(1.0, centre + half))}


def mean_estimate(
    values: Sequence[float], *, limits: tuple[float, float] | None = None
) -> Estimate:
    """Returns the mean of independent values with Student's interval.

    For several samples of a task pass the task's mean, since samples of a task are not independent.
    `limits` are the lowest and the highest possible value, past which the interval does not go. If
    all values are equal, `limits` bound how far unseen values may move the mean (Clopper, Pearson
    1934).
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(value=mean, low=None, high=None, n=1)
    if limits is not None and min(values) == max(values):
        unseen = 1 - ((1 - _LEVEL) / 2) ** (1 / n)
        low, high = (mean + unseen * (limit - mean) for limit in limits)
        return Estimate(value=mean, low=low, high=high, n=n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t_quantile(n - 1) * math.sqrt(variance / n)
    lowest, highest = limits or (-math.inf, math.inf)
    # Rounding must not move a bound past the mean.
    low, high = min(mean, max(lowest, mean - half)), max(mean, min(highest, mean + half))
    return Estimate(value=mean, low=low, high=high, n=n)


def ratio_estimate(
    sums: Sequence[float], sizes: Sequence[int], *, lowest: float = -math.inf
) -> Estimate:
    """Returns sum(sums) / sum(sizes), e.g. nats per token, over independent clusters.

    `sums` and `sizes` have one number for each cluster; the interval does not go below `lowest`.
    Source: linearised variance of a ratio estimator (Cochran 1977, ch. 6).
    """
    n, total = len(sums), sum(sizes)
    if n < 2 or total == 0:
        raise ValueError("a ratio needs at least two clusters, and a size above 0 in total")
    ratio = math.fsum(sums) / total
    residuals = [s - ratio * size for s, size in zip(sums, sizes, strict=True)]
    variance = math.fsum(r * r for r in residuals) * n / (n - 1) / total**2
    half = t_quantile(n - 1) * math.sqrt(variance)
    # Rounding must not move the bound past the ratio.
    low = min(ratio, max(lowest, ratio - half))
    return Estimate(value=ratio, low=low, high=ratio + half, n=n)


def excludes_zero(estimate: Estimate) -> bool:
    """Returns whether an estimate has an interval without 0."""
    if estimate.low is None or estimate.high is None:
        return False
    return estimate.low > 0 or estimate.high < 0


def t_quantile(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t distribution with `degrees` degrees of freedom.

    The error is below 0.5 % from 3 degrees of freedom on.
    Source: expansion in 1/degrees, Abramowitz & Stegun 26.7.5.
    """
    exact = {1: 12.7062, 2: 4.3027}
    if degrees in exact:
        return exact[degrees]
    z, d = _Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / d**power for power, term in enumerate(terms, start=1))


def smallest_difference(n: int) -> float:
    """Returns the smallest difference in accuracy that n paired tasks detect with 80 % power.

    Assumes that on a fifth of the tasks exactly one of the two models is right.
    """
    return min(1.0, (_Z + _POWER_Z) * math.sqrt(_DISCORDANT_SHARE / n))


def sign_test_p(wins: int, losses: int) -> float:
    """Returns the exact two-sided p-value of a sign test: wins against losses, without ties.

    For answers that are right or wrong this is McNemar's exact test.
    """
    n = wins + losses
    if n == 0:
        return 1.0
    fewer = min(wins, losses)
    if n <= _MAX_EXACT:
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
    # The largest term of the tail is computed with logarithms, because its factors are too large
    # for floats. Each smaller term follows from the previous one, until they are negligible.
    largest = math.lgamma(n + 1) - math.lgamma(fewer + 1) - math.lgamma(n - fewer + 1)
    term = tail = math.exp(largest - n * math.log(2))
    for k in range(fewer, 0, -1):
        term *= k / (n - k + 1)
        tail += term
        if term < tail * _NEGLIGIBLE_TERM:
            break
    return min(1.0, 2 * tail)


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Returns an unbiased estimate of the chance that at least one of k samples is right.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_right} of {num_samples} samples")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def pass_at_k_estimate(answers: Iterable[tuple[str, bool]], k: int) -> Estimate | None:
    """Returns the pass@k of the tasks that have k samples or more; None if no task has so many.

    `answers` has a pair for each sample: its task id, and whether its answer is right.
    """
    by_task: dict[str, list[bool]] = {}
    for task_id, is_right in answers:
        by_task.setdefault(task_id, []).append(is_right)
    samples = [results for results in by_task.values() if len(results) >= k]
    if not samples:
        return None
    return accuracy_estimate([pass_at_k(sum(results), len(results), k) for results in samples])
