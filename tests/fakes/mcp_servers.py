"""MCP servers to be tested against: one that does all a server may do wrong, and well-behaved ones.

The first is written out by hand: it starts in no time, and the SDK would not let it misbehave.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

NESTED_SCHEMA = {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}}},
    "properties": {"at": {"$ref": "#/$defs/point"}, "deep": {"default": None, "const": 1.0}},
    "x-order": ["b", "a"],
    "additionalProperties": False,
}
_ANY = {"type": "object"}
_SERVERS: list[ThreadingHTTPServer] = []


def odd_server(*options: str) -> list[str]:
    """The command line of the server that misbehaves when asked to."""
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), "odd", *options]


def sdk_server() -> list[str]:
    """The command line of a server written with the SDK."""
    return [sys.executable, str(Path(__file__).resolve()), "sdk"]


def port_server(*options: str) -> list[str]:
    """The command line of the odd server over HTTP, at a port that it is given."""
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), "port", "{port}", *options]


def counting_server() -> Any:
    """A server whose tool counts the calls of each session."""
    from mcp.server.mcpserver import Context, MCPServer

    server = MCPServer("counter")
    counts: dict[int, int] = {}
    sessions: list[Any] = []

    @server.tool()
    def count(ctx: Context) -> int:
        """Count the calls of this session."""
        # Kept, so that no other session gets the same id.
        sessions.append(ctx.session)
        key = ctx.headers["mcp-session-id"] if ctx.headers else "stdio"
        counts[key] = counts.get(key, 0) + 1
        return counts[key]

    @server.tool()
    def add(a: int, b: int = 1) -> str:
        """Add."""
        return str(a + b)

    @server.tool()
    def fail() -> str:
        """Fail."""
        from mcp.server.mcpserver.exceptions import ToolError

        raise ToolError("no lamp")

    @server.tool()
    async def hang() -> str:
        """Never end."""
        import anyio

        await anyio.sleep_forever()
        return ""

    return server


@contextmanager
def serve_http(app: Any) -> Iterator[str]:
    """Serves an ASGI app on the loopback and gives its address."""
    import uvicorn

    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


class _OddServer:
    def __init__(self, options: list[str]) -> None:
        self.options = options
        self.count = 0

    def run(self) -> None:
        if "die" in self.options:
            sys.stderr.write("no licence found\n")
            sys.exit(3)
        if "die-later" in self.options and not self._first_time():
            sys.stderr.write("the port is taken\n")
            sys.exit(4)
        if "deaf" in self.options:
            time.sleep(600)
        for line in sys.stdin:
            request = json.loads(line)
            if "id" in request:
                answer = self.answer(request["method"], request.get("params") or {})
                message = {"jsonrpc": "2.0", "id": request["id"], **answer}
                sys.stdout.write(json.dumps(message) + "\n")
                sys.stdout.flush()
        if "stay" in self.options:
            time.sleep(600)

    def _first_time(self) -> bool:
        """Whether this is the session that lists the tools, of which the file then tells."""
        file = Path(self.options[-1])
        known = file.exists()
        file.touch()
        return not known

    def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if "modern" in self.options:
            return self._modern_answer(method, params)
        if method == "initialize":
            version = params["protocolVersion"]
            info = {"name": "odd", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif method == "tools/list":
            result = self._page(params.get("cursor"))
        elif method == "tools/call":
            tool = getattr(self, f"do_{params['name']}", None)
            if tool is None:
                return {"error": {"code": -32602, "message": "no such tool"}}
            result = tool(params.get("arguments") or {})
            if isinstance(result, str):
                result = {"content": [{"type": "text", "text": result}]}
        else:
            return {"error": {"code": -32601, "message": "unknown"}}
        return {"result": result}

    def _modern_answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Answers as a server that has given up the handshake."""
        if method == "initialize":
            data = {"supported": ["2026-07-28"], "requested": params["protocolVersion"]}
            return {"error": {"code": -32022, "message": "unsupported version", "data": data}}
        if method == "server/discover":
            info = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
            return {
                "result": {**info, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            }
        if method == "tools/list":
            tool = {"name": "count", "inputSchema": _ANY}
            rest = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            return {"result": {"tools": [tool], **rest}}
        content = [{"type": "text", "text": self.do_count(params)}]
        return {"result": {"content": content, "resultType": "complete"}}

    def _page(self, cursor: str | None) -> dict[str, Any]:
        if "endless-list" in self.options:
            return {"tools": [], "nextCursor": "again"}
        names = sorted(name[3:] for name in dir(self) if name.startswith("do_"))
        start = int(cursor or 0)
        tools = [
            {"name": name, "description": f"Do {name}.", "inputSchema": _ANY}
            for name in names[start : start + 5]
        ]
        if start == 0:
            tools.insert(0, {"name": "nested", "inputSchema": NESTED_SCHEMA})
        rest = {"nextCursor": str(start + 5)} if start + 5 < len(names) else {}
        return {"tools": tools, **rest}

    def do_echo(self, arguments: dict[str, Any]) -> str:
        return json.dumps(arguments)

    def do_price(self, _: dict[str, Any]) -> str:
        return "12"

    def do_pid(self, _: dict[str, Any]) -> str:
        return str(os.getpid())

    def do_count(self, _: dict[str, Any]) -> str:
        self.count += 1
        return str(self.count)

    def do_environ(self, arguments: dict[str, Any]) -> str:
        return f"{os.environ.get(arguments['name'])} in {Path.cwd()}"

    def do_hang(self, arguments: dict[str, Any]) -> str:
        if file := arguments.get("file"):
            Path(file).write_text(f"{os.getpid()}\n")
        time.sleep(600)
        return ""

    def do_die(self, _: dict[str, Any]) -> str:
        sys.stderr.write("out of memory\n")
        os._exit(7)

    def do_close(self, _: dict[str, Any]) -> str:
        """Ends the output but not the process."""
        os.close(1)
        time.sleep(600)
        return ""

    def do_unlisten(self, _: dict[str, Any]) -> str:
        """Takes no more connections, and lives on."""
        for server in _SERVERS:
            server.socket.shutdown(socket.SHUT_RDWR)
        return "deaf"

    def do_chatter(self, _: dict[str, Any]) -> str:
        for _index in range(50):
            sys.stdout.write("p" * 50_000 + "\n")
            sys.stderr.write("e" * 50_000 + "\n")
        return "done"

    def do_flood(self, _: dict[str, Any]) -> str:
        return "x" * 5_000_000

    def do_endless(self, _: dict[str, Any]) -> str:
        while True:
            os.write(1, b"x" * (1 << 20))

    def do_fork(self, _: dict[str, Any]) -> str:
        return str(subprocess.Popen(["/bin/sleep", "600"]).pid)

    def do_fork_session(self, _: dict[str, Any]) -> str:
        return str(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True).pid)

    def do_half_character(self, _: dict[str, Any]) -> str:
        return "lamp \ud83d"

    def do_fail(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": "no lamp"}], "isError": True}

    def do_nonsense(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"content": "lamp"}

    def do_structured(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"content": [], "structuredContent": {"lamp": [1, None, "ü"]}}

    def do_mixed(self, _: dict[str, Any]) -> dict[str, Any]:
        data = base64.b64encode(b"12345").decode()
        blob = {"uri": "file:///a.bin", "mimeType": "application/zip", "blob": data}
        text = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "lämp"}
        return {
            "content": [
                {"type": "text", "text": "before"},
                {"type": "image", "data": data, "mimeType": "image/png"},
                {"type": "audio", "data": data, "mimeType": "audio/wav"},
                {"type": "resource_link", "name": "a", "uri": "file:///a", "size": 9},
                {"type": "resource", "resource": blob},
                {"type": "resource", "resource": text},
            ],
            "structuredContent": {"not": "shown"},
        }


class _OddHandler(BaseHTTPRequestHandler):
    """The same server over HTTP, with sessions that a new process knows nothing of."""

    protocol_version = "HTTP/1.1"
    sessions: ClassVar[dict[str, _OddServer]] = {}
    numbers: ClassVar[Iterator[int]] = count()
    options: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers["mcp-session-id"]
        if request["method"] == "initialize":
            session = str(next(self.numbers))
            self.sessions[session] = _OddServer(self.options)
        if session not in self.sessions:
            return self._send(404, None, {})
        if "id" not in request:
            return self._send(202, session, {})
        answer = self.sessions[session].answer(request["method"], request.get("params") or {})
        return self._send(200, session, {"jsonrpc": "2.0", "id": request["id"], **answer})

    def do_GET(self) -> None:
        self._send(405, None, {})

    def do_DELETE(self) -> None:
        self._send(200, None, {})
        self.sessions.pop(self.headers["mcp-session-id"], None)

    def _send(self, status: int, session: str | None, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _ThreadingServer(ThreadingHTTPServer):
    daemon_threads = True
    # The default of 5 is too short for clients that all connect at once to a busy machine.
    request_queue_size = 128


@contextmanager
def serve_odd(*options: str, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serves the odd server over HTTP on the loopback; what hangs is not waited for."""
    handler = type("Handler", (_OddHandler,), {"sessions": {}, "options": list(options)})
    server = _ThreadingServer(("127.0.0.1", port), handler)
    _SERVERS.append(server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        # Not server_close: it would wait for the handlers.
        server.socket.close()


def _serve_port(port: int, *options: str) -> None:
    if "die" in options:
        sys.stderr.write("no licence found\n")
        sys.exit(3)
    if "deaf" in options:
        time.sleep(600)
    with serve_odd(port=port):
        # Its input ends when it is to end, or when who started it was killed.
        sys.stdin.read()


def _serve_container(port_file: Path) -> None:
    """Does what a container's server does; the port it has is told in a file."""
    with serve_odd() as server:
        part = port_file.with_suffix(".part")
        part.write_text(str(server.server_address[1]))
        part.replace(port_file)
        time.sleep(600)


if __name__ == "__main__":
    match sys.argv[1]:
        case "odd":
            _OddServer(sys.argv[2:]).run()
        case "port":
            _serve_port(int(sys.argv[2]), *sys.argv[3:])
        case "container":
            _serve_container(Path(sys.argv[2]))
        case _:
            counting_server().run("stdio")
