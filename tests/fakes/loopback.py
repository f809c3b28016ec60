"""HTTP servers on the loopback, in threads of the test's process."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class LoopbackHandler(BaseHTTPRequestHandler):
    """One request to the server `owner`, with JSON in and out."""

    owner: Any
    protocol_version = "HTTP/1.1"

    def read_body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def send_body(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    """A server whose clients may hang up at any time, as a killed run does."""

    daemon_threads = True
    # More connections at once than may wait are tried again only after a second.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LoopbackServer:
    """Serves for as long as the block runs; each request has a handler of the given class."""

    def __init__(self, handler: type[LoopbackHandler]) -> None:
        own = type("Handler", (handler,), {"owner": self})
        self._server = _Server(("127.0.0.1", 0), own)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        options = {"poll_interval": 0.01}
        threading.Thread(target=self._server.serve_forever, kwargs=options, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
