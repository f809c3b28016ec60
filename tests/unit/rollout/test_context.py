from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fakes.loops import run_async
from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.scripted_policy import ScriptedPolicy, turn
from stillroom.rollout.context import MeteredConversation, MeteredPolicy
from stillroom.teachers.budget import Budget, BudgetSpentError, Cost

MAX_TOKENS = 50
CALLS: Any = assistant(None, tool_call())
Use = Callable[[MeteredConversation], Awaitable[None]]


def converse(budget: Budget, script: list[Any], use: Use, *, prompt: str = "hi") -> None:
    policy = MeteredPolicy(ScriptedPolicy(lambda _key: script), budget, MAX_TOKENS)

    async def main() -> None:
        async with policy.converse([user(prompt)], [], seed_key="t:0") as conversation:
            await use(conversation)

    run_async(main)


def test_a_turn_is_sampled_only_if_its_worst_case_is_left() -> None:
    async def use(conversation: MeteredConversation) -> None:
        await conversation.sample()

    enough = Budget(tokens=2000)
    converse(enough, [turn(assistant("7"))], use, prompt="x" * 1000)
    assert (enough.spent, enough.num_reserved) == (Cost(tokens=15), 0)
    with pytest.raises(BudgetSpentError) as caught:
        converse(Budget(tokens=1000), [turn(assistant("7"))], use, prompt="x" * 1000)
    assert caught.value.limit == "max_total_tokens"


def test_what_came_before_counts_with_the_next_turn() -> None:
    async def use(conversation: MeteredConversation) -> None:
        first = turn(CALLS)
        if is_restored:
            conversation.restore(first)
        else:
            await conversation.sample()
        conversation.reply(CALLS, [tool_reply("y" * 1000)])
        with pytest.raises(BudgetSpentError):
            await conversation.sample()

    for is_restored in (False, True):
        budget = Budget(tokens=1000)
        converse(budget, [turn(CALLS), turn(assistant("7"))], use)
        assert budget.spent.tokens == (0 if is_restored else 15)


def test_a_turn_that_breaks_off_costs_nothing() -> None:
    async def use(conversation: MeteredConversation) -> None:
        with pytest.raises(RuntimeError):
            await conversation.sample()

    budget = Budget(tokens=1000)
    converse(budget, [RuntimeError()], use)
    assert (budget.spent, budget.num_reserved) == (Cost(), 0)
