"""Distributions of many values in constant memory."""

import math
from collections import Counter

from stillroom.data.distribution import Quantiles

_STEPS = 512


class Histogram:
    """Counts values in steps of 0.2 % of their size; whole numbers up to 512 are exact."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._total = 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, value: float) -> None:
        """Takes in one finite value."""
        mantissa, exponent = math.frexp(value)
        self._counts[math.ldexp(round(mantissa * _STEPS), exponent)] += 1
        self._total += value
        self._low, self._high = min(self._low, value), max(self._high, value)

    def quantiles(self) -> Quantiles | None:
        """Returns the distribution in five numbers; None of no values."""
        count = self._counts.total()
        if not count:
            return None
        return Quantiles(
            low=self._low,
            median=self._at(int(0.5 * count)),
            p95=self._at(int(0.95 * count)),
            high=self._high,
            mean=self._total / count,
        )

    def _at(self, rank: int) -> float:
        """Returns the value of the rank-th smallest, from 0."""
        passed = 0
        for step in sorted(self._counts):
            passed += self._counts[step]
            if passed > rank:
                return min(max(step / _STEPS, self._low), self._high)
        return self._high
