"""Policies, tools and recorders that do as a test says."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stillroom.tools.source import ToolResult, ToolTask
from stillroom.types import CallTotals, Message, SampledTurn, TokenTrace, ToolSchema, Usage


def turn(message: Any, *, finish: Any = "stop", cost_usd: float | None = None) -> SampledTurn:
    """A turn that cost ten tokens in and five out."""
    usage = Usage(prompt_tokens=10, completion_tokens=5)
    return SampledTurn(message=message, finish_reason=finish, usage=usage, cost_usd=cost_usd)


class ScriptedConversation:
    """Samples the scripted turns one after the other; an exception is raised in its place."""

    def __init__(self, turns: Sequence[SampledTurn | Exception]) -> None:
        self._turns = list(turns)
        self.sampled = 0
        self.seen: list[Any] = []

    async def sample(self) -> SampledTurn:
        self.sampled += 1
        next_turn = self._turns.pop(0)
        if isinstance(next_turn, Exception):
            raise next_turn
        self.seen.append(next_turn.message)
        return next_turn

    def add_responses(self, turn: Message, responses: Sequence[Message]) -> None:
        self.seen += responses

    def restore(self, turn: SampledTurn) -> None:
        self._turns.pop(0)
        self.seen.append(turn.message)

    def trace(self) -> TokenTrace | None:
        return None


class ScriptedPolicy:
    """Opens a conversation from the script for each rollout; keeps what it was asked."""

    def __init__(self, script: Callable[[str], Sequence[SampledTurn | Exception]]) -> None:
        self._script = script
        self.opened: list[str] = []
        self.tools: list[list[str]] = []
        self.num_open = self.most_open = 0

    @asynccontextmanager
    async def converse(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed_key: str
    ) -> AsyncIterator[ScriptedConversation]:
        self.opened.append(seed_key)
        self.tools.append([schema["function"]["name"] for schema in tools])
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield ScriptedConversation(self._script(seed_key))
        finally:
            self.num_open -= 1


class ScriptedTools:
    """Tools whose answers a function gives; keeps the calls."""

    keeps_state = False

    def __init__(self, names: Sequence[str], answer: Callable[..., Awaitable[ToolResult]]) -> None:
        self.schemas: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": {}}} for name in names
        ]
        self.calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._answer = answer

    def schemas_for(self, task: ToolTask) -> list[Any]:
        return self.schemas

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncIterator["ScriptedSession"]:
        yield ScriptedSession(self, task.metadata)

    async def answer(
        self, name: str, arguments: dict[str, Any], metadata: dict[str, Any]
    ) -> ToolResult:
        self.calls.append((name, arguments, metadata))
        return await self._answer(name, arguments)


class ScriptedSession:
    """The scripted tools as one rollout sees them."""

    def __init__(self, tools: ScriptedTools, metadata: dict[str, Any]) -> None:
        self._tools, self._metadata = tools, metadata

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return await self._tools.answer(name, arguments, self._metadata)


class MemoryRecorder:
    """Keeps the steps of one rollout in memory."""

    def __init__(self) -> None:
        self.turns: dict[int, SampledTurn] = {}
        self.replies: dict[int, list[ToolResult]] = {}
        self.judged: list[SampledTurn] = []
        self.criticised: list[SampledTurn] = []
        self.order: list[tuple[str, int]] = []
        self._dropped = CallTotals()

    def recorded_turn(self, index: int) -> SampledTurn | None:
        return self.turns.get(index)

    def recorded_replies(self, index: int) -> list[ToolResult] | None:
        return self.replies.get(index)

    def start_over(self) -> None:
        self.order.append(("restart", 0))
        made = [*self.turns.values(), *self.judged]
        self._dropped = sum((CallTotals.of(turn) for turn in made), start=self._dropped)
        self.turns.clear()
        self.replies.clear()
        self.judged.clear()

    def dropped(self) -> CallTotals:
        return self._dropped

    def judge_turns(self) -> list[SampledTurn]:
        return self.judged

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        assert index == len(self.judged)
        self.order.append(("judge", index))
        self.judged.append(turn)

    def critic_turns(self) -> list[SampledTurn]:
        return self.criticised

    def record_critic_turn(self, index: int, turn: SampledTurn) -> None:
        assert index == len(self.criticised)
        self.criticised.append(turn)

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        self.order.append(("turn", index))
        self.turns[index] = turn

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        self.order.append(("replies", index))
        self.replies[index] = replies
