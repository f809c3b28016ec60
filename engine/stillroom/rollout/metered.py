"""A policy in this process whose turns count against a budget, as an endpoint's calls do."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from stillroom.rollout.episode.loop import Policy, PolicyConversation
from stillroom.rollout.forecast import FRAME_TOKENS, TEMPLATE_TOKENS
from stillroom.teachers.budget import Budget, Cost
from stillroom.types import Message, SampledTurn, TokenTrace, ToolSchema


@dataclass(frozen=True, slots=True)
class MeteredPolicy:
    """Lets each turn be sampled only if its worst case is within the budget."""

    policy: Policy
    budget: Budget
    max_tokens: int
    """Of a turn."""

    @asynccontextmanager
    async def converse(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed_key: str
    ) -> AsyncGenerator["MeteredConversation"]:
        """Opens a conversation that begins with the given messages."""
        async with self.policy.converse(messages, tools, seed_key=seed_key) as conversation:
            most = _num_bytes([messages, tools]) + TEMPLATE_TOKENS
            yield MeteredConversation(self, conversation, most)


class MeteredConversation:
    """One conversation, and the most tokens that its next prompt has."""

    def __init__(self, meter: MeteredPolicy, conversation: PolicyConversation, most: int) -> None:
        self._meter, self._conversation, self._most = meter, conversation, most

    async def sample(self) -> SampledTurn:
        """Returns the next turn. Raises BudgetSpentError where it might take too much."""
        budget, worst = self._meter.budget, Cost(self._most + self._meter.max_tokens)
        await budget.reserve(worst)
        try:
            turn = await self._conversation.sample()
        except BaseException:
            # Nobody bills what was not finished.
            budget.give_back(worst)
            raise
        budget.settle(worst, Cost.of(turn.usage, turn.cost_usd), was_sent=False)
        self._follow(turn)
        return turn

    def reply(self, call: Message, replies: Sequence[Message]) -> None:
        """Appends what follows the last turn."""
        self._most += _num_bytes(replies) + FRAME_TOKENS
        self._conversation.reply(call, replies)

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that is already known."""
        self._conversation.restore(turn)
        self._follow(turn)

    def trace(self) -> TokenTrace | None:
        """Returns the exact tokens."""
        return self._conversation.trace()

    def _follow(self, turn: SampledTurn) -> None:
        self._most = turn.usage.prompt_tokens + turn.usage.completion_tokens + FRAME_TOKENS


def _num_bytes(value: object) -> int:
    return len(msgspec.json.encode(value))
