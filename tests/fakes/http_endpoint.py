"""A scripted OpenAI-compatible endpoint on the loopback, for runs in processes of their own."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class ScriptedEndpoint:
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
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

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

    def wait(self) -> None:
        with self._lock:
            self.num_asked += 1
            is_free = self.num_asked <= self._num_free
        if not is_free:
            self.hold.wait(30)

    def count(self, key: tuple[str, int]) -> None:
        with self._lock:
            self.served[key] += 1


class _Handler(BaseHTTPRequestHandler):
    endpoint: ScriptedEndpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        endpoint = self.endpoint
        endpoint.wait()
        if endpoint.latency_s:
            time.sleep(endpoint.latency_s)
        key, reply = endpoint.answer(body)
        data = json.dumps(reply if endpoint.status == 200 else {"error": "refused"}).encode()
        self.send_response(endpoint.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        endpoint.count(key)

    def log_message(self, *_: object) -> None:
        """Says nothing."""
