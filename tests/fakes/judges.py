"""A judge's teacher that replies as a test says."""

import json
from collections.abc import Sequence
from typing import Any

from fakes.scripted_policy import turn
from stillroom.types import Message, SampledTurn, ToolSchema


def judgement(score: Any, reasoning: Any = "because") -> str:
    return json.dumps({"reasoning": reasoning, "score": score})


class ScriptedJudge:
    """Replies with the scripted texts or turns, one after the other; keeps what it was asked."""

    def __init__(self, replies: Sequence[Any]) -> None:
        self._replies = list(replies)
        self.requested: list[list[Message]] = []
        self.formats: list[Any] = []
        self.seeds: list[int | None] = []

    async def complete(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        *,
        seed: int | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> SampledTurn:
        assert tools == []
        self.requested.append(messages)
        self.formats.append(response_format)
        self.seeds.append(seed)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            return turn({"role": "assistant", "content": reply})
        return reply
