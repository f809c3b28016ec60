import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.distribution import Bar, Distribution


def distribution_of(values: Iterable[float]) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


def test_a_distribution_of_no_values_is_none() -> None:
    assert distribution_of([]).quantiles() is None
    assert distribution_of([]).bars() == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_quantiles_are_values_in_their_order(values: list[float]) -> None:
    found = distribution_of(values).quantiles()

    assert found is not None
    five = [found.low, found.median, found.p95, found.high]
    assert set(five) <= set(values)
    assert all(one <= other for one, other in itertools.pairwise(five))
    assert min(values) == found.low
    assert max(values) == found.high
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert sum(value <= found.median for value in values) >= len(values) / 2
    assert sum(value >= found.median for value in values) >= len(values) / 2


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_bars_hold_every_value_once(values: list[float]) -> None:
    found = distribution_of(values).bars()

    assert sum(bar.count for bar in found) == len(values)
    assert found[0].low == min(values)
    assert found[-1].high == max(values)
    assert len(found) <= 24


def test_a_few_values_have_a_bar_each_and_one_far_off_does_not_hide_the_others() -> None:
    few = distribution_of([1, 0, 1]).bars()
    assert [(bar.low, bar.high, bar.count) for bar in few] == [(0, 0, 1), (1, 1, 2)]

    found = distribution_of([*range(1000), 1e9]).bars()

    assert max(bar.count for bar in found) < 60


@pytest.mark.parametrize("lowest", [-1.0, -1e8, 0.0, 1e8])
@pytest.mark.parametrize("step", [0.01, 1e5])
def test_evenly_spaced_values_are_spread_over_the_bars(lowest: float, step: float) -> None:
    values = {lowest + step * number for number in range(20)}

    found = distribution_of(values).bars()

    assert max(bar.count for bar in found) == 1


def test_bars_divide_the_whole_range_if_nearly_all_values_are_the_lowest() -> None:
    found = distribution_of([-5.0] * 5000 + list(range(20))).bars()

    assert found[0] == Bar(low=-5, high=-4, count=5000)
    assert [bar.count for bar in found[5:]] == [1] * 18 + [2]


@given(st.lists(st.floats(-1e6, 1e6) | st.integers(-9, 9)), st.integers(0, 50))
def test_joined_distributions_are_that_of_all_values(values: list[float], cut: int) -> None:
    joined = distribution_of(values[:cut]).merged(distribution_of(values[cut:]))
    expected = distribution_of(values)

    assert joined.count == len(values)
    assert joined.bars() == expected.bars()
    found, whole = joined.quantiles(), expected.quantiles()
    if whole is None:
        assert found is None
    else:
        assert found is not None
        assert (found.low, found.median, found.p95, found.high) == (
            whole.low, whole.median, whole.p95, whole.high,
        )  # fmt: skip
        assert found.mean == pytest.approx(whole.mean, abs=1e-6)


def test_many_different_values_take_constant_memory_and_are_near_with_exact_ends() -> None:
    chance = random.Random(1)
    values = [chance.lognormvariate(0, 2) * chance.choice([-1, 1]) for _ in range(100_000)]

    distribution = distribution_of(values)
    found, ordered = distribution.quantiles(), sorted(values)

    assert found is not None
    assert (found.low, found.high) == (ordered[0], ordered[-1])
    assert found.p95 == pytest.approx(ordered[95_000], rel=0.01)
    assert found.median == pytest.approx(ordered[50_000], abs=0.02)
    assert sum(bar.count for bar in distribution.bars()) == 100_000
    assert len(distribution._counts) < 20_000
