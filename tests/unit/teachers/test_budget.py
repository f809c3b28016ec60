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


def test_the_worst_case_is_set_aside_before_a_call_is_sent() -> None:
    async def use(budget: Budget) -> None:
        await budget.reserve(WORST)
        assert (budget.reserved, budget.spent) == (WORST, Cost())
        budget.settle(WORST, Cost(tokens=7, usd=0.125))

    budget = with_budget(Budget(usd=1, tokens=100), use)

    assert (budget.reserved, budget.spent) == (Cost(), Cost(tokens=7, usd=0.125))
    assert (budget.num_reserved, budget.unconfirmed) == (0, Cost())


def test_a_call_waits_until_another_has_given_back_what_it_did_not_need() -> None:
    order: list[str] = []

    async def wait_for_it(budget: Budget) -> None:
        await budget.reserve(WORST)
        order.append("second is sent")

    async def use(budget: Budget) -> None:
        await budget.reserve(WORST)
        async with anyio.create_task_group() as group:
            group.start_soon(wait_for_it, budget)
            await a_while()
            order.append("first is settled")
            budget.settle(WORST, Cost(tokens=10))

    with_budget(Budget(tokens=100), use)

    assert order == ["first is settled", "second is sent"]


def test_a_call_waits_through_as_many_others_as_it_must() -> None:
    sent: list[int] = []

    async def wait_for_it(budget: Budget) -> None:
        await budget.reserve(Cost(tokens=90))
        sent.append(budget.spent.tokens)

    async def use(budget: Budget) -> None:
        for _ in range(3):
            await budget.reserve(Cost(tokens=30))
        async with anyio.create_task_group() as group:
            group.start_soon(wait_for_it, budget)
            for _ in range(3):
                await a_while()
                assert sent == []
                budget.settle(Cost(tokens=30), Cost(tokens=1))

    with_budget(Budget(tokens=100), use)

    assert sent == [3]


def test_all_who_wait_are_sent_by_one_call_that_gives_back_enough() -> None:
    sent: list[int] = []

    async def wait_for_it(budget: Budget, number: int) -> None:
        await budget.reserve(Cost(tokens=30))
        sent.append(number)

    async def use(budget: Budget) -> None:
        await budget.reserve(Cost(tokens=90))
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(wait_for_it, budget, number)
                await a_while()
            budget.settle(Cost(tokens=90), Cost())

    with_budget(Budget(tokens=100), use)

    assert sorted(sent) == [0, 1, 2]


def test_a_call_that_waited_in_vain_is_refused() -> None:
    met: list[str] = []

    async def wait_for_it(budget: Budget) -> None:
        with pytest.raises(BudgetSpentError) as caught:
            await budget.reserve(WORST)
        met.append(caught.value.limit)

    async def use(budget: Budget) -> None:
        await budget.reserve(WORST)
        async with anyio.create_task_group() as group:
            group.start_soon(wait_for_it, budget)
            await a_while()
            budget.settle(WORST, WORST)

    with_budget(Budget(tokens=100), use)

    assert met == ["max_total_tokens"]


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


def test_a_call_that_broke_off_counts_in_full_and_is_told_apart() -> None:
    async def use(budget: Budget) -> None:
        await budget.reserve(WORST)
        budget.settle_unconfirmed(WORST)
        await budget.reserve(Cost(tokens=10))
        budget.settle(Cost(tokens=10), Cost(tokens=4))

    budget = with_budget(Budget(usd=0.75, tokens=100), use)

    assert (budget.spent, budget.unconfirmed) == (Cost(tokens=64, usd=0.5), WORST)
    assert limit_met(budget, WORST) == "budget_usd"


CALLS = st.tuples(st.integers(0, 40), st.floats(0, 1), st.booleans())


@settings(deadline=None, max_examples=100)
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


@settings(deadline=None, max_examples=100)
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
                budget.give_back(worst)
                continue
            budget.send(worst)
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
                budget.send(WORST)
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
