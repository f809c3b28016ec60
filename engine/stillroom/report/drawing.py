"""The geometry of line and bar charts, which the templates draw as SVG.

The template stretches a chart's box of WIDTH × HEIGHT to the available space, so labels are placed
outside the box, with positions in percent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stillroom.data.distribution import Bar, Distribution, Quantiles
from stillroom.report.wording import count, number, percent

WIDTH, HEIGHT = 1000, 400
MAX_POINTS = 400
_NUM_STRIPS = 48
_MIN_POINTS_FOR_TREND = 30
"""The minimum number of points for a moving average."""
_LARGEST_VALUE = 1e100


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of a run."""

    name: str
    points: Sequence[Point]
    """The points, sorted by step."""
    num_missing: int = 0
    """The number of steps whose value is not a finite number."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis, and its position in percent from the top or left."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Strip:
    """A vertical strip of the chart, with a tooltip of its value."""

    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class LineChart:
    """The data with which the template draws one metric."""

    title: str
    unit: str
    change: str
    """The first and last value, as text."""
    overlay: str | None
    """The name and the first and last value of the second series, as text."""
    description: str
    """A description of the chart for screen readers."""
    raw: str
    trend: str | None
    """The moving average; None if there are too few points."""
    marks: Sequence[str]
    """The points of the second series, and the only point of a run with one step."""
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    strips: Sequence[Strip]
    note: str | None


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps steps and values to coordinates in the chart's box."""

    first_step: int
    last_step: int
    low: float
    high: float

    def x(self, step: int) -> float:
        span = self.last_step - self.first_step
        return WIDTH * (step - self.first_step) / span if span else WIDTH / 2

    def y(self, value: float) -> float:
        return HEIGHT * (self.high - value) / (self.high - self.low)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(p.step):.1f},{self.y(p.value):.1f}" for p in points)


def line_chart(
    series: Series, *, title: str, unit: str, overlay: Series | None = None
) -> LineChart:
    """Returns the chart of a non-empty series; `overlay` is a second series, drawn as marks."""
    points, overlaid = series.points, overlay.points if overlay else ()
    ticks = nice_ticks([point.value for point in [*points, *overlaid]])
    steps = [point.step for point in [*points, *overlaid]]
    scale = _Scale(min(steps), max(steps), ticks[0], ticks[-1])
    averaged = trend(points)
    mark_points = [*overlaid, *(points if len(points) == 1 else ())]
    return LineChart(
        title=title,
        unit=unit,
        change=_change(points),
        overlay=f"{overlay.name} {_change(overlaid)}" if overlay and overlaid else None,
        description=_description(series, title),
        raw=scale.path(thin(points)),
        trend=scale.path(thin(averaged)) if averaged else None,
        marks=[scale.path([point]) for point in thin(mark_points)],
        y_ticks=[
            Tick(round(100 * scale.y(tick) / HEIGHT, 2), text)
            for tick, text in zip(ticks, tick_texts(ticks), strict=True)
        ],
        x_ticks=_x_ticks(scale),
        strips=_strips(points, scale),
        note=_note(series),
    )


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> Sequence[Point]:
    """Returns at most `limit` points: the first, the last, and the extremes of equal segments."""
    if len(points) <= limit:
        return points
    inner, num_segments = points[1:-1], (limit - 2) // 2
    thinned = [points[0]]
    for i in range(num_segments):
        start = len(inner) * i // num_segments
        segment = inner[start : len(inner) * (i + 1) // num_segments]
        lowest_and_highest = {f(segment, key=lambda point: point.value) for f in (min, max)}
        thinned += sorted(lowest_and_highest, key=lambda point: point.step)
    return [*thinned, points[-1]]


def trend(points: Sequence[Point]) -> Sequence[Point]:
    """Returns the moving average, with a shorter window at both ends; empty for few points."""
    n = len(points)
    if n < _MIN_POINTS_FOR_TREND:
        return ()
    half = max(2, n // 25)
    sums = [0.0, *accumulate(point.value for point in points)]
    averaged: list[Point] = []
    for i, point in enumerate(points):
        start, end = max(0, i - half), min(n, i + half + 1)
        averaged.append(Point(point.step, (sums[end] - sums[start]) / (end - start)))
    return averaged


def nice_ticks(values: Sequence[float]) -> list[float]:
    """Returns three to six round numbers that enclose the values, including a nearby 0."""
    low, high = min(values), max(values)
    if 0 <= low <= 0.6 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-90):
        margin = abs(high) * 0.1
        low, high = (low - margin, high + margin) if margin else (0.0, 1.0)
    rough = (high - low) / 3
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Returns the ticks as text, with enough decimals to distinguish them."""
    texts = [number(tick) for tick in ticks]
    if len(set(texts)) == len(ticks):
        return texts
    decimals = -math.floor(math.log10(ticks[1] - ticks[0]))
    return [f"{tick:.{max(0, decimals)}f}" for tick in ticks]


def is_drawable(value: float) -> bool:
    """Returns whether a value can be placed on an axis."""
    return math.isfinite(value) and abs(value) < _LARGEST_VALUE


def _change(points: Sequence[Point]) -> str:
    first, last = number(points[0].value), number(points[-1].value)
    return first if len(points) == 1 else f"{first} → {last}"


def _description(series: Series, title: str) -> str:
    points = series.points
    first, last = points[0], points[-1]
    if len(points) == 1:
        return f"{title}: {number(first.value)} at step {first.step}."
    low, high = (f(points, key=lambda point: point.value) for f in (min, max))
    return (
        f"{title}: from {number(first.value)} at step {first.step} to {number(last.value)} at step "
        f"{last.step}; lowest {number(low.value)} at step {low.step}, highest {number(high.value)} "
        f"at step {high.step}."
    )


def _x_ticks(scale: _Scale) -> list[Tick]:
    if scale.first_step == scale.last_step:
        return [Tick(50, f"step {number(scale.first_step)}")]
    return [Tick(0, f"step {number(scale.first_step)}"), Tick(100, number(scale.last_step))]


def _strips(points: Sequence[Point], scale: _Scale) -> list[Strip]:
    """Returns strips with tooltips, evenly spaced over the points."""
    count = min(len(points), _NUM_STRIPS)
    strip_points = [points[round(i * (len(points) - 1) / max(1, count - 1))] for i in range(count)]
    width = WIDTH / count
    return [
        Strip(
            x=round(min(max(scale.x(point.step) - width / 2, 0), WIDTH - width), 1),
            width=round(width, 1),
            text=f"step {point.step}: {number(point.value)}",
        )
        for point in strip_points
    ]


def _note(series: Series) -> str | None:
    if not series.num_missing:
        return None
    steps = "1 step" if series.num_missing == 1 else f"{series.num_missing} steps"
    return f"{steps} without a finite value left out"


_MAX_LABELLED = 8
"""The maximum number of bars that are all labelled; otherwise only the first and last are."""


@dataclass(frozen=True, slots=True)
class DrawnBar:
    """One bar, in a box of WIDTH × HEIGHT."""

    x: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """The data with which the template draws one distribution."""

    title: str
    unit: str
    summary: str
    description: str
    """A description of the chart for screen readers."""
    bars: Sequence[DrawnBar]
    labels: Sequence[str]
    """The labels under the bars, from left to right."""
    is_labelled: bool
    """Whether every bar has its own label."""
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
    """Returns a chart of the bars, which count `total` values or a sample of them."""
    num_counted = sum(bar.count for bar in bars)
    tallest = max(bar.count for bar in bars)
    step = WIDTH / len(bars)
    is_labelled = len(bars) <= _MAX_LABELLED
    drawn_bars = [
        DrawnBar(
            x=round(index * step + step * 0.06, 1),
            width=round(step * 0.88, 1),
            # A non-empty bar is at least 4 units high, so that it is visible.
            height=round(max(HEIGHT * bar.count / tallest, 4 if bar.count else 0), 1),
            text=f"{_range(bar)}: {percent(bar.count / num_counted)} of the rows",
        )
        for index, bar in enumerate(bars)
    ]
    extremes = [number(bars[0].low), number(bars[-1].high)]
    summary = f"median {number(quantiles.median)}, 95th percentile {number(quantiles.p95)}"
    return BarChart(
        title=title,
        unit=unit,
        summary=summary,
        description=f"{title}: {summary}; lowest {extremes[0]}, highest {extremes[1]}.",
        bars=drawn_bars,
        labels=[number(bar.low) for bar in bars] if is_labelled else extremes,
        is_labelled=is_labelled,
        note=f"a random sample of {count(num_counted)} values" if num_counted < total else None,
    )


def _range(bar: Bar) -> str:
    low, high = number(bar.low), number(bar.high)
    return low if low == high else f"{low} to {high}"
