"""Distributions of many values in constant memory."""

import math
from collections import Counter
from collections.abc import Sequence

from stillroom.data.distribution import Quantiles

_STEPS = 512
_MOST_VALUES = 8192


class Histogram:
    """Counts values: few different ones as they are, many in steps of 0.2 % of their size."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._total = 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, values: Sequence[float]) -> None:
        """Takes in finite values; many at once are counted fastest."""
        if not values:
            return
        self._counts.update(values)
        self._total += sum(values)
        self._low = min([self._low, *values])
        self._high = max([self._high, *values])
        if len(self._counts) > _MOST_VALUES:
            self._fold()

    def joined(self, other: "Histogram") -> "Histogram":
        """Returns the histogram of the values of both."""
        both = Histogram()
        both._counts = self._counts + other._counts
        both._total = self._total + other._total
        both._low, both._high = min(self._low, other._low), max(self._high, other._high)
        return both

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

    def _fold(self) -> None:
        folded: Counter[float] = Counter()
        for value, count in self._counts.items():
            mantissa, exponent = math.frexp(value)
            folded[math.ldexp(round(mantissa * _STEPS) / _STEPS, exponent)] += count
        self._counts = folded

    def _at(self, rank: int) -> float:
        """Returns the value of the rank-th smallest, from 0."""
        passed = 0
        for value in sorted(self._counts):
            passed += self._counts[value]
            if passed > rank:
                return min(max(value, self._low), self._high)
        return self._high
