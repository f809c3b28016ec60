import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.curate.filter.distributions import Histogram
from stillroom.data.distribution import quantiles


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for start in range(0, len(values), 4_000):
        histogram.add(values[start : start + 4_000])
    return histogram


@given(st.lists(st.floats(-1e6, 1e6) | st.integers(-9, 9)), st.integers(0, 50))
def test_of_few_values_the_quantiles_are_exact(values: list[float], cut: int) -> None:
    joined = histogram_of(values[:cut]).joined(histogram_of(values[cut:])).quantiles()
    expected = quantiles(values)

    if expected is None:
        assert joined is None
    else:
        assert joined is not None
        assert (joined.low, joined.median, joined.p95, joined.high) == (
            expected.low, expected.median, expected.p95, expected.high,
        )  # fmt: skip
        assert joined.mean == pytest.approx(expected.mean, abs=1e-6)


def test_asking_between_values_changes_nothing() -> None:
    values = [float(index % 700) for index in range(9_000)]
    asked, unasked = Histogram(), histogram_of(values)

    for index, value in enumerate(values):
        asked.add([value])
        if index % 1_000 == 0:
            asked.quantiles()

    assert asked.quantiles() == unasked.quantiles() == quantiles(values)


def test_of_many_values_they_are_near_and_the_ends_exact() -> None:
    chance = random.Random(1)
    values = [chance.lognormvariate(0, 2) * chance.choice([-1, 1]) for _ in range(40_000)]

    found, expected = histogram_of(values).quantiles(), quantiles(values)

    assert found is not None
    assert expected is not None
    assert (found.low, found.high) == (expected.low, expected.high)
    assert found.p95 == pytest.approx(expected.p95, rel=0.01)
    assert found.median == pytest.approx(expected.median, abs=0.02)
