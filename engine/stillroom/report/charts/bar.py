"""Bar charts as plain numbers: how many rows have which value; the template draws them as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.data.distribution import Bar, Distribution, Quantiles
from stillroom.report.wording import count, number, percent

WIDTH, HEIGHT = 1000, 400
_MAX_LABELLED = 8
"""With more bars than this only the first and the last are labelled."""


@dataclass(frozen=True, slots=True)
class DrawnBar:
    """One bar, in a box of WIDTH × HEIGHT."""

    x: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Everything the template needs to draw one distribution."""

    title: str
    unit: str
    summary: str
    description: str
    """The chart in words, for screen readers."""
    bars: Sequence[DrawnBar]
    labels: Sequence[str]
    """The labels under the bars, from left to right."""
    is_labelled: bool
    """Whether every bar has a label of its own."""
    note: str | None


def distribution_chart(values: Distribution, *, title: str, unit: str) -> BarChart | None:
    """Returns the chart of a distribution, or None if it has no values."""
    quantiles = values.quantiles()
    return (
        None
        if quantiles is None
        else bar_chart(values.bars(), quantiles, values.count, title, unit)
    )


def bar_chart(
    bars: Sequence[Bar], quantiles: Quantiles, total: int, title: str, unit: str
) -> BarChart:
    """Returns the chart of bars that stand for `total` values, or for a sample of them."""
    kept = sum(bar.count for bar in bars)
    tallest = max(bar.count for bar in bars)
    step = WIDTH / len(bars)
    is_labelled = len(bars) <= _MAX_LABELLED
    drawn = [
        DrawnBar(
            x=round(index * step + step * 0.06, 1),
            width=round(step * 0.88, 1),
            # What is there can be seen.
            height=round(max(HEIGHT * bar.count / tallest, 4 if bar.count else 0), 1),
            text=f"{_range(bar)}: {percent(bar.count / kept)} of the rows",
        )
        for index, bar in enumerate(bars)
    ]
    ends = [number(bars[0].low), number(bars[-1].high)]
    summary = f"median {number(quantiles.median)}, 95 % up to {number(quantiles.p95)}"
    return BarChart(
        title=title,
        unit=unit,
        summary=summary,
        description=f"{title}: {summary}; lowest {ends[0]}, highest {ends[1]}.",
        bars=drawn,
        labels=[number(bar.low) for bar in bars] if is_labelled else ends,
        is_labelled=is_labelled,
        note=f"drawn from {count(kept)} of them, at random" if kept < total else None,
    )


def _range(bar: Bar) -> str:
    low, high = number(bar.low), number(bar.high)
    return low if low == high else f"{low} to {high}"
