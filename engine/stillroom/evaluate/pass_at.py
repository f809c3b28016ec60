"""Estimates pass@k, the share of tasks that at least one of k samples solves."""

import math
from collections.abc import Iterable

from stillroom.evaluate.intervals import Estimate, mean_estimate, share_estimate


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Returns an unbiased estimate of the chance that at least one of k samples is right.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_right} of {num_samples} samples")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def passing_tasks(answers: Iterable[tuple[str, bool]], k: int) -> Estimate | None:
    """Returns the pass@k of the tasks that have k samples or more; None if no task has so many.

    `answers` has a pair for each sample: its task id, and whether its answer is right.
    """
    by_task: dict[str, list[bool]] = {}
    for task_id, is_right in answers:
        by_task.setdefault(task_id, []).append(is_right)
    samples = [results for results in by_task.values() if len(results) >= k]
    if not samples:
        return None
    shares = [pass_at_k(sum(results), len(results), k) for results in samples]
    # With exactly k samples every share is 0 or 1, so that Wilson's interval fits.
    if all(len(results) == k for results in samples):
        return share_estimate(round(sum(shares)), len(shares))
    return mean_estimate(shares, limits=(0.0, 1.0))
