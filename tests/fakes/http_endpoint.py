"""A scripted OpenAI-compatible endpoint on the loopback, for runs in processes of their own."""

import json
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

from fakes.loopback import LoopbackHandler, LoopbackServer


class ScriptedEndpoint(LoopbackServer):
    """Answers each conversation with `tool_turns` tool calls and then a final text.

    `served` counts the answers that were sent completely, by prompt and turn, so a test can tell
    whether a finished call was made again; `num_asked` is how many requests came at all. `hold`
    makes calls wait until it is set.
    """

    def __init__(self, *, tool_turns: int = 1, latency_s: float = 0.0, status: int = 200) -> None:
        self.tool_turns, self.latency_s, self.status = tool_turns, latency_s, status
        self.served: Counter[tuple[str, int]] = Counter()
        self.hold = threading.Event()
        self.hold.set()
        self.num_asked = self._num_free = 0
        self._lock = threading.Lock()
        super().__init__(_Handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hold.set()
        super().__exit__(kind, error, trace)

    def answer(self, body: dict[str, Any]) -> tuple[tuple[str, int], dict[str, Any]]:
        messages = body["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        prompt = next(m["content"] for m in messages if m["role"] == "user")
        message: dict[str, Any] = {"role": "assistant", "content": "The answer is 42."}
        if turn < self.tool_turns:
            call = {"name": "echo", "arguments": json.dumps({"text": f"turn {turn}"})}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
            }
        reply = {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10 * (turn + 1), "completion_tokens": 5},
        }
        return (prompt, turn), reply

    def hold_after(self, num_free: int) -> None:
        """Makes all calls after the first ones wait until `hold` is set."""
        self._num_free = num_free
        self.hold.clear()

    def hold_back(self) -> None:
        with self._lock:
            self.num_asked += 1
            is_free = self.num_asked <= self._num_free
        if not is_free:
            self.hold.wait(100)

    def count(self, key: tuple[str, int]) -> None:
        with self._lock:
            self.served[key] += 1


class _Handler(LoopbackHandler):
    owner: ScriptedEndpoint

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        body, endpoint = self.read_body(), self.owner
        endpoint.hold_back()
        if endpoint.latency_s:
            time.sleep(endpoint.latency_s)
        key, reply = endpoint.answer(body)
        data = json.dumps(reply if endpoint.status == 200 else {"error": "refused"}).encode()
        self.send_body(endpoint.status, data)
        endpoint.count(key)
