"""Distributions of any number of values in constant memory."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

_MAX_BARS = 24
_MAX_PENDING = 4096
"""Values that wait to be counted: many at once are counted fastest."""
_MAX_COUNTED = 8192
_STEPS = 512


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in five numbers."""

    low: float
    median: float
    p95: float
    high: float
    mean: float


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """How many values lie from `low` to `high`: one value where they are the same."""

    low: float
    high: float
    count: int


class Distribution:
    """Counts values: up to some thousand different ones exactly, more in steps of 0.2 %.

    The lowest and highest value and the mean are exact.
    """

    def __init__(self) -> None:
        self._pending: list[float] = []
        self._counts: Counter[float] = Counter()
        self._total = 0.0
        self._low, self._high = math.inf, -math.inf

    @property
    def count(self) -> int:
        """The number of values that were taken in."""
        return self._counts.total() + len(self._pending)

    def add(self, value: float) -> None:
        """Takes in one finite value."""
        self._pending.append(value)
        if len(self._pending) == _MAX_PENDING:
            self._count_pending()

    def joined(self, other: "Distribution") -> "Distribution":
        """Returns the distribution of the values of both."""
        self._count_pending()
        other._count_pending()
        both = Distribution()
        both._counts = self._counts + other._counts
        both._total = self._total + other._total
        both._low, both._high = min(self._low, other._low), max(self._high, other._high)
        return both

    def quantiles(self) -> Quantiles | None:
        """Returns the distribution in five numbers; None of no values."""
        self._count_pending()
        if not self._counts:
            return None
        ordered = sorted(self._counts)
        return Quantiles(
            low=self._low,
            median=self._at(ordered, 0.5),
            p95=self._at(ordered, 0.95),
            high=self._high,
            mean=self._total / self.count,
        )

    def bars(self) -> list[Bar]:
        """Returns bars that hold every value once; the last one takes in what lies far above.

        A few different values have a bar each, many lie in bars of equal width.
        """
        self._count_pending()
        counts = self._counts
        if len(counts) <= _MAX_BARS // 2:
            return [Bar(low=value, high=value, count=counts[value]) for value in sorted(counts)]
        low, high = self._low, self._high
        # A few very large values must not press all others into one bar.
        top = min(high, max(self._at(sorted(counts), 0.99) * 1.25, low + 1e-9))
        width = (top - low) / _MAX_BARS
        filled: Counter[int] = Counter()
        for value, count in counts.items():
            filled[min(_MAX_BARS - 1, int((max(value, low) - low) / width))] += count
        edges = [low + width * index for index in range(_MAX_BARS)] + [high]
        return [
            Bar(low=edges[index], high=edges[index + 1], count=filled[index])
            for index in range(_MAX_BARS)
        ]

    def _count_pending(self) -> None:
        values = self._pending
        if not values:
            return
        self._counts.update(values)
        self._total += sum(values)
        self._low = min([self._low, *values])
        self._high = max([self._high, *values])
        values.clear()
        if len(self._counts) > _MAX_COUNTED:
            self._fold()

    def _fold(self) -> None:
        """Counts values that differ by less than 0.2 % as one."""
        folded: Counter[float] = Counter()
        for value, count in self._counts.items():
            mantissa, exponent = math.frexp(value)
            folded[math.ldexp(round(mantissa * _STEPS) / _STEPS, exponent)] += count
        self._counts = folded

    def _at(self, ordered: Sequence[float], share: float) -> float:
        """Returns the value below which this share of all values lies."""
        rank, passed = int(share * self._counts.total()), 0
        for value in ordered:
            passed += self._counts[value]
            if passed > rank:
                return min(max(value, self._low), self._high)
        return self._high
