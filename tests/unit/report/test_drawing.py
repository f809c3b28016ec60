"""Charts keep what matters of a curve, whatever the numbers."""

import random

import pytest

from stillroom.report.drawing import (
    MAX_POINTS,
    Point,
    Series,
    line_chart,
    nice_ticks,
    thin,
    tick_texts,
)


def test_long_runs_are_thinned_without_losing_their_extremes() -> None:
    values = [random.Random(0).random() for _ in range(20_000)]
    values[777], values[15_001] = 9.0, -9.0
    points = [Point(step, value) for step, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {9.0, -9.0} <= {point.value for point in kept}
    assert [point.step for point in kept] == sorted(point.step for point in kept)
    chart = line_chart(Series("loss", points), title="Loss", unit="nats")
    assert len(chart.raw.split()) <= MAX_POINTS


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert nice_ticks([0.02, 0.41]) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert nice_ticks([46, 60]) == pytest.approx([45, 50, 55, 60])
    for values in ([0.0], [5.0, 5.0], [-3.0], [1e-300], [1e99, -1e99], [1.0, 1.0 + 1e-12]):
        ticks = nice_ticks(values)
        assert ticks[0] <= min(values) <= max(values) <= ticks[-1]
        assert 2 <= len(ticks) <= 8


def test_ticks_have_as_many_decimals_as_tell_them_apart() -> None:
    assert tick_texts([0.996, 0.998, 1.0, 1.002]) == ["0.996", "0.998", "1.000", "1.002"]
    assert tick_texts([0, 0.2, 0.4]) == ["0", "0.2", "0.4"]
    assert nice_ticks([0.0, 0.0])[0] == 0
