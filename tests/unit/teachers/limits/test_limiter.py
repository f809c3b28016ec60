import anyio
import anyio.lowlevel
import pytest

from fakes.waiting import run_async
from stillroom.teachers.limits.limit_types import LimitSettings
from stillroom.teachers.limits.limiter import Limiter


@pytest.mark.parametrize("most", [2, 3])
def test_calls_go_in_their_order_and_no_more_than_the_window_allows(most: int) -> None:
    async def main() -> tuple[list[int], int]:
        limiter, order = Limiter(LimitSettings(initial_in_flight=most, max_in_flight=most)), []
        num_out = most_out = 0

        async def call(number: int) -> None:
            nonlocal num_out, most_out
            sent = await limiter.acquire()
            order.append(number)
            num_out += 1
            most_out = max(most_out, num_out)
            await anyio.lowlevel.checkpoint()
            num_out -= 1
            (limiter.record_accepted if number % 2 else limiter.record_failed)(sent)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(call, number)
        return order, most_out

    assert run_async(main) == (list(range(20)), most)


def test_a_call_that_is_cancelled_while_it_waits_holds_up_nobody() -> None:
    async def main() -> bool:
        limiter = Limiter(LimitSettings(initial_in_flight=1, max_in_flight=1))
        first = await limiter.acquire()
        was_served = anyio.Event()

        async def patient() -> None:
            limiter.record_accepted(await limiter.acquire())
            was_served.set()

        async with anyio.create_task_group() as group:
            impatient = anyio.create_task_group()
            async with impatient:
                impatient.start_soon(limiter.acquire)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(patient)
                await anyio.wait_all_tasks_blocked()
                impatient.cancel_scope.cancel()
            limiter.record_accepted(first)
            with anyio.fail_after(60):
                await was_served.wait()
        return was_served.is_set()

    assert run_async(main)
