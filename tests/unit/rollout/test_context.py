from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.docker_cli import install_docker
from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.scripted_policy import ScriptedPolicy, turn
from fakes.waiting import run_async
from stillroom.data.formats import task_from_row
from stillroom.rollout.context import (
    MeteredConversation,
    MeteredPolicy,
    open_tools_and_rewards,
)
from stillroom.rollout.plan import ToolsPlan
from stillroom.rollout.request import RolloutOptions
from stillroom.settings import Workspace
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
        conversation.add_responses(CALLS, [tool_reply("y" * 1000)])
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


def test_the_server_of_the_rows_containers_is_not_opened_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Dockerfile.shop").write_text("FROM shop\n", "utf-8")
    fake = install_docker(tmp_path / "engine")
    monkeypatch.setenv("PATH", f"{tmp_path / 'engine' / 'bin'}:/usr/bin:/bin")
    # As rnow's template for browsing agents has it.
    options = RolloutOptions(model="m", mcp_servers=("localhost:8931",))
    task = task_from_row({"prompt": "a", "docker": "local/shop", "docker_env": {"LAMP": "red"}})

    async def main() -> tuple[list[str], Sequence[str]]:
        servers = options.mcp_servers
        plan = ToolsPlan(Workspace(tmp_path), options, options.model, servers, None, None)
        async with open_tools_and_rewards(plan, [task]) as opened:
            assert opened.tools is not None
            return [one["function"]["name"] for one in opened.tools.schemas], opened.notes

    names, notes = run_async(main)

    assert "count" in names
    assert fake.calls("run")
    assert notes == [
        (
            "MCP server localhost:8931 is treated as the one in the rows' containers; "
            "for a server on this machine write http://localhost:8931/mcp"
        )
    ]
