"""A teacher and a judge who call, answer and are billed at random, as much as a contract allows."""

import json
import random
from typing import Any

import httpx

from fakes.chat_endpoint import completion
from fakes.judges import judgement
from stillroom.types import Usage

JUDGE_HOST = "judge.test"


class MeteredEndpoint:
    """Bills given text by its bytes, and what it wrote itself by the tokens it took for it.

    `wordy` from 1/8 to 1 is how many tokens a byte takes; `framing` from 0 to 1 how much the chat
    template adds; `eager` how likely a tool is called. One that is `greedy` writes all it may, and
    its judge can be read only at the last try.
    """

    def __init__(
        self, seed: int, *, wordy: float, framing: float, eager: float, greedy: bool = False
    ) -> None:
        self._random, self._greedy = random.Random(seed), greedy
        self._wordy, self._framing, self._eager = wordy, framing, eager
        self._tokens: dict[str, int] = {}
        self.most_calls = 2
        self.calls = {"teacher": 0, "judge": 0}
        self.usage = {"teacher": Usage(), "judge": Usage()}

    async def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        who = "judge" if request.url.host == JUDGE_HOST else "teacher"
        most = body["max_tokens"]
        written = most if self._greedy else self._random.choice([1, most // 2 + 1, most])
        answer = self._judgement(body) if who == "judge" else self._turn(body, written)
        usage = Usage(prompt_tokens=self._prompt_tokens(body), completion_tokens=written)
        self.calls[who] += 1
        self.usage[who] += usage
        key = answer.get("content") or answer["tool_calls"][0]["id"]
        self._tokens[key] = max(written, self._tokens.get(key, 0))
        counted = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": written}
        return completion(answer.pop("content", None), usage=counted, **answer)

    def _turn(self, body: dict[str, Any], written: int) -> dict[str, Any]:
        finish = "length" if not self._greedy and self._random.random() < 0.05 else "stop"
        if "tools" not in body or self._random.random() > self._eager:
            # A byte a token, so that the judge who reads it pays as much for it.
            return {"content": "w" * written, "finish_reason": finish}
        names = [tool["function"]["name"] for tool in body["tools"]]
        calls = [
            {
                "id": f"call_{self._random.getrandbits(40)}",
                "type": "function",
                "function": {"name": self._random.choice(names), "arguments": '{"item": "lamp"}'},
            }
            for _ in range(self._random.randint(1, self.most_calls))
        ]
        return {"tool_calls": calls, "finish_reason": finish}

    def _judgement(self, body: dict[str, Any]) -> dict[str, Any]:
        num_tries = len(body["messages"]) // 2
        is_read = num_tries == 3 or (not self._greedy and self._random.random() < 0.5)
        return {"content": judgement(1) if is_read else "Well, well"}

    def _prompt_tokens(self, body: dict[str, Any]) -> int:
        own = given = turns = 0
        for message in body["messages"]:
            content = message.get("content")
            if message["role"] == "assistant":
                turns += 1
                own += self._tokens[content or message["tool_calls"][0]["id"]]
            else:
                given += len(content.encode())
        shown = [body[name] for name in ("tools", "response_format") if name in body]
        given += sum(len(json.dumps(one, separators=(",", ":")).encode()) for one in shown)
        added = self._framing * (512 + 64 * turns)
        return own + int(self._wordy * given + 1) + int(added)
