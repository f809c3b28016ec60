"""Clients send damaged requests to `stillroom serve --http`: is each answered or closed, and are others answered meanwhile? server_bytes.py [--cases 600] [--minutes 20]

Requests of MCP clients are changed at random: in every third case the bytes, else the JSON inside of a sound request. Sixteen are sent at once,
in pieces, some with the session of a client that keeps to the protocol. An answer is no status 500 and comes, or the connection is closed,
within the server's bound for a request. A client beside them calls a tool all the time, and the server writes no traceback.
"""

import json
import random
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import h11
import httpx
from fuzz import Fuzzing, arguments, damaged
from scenes import report

from fakes.http_server import TOKEN, ServedWorkspace, client_at, served
from fakes.mutated_logs import mutated
from fakes.rollout_rows import rollout_row, write_rows
from stillroom_mcp.http.listening import REQUEST_S

WORKERS, SLACK_S = 16, 30.0
MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("tools/list", {}),
    ("tools/call", {"name": "list_runs", "arguments": {}}),
    ("tools/call", {"name": "get_run", "arguments": {"run_id": "sft-a"}}),
    ("tools/call", {"name": "inspect_examples", "arguments": {"path": "rows.jsonl", "n": 2}}),
    ("tools/call", {"name": "validate_dataset", "arguments": {"path": "rows.jsonl"}}),
    ("tools/call", {"name": "show_lineage", "arguments": {"path": "rows.jsonl"}}),
    ("resources/list", {}),
    ("resources/read", {"uri": "dataset://rows.jsonl"}),
    ("prompts/list", {}),
    ("ping", {}),
    ("notifications/cancelled", {"requestId": 1, "reason": "no"}),
    (
        "completion/complete",
        {"ref": {"type": "ref/prompt", "name": "x"}, "argument": {"name": "a", "value": ""}},
    ),
]
HELLO = {
    "protocolVersion": "2025-11-25", "capabilities": {"elicitation": {}}, "clientInfo": {"name": "fuzz", "version": "0"},
}  # fmt: skip
VERSIONS = ("2025-11-25", "2025-06-18", "2026-07-28", "x")


def head_of(lines: list[str]) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass")


class Requests:
    """Makes the requests of cases for one server."""

    def __init__(self, server: ServedWorkspace) -> None:
        self.url = server.url
        self.host = server.url.removeprefix("http://").removesuffix("/mcp")
        self.headers = {
            "authorization": f"Bearer {TOKEN}", "accept": "application/json, text/event-stream",
            "content-type": "application/json",
        }  # fmt: skip

    def opened(self) -> str | None:
        """Returns the id of a session that a client opens as it should."""
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": HELLO}
        answer = httpx.post(self.url, headers=self.headers, json=message, timeout=60)
        return answer.headers.get("mcp-session-id")

    def close(self, session: str) -> None:
        httpx.delete(self.url, headers={**self.headers, "mcp-session-id": session}, timeout=60)

    def made(self, draw: random.Random, session: str | None, *, is_framed: bool) -> bytes:
        """Returns a request whose JSON is changed, or a sound one unless it is to be framed."""
        method = (
            "POST"
            if is_framed
            else draw.choice(("POST", "POST", "POST", "GET", "DELETE", "PUT", "HEAD"))
        )
        name, params = draw.choice([*MESSAGES, ("initialize", HELLO)])
        message: Any = {
            "jsonrpc": "2.0",
            "id": draw.choice((1, "a")),
            "method": name,
            "params": params,
        }
        if is_framed:
            (message,) = mutated([message], draw) or [None]
        body = json.dumps(message).encode() if method in ("POST", "PUT") else b""
        path = (
            draw.choice(("/mcp", "/mcp", "/mcp", "/mcp?a=b", "/mcp/", "/", "/x"))
            if not is_framed
            else "/mcp"
        )
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if session:
            lines.append(f"mcp-session-id: {session}")
        if draw.random() < 0.7:
            lines.append(f"mcp-protocol-version: {draw.choice(VERSIONS)}")
        if body and draw.random() < 0.2:
            chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            return head_of([*lines, "Transfer-Encoding: chunked"]) + chunks
        return head_of([*lines, f"Content-Length: {len(body)}"]) + body


def read_answer(connection: socket.socket, request: bytes) -> int | None:
    """Returns the status of an answer that is whole, None if the server closed the connection.

    Of a stream of the server's own messages, which has no end, the head is enough.
    """
    client = h11.Connection(h11.CLIENT)
    verb = "HEAD" if request.startswith(b"HEAD ") else "GET"
    client.send(h11.Request(method=verb, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    status = None
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            try:
                client.receive_data(connection.recv(1 << 16))
            except ConnectionError:
                return status
        elif isinstance(event, h11.Response):
            status = event.status_code
            assert status != 500, event
            if request.startswith(b"GET ") and status == 200:
                return status
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return status


def send_pieces(connection: socket.socket, data: bytes, draw: random.Random) -> None:
    while data:
        size = draw.choice((len(data), len(data), 100, 1000))
        connection.sendall(data[:size])
        data = data[size:]


def check(requests: Requests, seed: int) -> None:
    draw = random.Random(seed)
    is_framed = seed % 3 != 0
    session = requests.opened() if draw.random() < 0.4 else None
    request = requests.made(draw, session, is_framed=is_framed)
    if not is_framed:
        request = damaged(request, draw)
    host, _, port = requests.host.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=REQUEST_S + SLACK_S) as connection:
        try:
            send_pieces(connection, request, draw)
            if not is_framed and draw.random() < 0.8:
                time.sleep(draw.choice((0.0, 0.01, 0.2)))
                connection.shutdown(socket.SHUT_WR)
        except OSError:  # refused by now
            return
        try:
            status = read_answer(connection, request)
        except h11.RemoteProtocolError:
            # The server has cut an answer off only if its client ended the connection first.
            if is_framed:
                raise
            status = None
        assert status is not None or not is_framed, "a whole request got no answer"
    if session is not None:
        requests.close(session)


class Beside:
    """A client that calls a tool all the time, in a thread; its slowest call, and what failed."""

    def __init__(self, url: str) -> None:
        self.num_calls, self.slowest_s = 0, 0.0
        self.error: BaseException | None = None
        self._url, self._is_over = url, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            anyio.run(self._call)
        except BaseException as error:
            self.error = error

    async def _call(self) -> None:
        async with client_at(self._url) as client:
            while not self._is_over.is_set():
                began = time.monotonic()
                with anyio.fail_after(SLACK_S):
                    answer = await client.call_tool("list_runs", {})
                assert not answer.is_error, answer
                self.num_calls += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                await anyio.sleep(0.2)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(2 * SLACK_S)


def main() -> int:
    options = arguments(__doc__, cases=600)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        root, errors = Path(name), list[str]()
        write_rows(root / "rows.jsonl", [rollout_row() for _ in range(20)])
        with served(root) as server:
            reader = threading.Thread(target=lambda: errors.extend(server.process.stderr or ()))
            reader.start()
            requests = Requests(server)
            for seed in range(12):  # what is loaded once is no growth
                with suppress(AssertionError):
                    check(requests, 3 * seed + 1)
            beside = Beside(server.url)
            fuzzing = Fuzzing(options, server.process.pid)
            fuzzing.check_all(lambda seed: check(requests, seed), WORKERS)
            beside.stop()
            if beside.error is not None:
                fuzzing.note("the client beside", beside.error)
            assert fuzzing.growth_bytes >= 0
            server.stop()
            reader.join(10)
    if any("Traceback" in line for line in errors):
        fuzzing.note("standard error", AssertionError("".join(errors)[-2500:]))
    figure = (
        f"{fuzzing.sentence('requests')}; the client beside them made {beside.num_calls} calls, "
        f"of which the slowest took {beside.slowest_s:.1f} s"
    )
    return report(46, figure, fuzzing.passed and beside.num_calls > 0, **fuzzing.figures())


if __name__ == "__main__":
    sys.exit(main())
