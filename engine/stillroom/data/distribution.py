"""Distributions of any number of values, in constant memory."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

_MAX_BARS = 24
_MAX_PENDING = 4096
"""The number of values that are counted together, because counting in bulk is faster."""
_MAX_COUNTED = 8192
_STEPS = 512


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a distribution: its extremes, median, 95th percentile and mean."""

    low: float
    median: float
    p95: float
    high: float
    mean: float


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A bar of a histogram: the number of values from `low` to `high`, which may be the same."""

    low: float
    high: float
    count: int


class Distribution:
    """A distribution to which values are added one by one.

    It is exact for up to 8192 different values; beyond that, values that differ by less than about
    0.2 % are counted as one. The extremes and the mean are always exact.
    """

    def __init__(self) -> None:
        self._pending: list[float] = []
        self._counts: Counter[float] = Counter()
        self._total = 0.0
        self._low, self._high = math.inf, -math.inf

    @property
    def count(self) -> int:
        """The number of values that were added."""
        return self._counts.total() + len(self._pending)

    def add(self, value: float) -> None:
        """Adds one value, which must be finite."""
        self._pending.append(value)
        if len(self._pending) == _MAX_PENDING:
            self._count_pending()

    def merged(self, other: "Distribution") -> "Distribution":
        """Returns a new distribution with the values of both."""
        self._count_pending()
        other._count_pending()
        both = Distribution()
        both._counts = self._counts + other._counts
        both._total = self._total + other._total
        both._low, both._high = min(self._low, other._low), max(self._high, other._high)
        return both

    def quantiles(self) -> Quantiles | None:
        """Returns the summary of the distribution; None if it has no values."""
        self._count_pending()
        if not self._counts:
            return None
        ordered = sorted(self._counts)
        return Quantiles(
            low=self._low,
            median=self._quantile(ordered, 0.5),
            p95=self._quantile(ordered, 0.95),
            high=self._high,
            mean=self._total / self.count,
        )

    def bars(self) -> list[Bar]:
        """Returns the bars of a histogram; each value is in one bar.

        Up to 12 different values have a bar each. More values share 24 bars of equal width; only
        the last bar may be wider, up to the highest value.
        """
        self._count_pending()
        counts = self._counts
        if len(counts) <= _MAX_BARS // 2:
            return [Bar(low=value, high=value, count=counts[value]) for value in sorted(counts)]
        low, high = self._low, self._high
        # A few very large values must not squeeze all others into one bar.
        # If nearly all of them are the lowest value, the bars divide the whole range.
        most = (self._quantile(sorted(counts), 0.99) - low) * 1.25
        span = min(high - low, most or math.inf)
        filled: Counter[int] = Counter()
        for value, count in counts.items():
            position = min(max(value - low, 0.0), span) / span
            filled[min(_MAX_BARS - 1, int(position * _MAX_BARS))] += count
        edges = [low + span * index / _MAX_BARS for index in range(_MAX_BARS)] + [high]
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
            self._merge_close_values()

    def _merge_close_values(self) -> None:
        """Counts values that differ by less than about 0.2 % as one."""
        merged: Counter[float] = Counter()
        for value, count in self._counts.items():
            mantissa, exponent = math.frexp(value)
            merged[math.ldexp(round(mantissa * _STEPS) / _STEPS, exponent)] += count
        self._counts = merged

    def _quantile(self, ordered: Sequence[float], share: float) -> float:
        """Returns the quantile of a share (0 to 1); `ordered` are the counted values, sorted."""
        rank, num_values = int(share * self._counts.total()), 0
        for value in ordered:
            num_values += self._counts[value]
            if num_values > rank:
                return min(max(value, self._low), self._high)
        return self._high
