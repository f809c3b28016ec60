import math
import random
from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.waiting import run_async
from stillroom.teachers.budget import Budget, BudgetSpentError, Cost, Outstanding

WORST = Cost(tokens=60, usd=0.5)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def with_budget(budget: Budget, use: Callable[[Budget], Awaitable[None]]) -> Budget:
    run_async(use, budget)
    return budget


def limit_met(budget: Budget, worst: Cost) -> str | None:
    """The limit that refuses a call, or None if it may be sent."""

    async def main() -> str | None:
        try:
            await budget.reserve(worst)
        except BudgetSpentError as spent:
            return spent.limit
        return None

    return run_async(main)


async def a_while() -> None:
    for _ in range(20):
        await checkpoint()


def waiting_for(
    waiting: list[int], reserved: list[int], settled: list[int], *, tokens: int = 100
) -> list[list[str | int]]:
    """After each settled call, what the calls that wait for it have come to by then.

    That is what was spent when a call was sent, or the limit that refused it.
    """
    outcomes: list[str | int] = []
    seen: list[list[str | int]] = []

    async def wait_for_it(budget: Budget, worst: int) -> None:
        try:
            await budget.reserve(Cost(tokens=worst))
            outcomes.append(budget.spent.tokens)
        except BudgetSpentError as spent:
            outcomes.append(spent.limit)

    async def use(budget: Budget) -> None:
        for worst in reserved:
            await budget.reserve(Cost(tokens=worst))
        async with anyio.create_task_group() as group:
            for worst in waiting:
                group.start_soon(wait_for_it, budget, worst)
            await a_while()
            assert outcomes == []
            for worst, actual in zip(reserved, settled, strict=True):
                budget.settle(Cost(tokens=worst), Cost(tokens=actual))
                await a_while()
                seen.append([*outcomes])

    with_budget(Budget(tokens=tokens), use)
    return seen


@pytest.mark.parametrize(
    ("waiting", "reserved", "settled", "seen"),
    [
        ([60], [60], [10], [[10]]),
        # As many others as it must.
        ([90], [30, 30, 30], [1, 1, 1], [[], [], [3]]),
        # One call that gives back enough lets all go.
        ([30, 30, 30], [90], [0], [[0, 0, 0]]),
        # A call that waited in vain is refused.
        ([60], [60], [60], [["max_total_tokens"]]),
    ],
)
def test_a_call_waits_until_others_have_given_back_enough(
    waiting: list[int], reserved: list[int], settled: list[int], seen: list[list[str | int]]
) -> None:
    assert waiting_for(waiting, reserved, settled) == seen


@pytest.mark.parametrize(
    ("budget", "worst", "limit"),
    [
        (Budget(usd=0.5), Cost(usd=0.5), None),
        (Budget(usd=0.5), Cost(usd=0.75), "budget_usd"),
        (Budget(tokens=60), Cost(tokens=60), None),
        (Budget(tokens=60), Cost(tokens=61), "max_total_tokens"),
        (Budget(), Cost(tokens=1 << 60, usd=1e12), None),
        (Budget(usd=1, spent=Cost(usd=0.75)), WORST, "budget_usd"),
        (Budget(tokens=100, spent=Cost(tokens=40)), WORST, None),
        (Budget(tokens=100, spent=Cost(tokens=41)), WORST, "max_total_tokens"),
        (Budget(tokens=100, spent=Cost(tokens=400)), Cost(), "max_total_tokens"),
    ],
)
def test_a_call_that_never_fits_is_refused_at_once_and_earlier_spend_counts(
    budget: Budget, worst: Cost, limit: str | None
) -> None:
    assert limit_met(budget, worst) == limit
    assert budget.num_reserved == (limit is None)


def test_the_minutes_begin_with_the_first_call() -> None:
    clock = Clock()
    budget = Budget(minutes=2, clock=clock)
    clock.now_s += 3600
    assert limit_met(budget, WORST) is None

    clock.now_s += 119.5
    assert limit_met(budget, WORST) is None
    clock.now_s += 0.5
    # Others are still out, but they give no time back.
    assert limit_met(budget, WORST) == "max_minutes"
    assert budget.num_reserved == 2


CALLS = st.tuples(st.integers(0, 40), st.floats(0, 1), st.booleans())


@pytest.mark.thorough
@settings(max_examples=100)
@given(st.lists(CALLS, min_size=1, max_size=150), st.integers(0, 400), st.integers(0, 2**32))
def test_no_order_of_calls_spends_more_than_the_limit_or_waits_for_ever(
    calls: list[tuple[int, float, bool]], limit: int, seed: int
) -> None:
    # Dollars in eighths, so that their sums are exact.
    budget = Budget(tokens=limit, usd=limit / 8)
    pause = random.Random(seed)
    waiting = iter(calls)
    num_sent = num_refused = 0

    async def work() -> None:
        nonlocal num_sent, num_refused
        for most, share, is_broken in waiting:
            worst, actual = Cost(most, most / 8), Cost(int(most * share), int(most * share) / 8)
            try:
                await budget.reserve(worst)
            except BudgetSpentError:
                num_refused += 1
                continue
            num_sent += 1
            for _ in range(pause.randrange(4)):
                await checkpoint()
            if is_broken:
                budget.settle_unconfirmed(worst)
            else:
                budget.settle(worst, actual)
            assert budget.spent.tokens + budget.reserved.tokens <= limit

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(64):
                group.start_soon(work)

    run_async(main)
    assert num_sent + num_refused == len(calls)
    assert budget.spent.tokens <= limit
    assert budget.spent.usd <= limit / 8
    assert (budget.reserved, budget.num_reserved) == (Cost(), 0)


ORDERS = st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=300)


@settings(max_examples=100)
@given(ORDERS, st.integers(0, 2**32), st.sampled_from([math.inf, 1000]))
def test_what_is_out_is_never_more_than_was_told_before(
    calls: list[tuple[int, bool]], seed: int, limit: float
) -> None:
    reported = [Outstanding()]
    budget = Budget(tokens=limit, usd=limit / 8, on_outstanding=reported.append)
    order, out = random.Random(seed), list[Cost]()

    async def main() -> None:
        for most, is_sent in calls:
            worst = Cost(most, most / 8)
            if (budget.spent + budget.reserved + worst).tokens > limit:
                break
            await budget.reserve(worst)
            if not is_sent:
                budget.release(worst)
                continue
            budget.record_sent(worst)
            out.append(worst)
            # Answered calls leave more room than their worst case.
            while out and order.random() < 0.45:
                budget.settle(done := out.pop(order.randrange(len(out))), Cost(done.tokens // 2))
            assert reported[-1].calls >= len(out)
            assert reported[-1].worst.tokens >= sum(cost.tokens for cost in out)
            assert reported[-1].worst.usd >= sum(cost.usd for cost in out)

    run_async(main)


def told_of(waves: list[int], *, usd: float = math.inf) -> list[Outstanding]:
    """What is told of so many calls out at once, a wave after the other."""
    reported: list[Outstanding] = []
    budget = Budget(usd=usd, on_outstanding=reported.append)

    async def main() -> None:
        for wave in waves:
            for _ in range(wave):
                await budget.reserve(WORST)
                budget.record_sent(WORST)
            for _ in range(wave):
                budget.settle(WORST, Cost())

    run_async(main)
    return reported


def test_it_is_told_seldom_and_not_much_too_high() -> None:
    reported = told_of([256] * 20)

    assert len(reported) <= 30
    assert reported[-1].calls <= 1.25 * 256 + 1
    assert reported[-1].worst.usd <= 1.25 * reported[-1].calls * WORST.usd


def test_a_peak_is_forgotten_after_a_while() -> None:
    assert told_of([100] + [1] * 130)[-1].calls <= 2


def test_no_more_than_can_be_spent_is_told() -> None:
    assert told_of([9], usd=4.75)[-1] == Outstanding(10, Cost(tokens=600, usd=4.75))
