"""A scripted OpenAI-compatible teacher behind httpx, without a socket."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx


def completion(
    content: str | None = "12",
    *,
    tool_calls: list[dict[str, Any]] | None = None,
    finish_reason: str = "stop",
    usage: Any = None,
    told: Mapping[str, Any] | None = None,
    **message: Any,
) -> httpx.Response:
    """A well-formed answer; `told` is what stands beside the choices."""
    reply: dict[str, Any] = {"role": "assistant", "content": content, **message}
    if tool_calls is not None:
        reply["tool_calls"] = tool_calls
    choice = {"index": 0, "message": reply, "finish_reason": finish_reason}
    counted = {"prompt_tokens": 10, "completion_tokens": 5} if usage is None else usage
    answer = {"id": "x", "choices": [choice], "usage": counted, **(told or {})}
    return httpx.Response(200, json=answer)


def refused(status: int, text: str = "refused") -> httpx.Response:
    """A refusal after which the client tries again at once, if it tries again."""
    return httpx.Response(status, text=text, headers={"retry-after": "0"})


class Served:
    """Whose turn a request asked for: the prompt, its seed (one a sample) and the turn."""

    def __init__(self, body: dict[str, Any]) -> None:
        messages = body["messages"]
        self.prompt: str = next(m["content"] for m in messages if m["role"] == "user")
        self.seed: int | None = body.get("seed")
        self.turn = sum(message["role"] == "assistant" for message in messages)
        self.key = (self.prompt, self.seed, self.turn)


class ScriptedTeacher:
    """Calls a tool `tool_turns` times and then answers; `served` has every answered request.

    `before` sees each request first and may answer in the script's place, raise or wait. `told` is
    what its answers say beside the turn.
    """

    def __init__(
        self,
        *,
        tool_turns: int = 1,
        before: Callable[[Served], Awaitable[httpx.Response | None]] | None = None,
        told: Callable[[Served], Mapping[str, Any]] = lambda _served: {},
    ) -> None:
        self.tool_turns, self.before, self.told = tool_turns, before, told
        self.served: list[tuple[str, int | None, int]] = []
        self.asked = 0

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        served = Served(json.loads(request.content))
        if self.before is not None:
            response = await self.before(served)
            if response is not None:
                return response
        self.served.append(served.key)
        if served.turn < self.tool_turns:
            arguments = json.dumps({"item": served.prompt, "turn": served.turn})
            function = {"name": "price", "arguments": arguments}
            call = {"id": f"call_{served.turn}", "type": "function", "function": function}
            told = self.told(served)
            return completion(None, tool_calls=[call], finish_reason="tool_calls", told=told)
        return completion(f"{served.prompt}: the answer is 12.", told=self.told(served))
