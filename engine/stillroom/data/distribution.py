"""Distributions of any number of values in constant memory."""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

CAPACITY = 10_000
"""Values that are kept; with more than these, quantiles and bars come from a random sample."""
_MAX_BARS = 24


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in five numbers."""

    low: float
    median: float
    p95: float
    high: float
    mean: float


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the kept values lie from `low` to `high`: one value where they are the same."""

    low: float
    high: float
    count: int


class Distribution:
    """Takes in values one by one; lowest, highest and mean are exact."""

    def __init__(self, *, capacity: int = CAPACITY, seed: int = 0) -> None:
        self._capacity, self._chance = capacity, random.Random(seed)
        self._kept: list[float] = []
        self._low = self._high = self._sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Takes in one finite value."""
        self._low = min(self._low, value) if self.count else value
        self._high = max(self._high, value) if self.count else value
        self._sum += value
        self.count += 1
        if len(self._kept) < self._capacity:
            self._kept.append(value)
        elif (slot := self._chance.randrange(self.count)) < self._capacity:
            self._kept[slot] = value

    def quantiles(self) -> Quantiles | None:
        """Returns the distribution in five numbers; None of no values."""
        if not self.count:
            return None
        ordered = sorted(self._kept)
        return Quantiles(
            low=self._low,
            median=_at(ordered, 0.5),
            p95=_at(ordered, 0.95),
            high=self._high,
            mean=self._sum / self.count,
        )

    def bars(self) -> list[Bar]:
        """Returns the kept values in bars of equal width, or one bar for each of a few values."""
        return bars(self._kept)


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Returns the distribution of some values in five numbers; None of no values."""
    distribution = Distribution(capacity=max(1, len(values)))
    for value in values:
        distribution.add(value)
    return distribution.quantiles()


def bars(values: Sequence[float]) -> list[Bar]:
    """Returns bars that hold every value once; the last one takes in what lies far above."""
    counts = Counter(values)
    if len(counts) <= _MAX_BARS // 2:
        return [Bar(low=value, high=value, count=counts[value]) for value in sorted(counts)]
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    # A few very large values must not press all others into one bar.
    top = min(high, max(_at(ordered, 0.99) * 1.25, low + 1e-9))
    width = (top - low) / _MAX_BARS
    filled = Counter(min(_MAX_BARS - 1, int((value - low) / width)) for value in ordered)
    edges = [low + width * index for index in range(_MAX_BARS)] + [high]
    return [
        Bar(low=edges[index], high=edges[index + 1], count=filled[index])
        for index in range(_MAX_BARS)
    ]


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
