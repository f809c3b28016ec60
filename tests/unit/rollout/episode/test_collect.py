from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fakes.rollout_rows import assistant, tool_call
from fakes.scripted_policy import MemoryRecorder, ScriptedPolicy, ScriptedTools, turn
from fakes.waiting import run_async
from stillroom.data.formats import Task, task_from_row
from stillroom.errors import FailureClass
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    RolloutContext,
    collect_rollouts,
    key_of,
    specs_for,
)
from stillroom.rollout.episode.loop import TurnRules
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.tools.source import ToolResult
from stillroom.types import (
    SamplingSettings,
    TeacherRecord,
    Trajectory,
)

TEACHER = TeacherRecord(provider="openai", model="m", settings=SamplingSettings())
TASKS = [
    task_from_row({"prompt": f"prompt {index}", "metadata": {"expected_answer": 7}})
    for index in range(5)
]


def context_of(
    policy: Any, *, tools: Any = None, max_turns: int = 4, nudge: str | None = None, **more: Any
) -> RolloutContext:
    return RolloutContext(
        policy, TEACHER, tools, Rewarder(None), TurnRules(max_turns, nudge), **more
    )


def collected(
    tasks: Sequence[Task],
    context: RolloutContext,
    *,
    samples: int = 1,
    concurrency: int = 3,
    **more: Any,
) -> list[Outcome]:
    outcomes: list[Outcome] = []

    async def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)

    async def main() -> None:
        specs = specs_for(tasks, samples)
        await collect_rollouts(specs, context, concurrency=concurrency, on_outcome=keep, **more)

    run_async(main)
    return outcomes


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (2, 2), (50, 5)])
def test_no_more_conversations_are_open_than_asked(concurrency: int, most: int) -> None:
    async def slow(_name: str, _arguments: dict[str, Any]) -> ToolResult:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return ToolResult(content="", is_error=False)

    policy = ScriptedPolicy(lambda _key: [turn(assistant(None, tool_call())), turn(assistant("7"))])
    context = context_of(policy, tools=ScriptedTools(["price"], slow))

    outcomes = collected(TASKS, context, concurrency=concurrency)

    assert len(outcomes) == 5
    assert policy.most_open == most
    assert policy.num_open == 0


@pytest.mark.parametrize(
    ("finish", "truncated"),
    [("length", True), ("context", True), ("filter", True), ("stop", False)],
)
def test_a_cut_off_rollout_is_truncated_and_still_judged(finish: str, truncated: bool) -> None:
    policy = ScriptedPolicy(lambda _key: [turn(assistant("7"), finish=finish)])

    [rollout] = collected(TASKS[:1], context_of(policy))

    assert isinstance(rollout, Trajectory)
    assert (rollout.truncated, rollout.reward) == (truncated, 1.0)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("gone"), TimeoutError("late"), KeyError("odd")]
)
def test_an_error_in_one_rollouts_tools_ends_no_other(error: Exception) -> None:
    async def broken(_name: str, _arguments: dict[str, Any]) -> ToolResult:
        raise error

    def script(key: str) -> list[Any]:
        is_first = key.startswith(TASKS[0].task_id)
        return [turn(assistant(None, tool_call()) if is_first else assistant("7"))]

    outcomes = collected(
        TASKS, context_of(ScriptedPolicy(script), tools=ScriptedTools(["price"], broken))
    )

    [failed] = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    assert failed.failure.kind is FailureClass.INTERNAL
    assert str(error) in failed.failure.message
    assert len(outcomes) == 5


def test_a_policy_that_is_cancelled_closes_its_conversations() -> None:
    scopes: list[anyio.CancelScope] = []

    async def forever(_name: str, _arguments: dict[str, Any]) -> ToolResult:
        if policy.num_open == 3:
            scopes[0].cancel()
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    policy = ScriptedPolicy(lambda _key: [turn(assistant(None, tool_call()))])
    context = context_of(policy, tools=ScriptedTools(["price"], forever))

    async def main() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await collect_rollouts(
                specs_for(TASKS, 1), context, concurrency=3, on_outcome=unexpected
            )

    async def unexpected(_outcome: Outcome) -> None:
        raise AssertionError("a rollout ended that cannot")

    run_async(main)
    assert (policy.most_open, policy.num_open) == (3, 0)


def stateful(*, keeps_state: bool = True) -> ScriptedTools:
    async def reply(_name: str, _arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(content="now", is_error=False)

    tools = ScriptedTools(["price"], reply)
    tools.keeps_state = keeps_state
    return tools


def half_done(*, with_replies: bool) -> MemoryRecorder:
    """A recorder that knows how a rollout began."""
    recorder = MemoryRecorder()
    recorder.turns[0] = turn(assistant(None, tool_call(call_id="earlier")))
    if with_replies:
        recorder.replies[0] = [ToolResult(content="earlier", is_error=False)]
    return recorder


CALL_THEN_ANSWER = [turn(assistant(None, tool_call(call_id="now"))), turn(assistant("7"))]


@pytest.mark.parametrize(
    ("keeps_state", "with_replies", "steps", "called"),
    [
        # The state that the earlier replies came from is gone.
        (True, True, [("restart", 0), ("turn", 0), ("replies", 0), ("turn", 1)], "now"),
        # No tool was called yet, so there was no state to lose.
        (True, False, [("replies", 0), ("turn", 1)], "earlier"),
        (False, True, [("turn", 1)], "earlier"),
    ],
)
def test_a_rollout_starts_over_where_its_tools_have_lost_their_state(
    keeps_state: bool, with_replies: bool, steps: list[tuple[str, int]], called: str
) -> None:
    recorder = half_done(with_replies=with_replies)
    tools = stateful(keeps_state=keeps_state)
    context = context_of(ScriptedPolicy(lambda _key: CALL_THEN_ANSWER), tools=tools)

    [rollout] = collected(TASKS[:1], context, recorder_for=lambda _key: recorder)

    assert isinstance(rollout, Trajectory)
    assert recorder.order == steps
    assert rollout.messages[1].get("tool_calls") == [tool_call(call_id=called)]
    restarted = ("restart", 0) in steps
    assert (rollout.dropped.calls if rollout.dropped else 0) == restarted
    replied = "earlier" if with_replies and not keeps_state else "now"
    assert rollout.messages[2].get("content") == replied
    assert len(tools.calls) == (replied == "now")


def test_more_conversations_are_begun_as_the_policy_can_take_more() -> None:
    policy = ScriptedPolicy(lambda _key: CALL_THEN_ANSWER)
    widths = iter([0, 1, 2])

    async def wait_for_four(_name: str, _arguments: dict[str, Any]) -> ToolResult:
        while policy.most_open < 4:  # noqa: ASYNC110 - the policy sets no event
            await anyio.sleep(0.001)
        return ToolResult(content="", is_error=False)

    tools = ScriptedTools(["price"], wait_for_four)
    context = context_of(policy, tools=tools, concurrency_limit=lambda: next(widths, 4))

    outcomes = collected(TASKS, context, concurrency=1)

    assert len(outcomes) == 5
    assert policy.most_open == 4


def test_a_policy_that_can_take_less_than_was_asked_for_ends_no_conversation() -> None:
    policy = ScriptedPolicy(lambda _key: [turn(assistant("7"))])

    outcomes = collected(
        TASKS, context_of(policy, concurrency_limit=lambda: 1), samples=3, concurrency=4
    )

    assert len(set(map(key_of, outcomes))) == 15
