"""Calls that something holds back: what they cost then, and how long they wait."""

from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from fakes.chat_endpoint import ScriptedChannel
from fakes.rollout_rows import user
from fakes.waiting import run_async
from stillroom.teachers.budget import Budget, BudgetSpentError
from stillroom.teachers.endpoint.client import CallSettings, OpenAITeacher, Spending
from stillroom.teachers.limits.limit_types import LimitSettings
from stillroom.teachers.providers import Endpoint
from stillroom.types import SamplingSettings

ENDPOINT = Endpoint("http://teacher.test/v1", None)


def hold_up(**limits: Any) -> Budget:
    """The budget after one call hangs at the endpoint and another is ended while it queues."""

    async def silent(_request: httpx.Request) -> httpx.Response:
        sent.set()
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def call(teacher: OpenAITeacher) -> None:
        try:
            await teacher.complete([user("hi")], [])
        except BudgetSpentError as spent:
            limits_met.append(spent.limit)
            scopes[0].cancel()

    sent, limits_met = anyio.Event(), list[str]()
    budget = Budget(**limits)
    calls = CallSettings(timeout_s=60, limits=LimitSettings(start=1, most=1))
    teacher = OpenAITeacher(
        ENDPOINT,
        "m",
        SamplingSettings(),
        calls=calls,
        spending=Spending(budget=budget),
        channel=ScriptedChannel(silent),
    )
    scopes: list[anyio.CancelScope] = []

    async def main() -> None:
        async with teacher, anyio.create_task_group() as group:
            scopes.append(group.cancel_scope)
            group.start_soon(call, teacher)
            await sent.wait()
            group.start_soon(call, teacher)
            while budget.num_reserved < 2:
                await anyio.lowlevel.checkpoint()
            if "minutes" not in limits:
                group.cancel_scope.cancel()

    run_async(main)
    assert limits_met == (["max_minutes"] if "minutes" in limits else [])
    return budget


@pytest.mark.parametrize("limits", [{}, {"minutes": 0.002}])
def test_a_call_that_ends_while_it_queues_was_not_sent(limits: dict[str, float]) -> None:
    budget = hold_up(**limits)

    # The call that hung counts, and only that.
    assert budget.num_reserved == 0
    assert SamplingSettings().max_tokens < budget.spent.tokens < 2 * SamplingSettings().max_tokens


def test_no_call_waits_for_a_rate_limit_longer_than_the_minutes_of_the_run() -> None:
    async def busy(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers={"retry-after": "600"})

    async def main() -> None:
        teacher = OpenAITeacher(
            ENDPOINT,
            "m",
            SamplingSettings(),
            spending=Spending(budget=Budget(minutes=0.001)),
            channel=ScriptedChannel(busy),
        )
        async with teacher:
            await teacher.complete([user("hi")], [])

    with pytest.raises(BudgetSpentError) as caught:
        run_async(main)
    assert caught.value.limit == "max_minutes"
