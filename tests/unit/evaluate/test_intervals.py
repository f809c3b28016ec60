import math
import random
from collections.abc import Callable
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.evaluate.intervals import (
    Estimate,
    accuracy_estimate,
    excludes_zero,
    mean_estimate,
    ratio_estimate,
    share_estimate,
    sign_test_p,
    t_quantile,
)

SIMULATIONS = 2000

Draw = Callable[[random.Random], Estimate]
"""Makes one random data set, and the estimate from it."""


def wilson(n: int, p: float) -> Draw:
    return lambda chance: share_estimate(sum(chance.random() < p for _ in range(n)), n)


def students(n: int) -> Draw:
    return lambda chance: mean_estimate([chance.gauss(0.4, 0.2) for _ in range(n)])


def samples_of_tasks(chance: random.Random) -> Estimate:
    """Samples of a task resemble each other, so the tasks' means are the values."""
    levels = [min(1.0, max(0.0, chance.gauss(0.5, 0.15))) for _ in range(40)]
    return accuracy_estimate([sum(chance.random() < p for _ in range(4)) / 4 for p in levels])


def paired(chance: random.Random) -> Estimate:
    pairs = [(chance.random() < 0.5, chance.random() < 0.7) for _ in range(60)]
    return mean_estimate([float(new) - float(old) for old, new in pairs])


def clusters(chance: random.Random) -> Estimate:
    """Each cluster has a level of its own, so its tokens are not independent."""
    sizes = [chance.randint(5, 40) for _ in range(60)]
    return ratio_estimate([size * chance.gauss(0.3, 0.1) for size in sizes], sizes)


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        *((wilson(n, p), p) for n, p in ((20, 0.5), (50, 0.3), (60, 0.7), (90, 0.85), (240, 0.9))),
        *((students(n), 0.4) for n in (3, 5, 10, 40)),
        (samples_of_tasks, 0.5),
        (paired, 0.2),
        (clusters, 0.3),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(
    draw: Draw, truth: float, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(20260801)
    estimates = [draw(chance) for _ in range(SIMULATIONS)]
    held = sum((e.low or 0.0) <= truth <= (e.high or 0.0) for e in estimates)

    record_property("coverage", held / SIMULATIONS)
    assert 0.93 <= held / SIMULATIONS <= 0.97


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Wilson without continuity correction, from published tables (Newcombe 1998, table I).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_a_shares_interval_is_the_published_one(
    successes: int, n: int, low: float, high: float
) -> None:
    estimate = share_estimate(successes, n)

    assert estimate.value == successes / n
    assert estimate.low == pytest.approx(low, abs=5e-5)
    assert estimate.high == pytest.approx(high, abs=5e-5)
    assert estimate.n == n


@given(st.lists(st.sampled_from([0, 0.25, 0.5, 0.75, 1]), min_size=1, max_size=60))
def test_a_perfect_group_is_never_less_certain_than_an_imperfect_one(shares: list[float]) -> None:
    perfect, group = accuracy_estimate([1.0] * len(shares)), accuracy_estimate(shares)

    assert perfect.low is not None
    assert group.low is not None
    assert group.high is not None
    assert group.low <= group.value <= group.high
    assert group.low <= perfect.low + 1e-9
    # One sample of each task is a share.
    right = [float(share >= 0.5) for share in shares]
    assert accuracy_estimate(right) == share_estimate(round(sum(right)), len(right))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_shares_interval_lies_around_it_and_within_zero_and_one(counts: tuple[int, int]) -> None:
    estimate = share_estimate(*counts)

    assert estimate.low is not None
    assert estimate.high is not None
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low < estimate.high


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [
        (1, 12.706),
        (2, 4.3027),
        (4, 2.7764),
        (5, 2.5706),
        (30, 2.0423),
        (10**9, 1.95996),
    ],
)
def test_students_quantile_is_the_one_in_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, rel=5e-3 if degrees < 5 else 5e-4)


def test_a_mean_by_hand() -> None:
    # Mean 2, variance 1, three values: half width t(2) / sqrt(3).
    estimate = mean_estimate([1.0, 2.0, 3.0])

    assert estimate.value == 2.0
    assert estimate.low == pytest.approx(2 - 4.3027 / math.sqrt(3))
    assert estimate.high == pytest.approx(2 + 4.3027 / math.sqrt(3))


@pytest.mark.parametrize("n", [2, 6, 40])
def test_values_that_are_all_the_same_leave_room_for_what_was_not_seen(n: int) -> None:
    estimate = mean_estimate([1.0] * n, limits=(-1.0, 1.0))

    # If more than this share of all tasks were otherwise, n like these had a chance below 2.5 %.
    unseen = 1 - 0.025 ** (1 / n)
    assert (estimate.value, estimate.high) == (1.0, 1.0)
    assert estimate.low == pytest.approx(1 - 2 * unseen)
    assert excludes_zero(estimate) == (sign_test_p(n, 0) <= 0.05)


def test_the_interval_of_a_mean_stays_within_its_limits() -> None:
    estimate = mean_estimate([1.0] * 11 + [0.4], limits=(-1.0, 1.0))
    assert estimate.high == 1.0
    assert estimate.low is not None
    assert -1.0 < estimate.low < estimate.value < 1.0


def test_one_value_says_nothing_of_the_spread() -> None:
    estimate = mean_estimate([0.7])

    assert estimate == Estimate(value=0.7, low=None, high=None, n=1)
    assert not excludes_zero(estimate)


def test_a_ratio_by_hand() -> None:
    # 6 nats in 4 tokens; residuals 2 - 1.5 * 2 = -1 and 4 - 1.5 * 2 = 1; variance 2 * 2 / 1 / 16.
    estimate = ratio_estimate([2.0, 4.0], [2, 2])

    assert estimate.value == 1.5
    assert estimate.low == pytest.approx(1.5 - 12.7062 * 0.5)
    assert estimate.high == pytest.approx(1.5 + 12.7062 * 0.5)
    assert estimate.n == 2


@pytest.mark.parametrize(
    ("low", "high", "excludes"),
    [
        (0.1, 0.2, True),
        (-0.2, -0.1, True),
        (-0.1, 0.1, False),
        (0.0, 0.1, False),
        (-0.1, 0.0, False),
    ],
)
def test_an_interval_that_touches_zero_does_not_exclude_it(
    low: float, high: float, excludes: bool
) -> None:
    assert excludes_zero(Estimate(value=0.0, low=low, high=high, n=9)) == excludes


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (2, 0, 0.5),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (0, 6, 0.03125),
        (5, 5, 1.0),
        # 2 * (1 + 10 + 45) / 1024
        (8, 2, 0.109375),
        # 2 * (1 + 9 + 36) / 512
        (2, 7, 0.1796875),
    ],
)
def test_a_sign_test_by_hand(wins: int, losses: int, p: float) -> None:
    assert sign_test_p(wins, losses) == p


def test_a_sign_test_of_thousands_of_tasks_still_has_a_value() -> None:
    assert 0 <= sign_test_p(3000, 100) < 1e-100
    assert sign_test_p(2000, 2000) == 1.0
    exact = 2 * sum(math.comb(2003, k) for k in range(951)) / 2**2003
    assert sign_test_p(950, 1053) == pytest.approx(exact, rel=1e-9)
    normal = 2 * NormalDist().cdf(-999 / math.sqrt(101_000))
    assert sign_test_p(50_000, 51_000) == pytest.approx(normal, rel=1e-3)


def test_a_sign_test_finds_what_is_not_there_at_most_as_often_as_it_says() -> None:
    chance = random.Random(20260801)
    found = 0
    for _ in range(SIMULATIONS):
        wins = sum(chance.random() < 0.5 for _ in range(30))
        found += sign_test_p(wins, 30 - wins) <= 0.05
    assert found / SIMULATIONS <= 0.06


@pytest.mark.parametrize(
    "estimate",
    [
        lambda: share_estimate(0, 0),
        lambda: mean_estimate([]),
        lambda: ratio_estimate([1.0], [1]),
        lambda: ratio_estimate([0.0, 0.0], [0, 0]),
    ],
)
def test_an_estimate_from_nothing_is_an_error(estimate: Callable[[], Estimate]) -> None:
    with pytest.raises(ValueError, match="at least"):
        estimate()


def test_the_interval_of_a_ratio_does_not_go_below_what_is_possible() -> None:
    sums, sizes = [0.0, 0.001, 3.0], [20, 20, 20]

    unbounded, bounded = ratio_estimate(sums, sizes), ratio_estimate(sums, sizes, lowest=0.0)

    assert unbounded.low is not None
    assert unbounded.low < 0
    assert (bounded.low, bounded.high) == (0.0, unbounded.high)
    # Of two equal models rounding may give less than nothing.
    assert ratio_estimate([-1e-9, -1e-9], [1, 1], lowest=0.0).low == -1e-9
