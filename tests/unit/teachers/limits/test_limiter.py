import anyio
import anyio.lowlevel
import pytest

from fakes.waiting import run_async
from stillroom.teachers.limits.limit_types import LimitKind, LimitSettings
from stillroom.teachers.limits.limiter import Limiter


def test_calls_go_in_the_order_in_which_they_asked() -> None:
    async def main() -> list[int]:
        limiter, order = Limiter(LimitSettings(start=2, most=2)), []

        async def call(number: int) -> None:
            sent = await limiter.acquire()
            order.append(number)
            await anyio.lowlevel.checkpoint()
            limiter.accepted(sent)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(call, number)
        return order

    assert run_async(main) == list(range(8))


def test_no_more_are_out_than_the_window_allows() -> None:
    async def main() -> int:
        limiter, out, most = Limiter(LimitSettings(start=3, most=3)), 0, 0

        async def call() -> None:
            nonlocal out, most
            sent = await limiter.acquire()
            out += 1
            most = max(most, out)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            out -= 1
            limiter.failed(sent)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(call)
        return most

    assert run_async(main) == 3


def test_a_call_that_is_cancelled_while_it_waits_holds_up_nobody() -> None:
    async def main() -> bool:
        limiter = Limiter(LimitSettings(start=1, most=1))
        first = await limiter.acquire()
        was_served = anyio.Event()

        async def patient() -> None:
            limiter.accepted(await limiter.acquire())
            was_served.set()

        async with anyio.create_task_group() as group:
            impatient = anyio.create_task_group()
            async with impatient:
                impatient.start_soon(limiter.acquire)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(patient)
                await anyio.wait_all_tasks_blocked()
                impatient.cancel_scope.cancel()
            limiter.accepted(first)
            with anyio.fail_after(60):
                await was_served.wait()
        return was_served.is_set()

    assert run_async(main)


@pytest.mark.parametrize("refusals", [0, 1])
def test_what_it_does_now_can_be_shown(refusals: int) -> None:
    async def main() -> tuple[int, float | None]:
        limiter = Limiter(LimitSettings(start=4, most=8))
        sent = [await limiter.acquire() for _ in range(4)]
        limiter.accepted(sent[0])
        for one in sent[1 : 1 + refusals]:
            limiter.refused(one, LimitKind.REQUESTS)
        return limiter.window, limiter.pace

    window, pace = run_async(main)
    assert 4 <= window <= 8
    assert (pace is not None) == bool(refusals)
