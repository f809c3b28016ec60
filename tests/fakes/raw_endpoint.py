"""An endpoint on the loopback that answers with bytes as a test gives them, and keeps requests."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

Step = bytes | float | None
"""Bytes to send, seconds to wait, or None to break the connection off."""


@dataclass(frozen=True)
class RawRequest:
    """A request as it came."""

    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}

    @property
    def first_line(self) -> str:
        return self.head.split(b"\r\n")[0].decode("latin-1")


def json_reply(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """A reply with a length."""
    lines = [b"content-type: application/json", b"content-length: %d" % len(body), *headers]
    return b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, b"\r\n".join(lines), body)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"x-request-id: req_1\r\ntransfer-encoding: chunked\r\n\r\n"
)
CHUNK_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream_reply(*events: bytes) -> list[Step]:
    """A stream whose events come one by one, each in a chunk of its own."""
    steps: list[Step] = [STREAM_HEAD]
    for event in events:
        steps += [chunk(event), 0.002]
    return [*steps, CHUNK_END]


class RawEndpoint:
    """Answers the nth request with what `script` returns for it; threads of the test's process."""

    def __init__(
        self,
        script: Callable[[RawRequest], Iterable[Step] | bytes],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._script, self._tls = script, tls
        self.requests: list[RawRequest] = []
        self.num_connections = self.num_hung_up = 0
        self.hung_up = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.settimeout(0.5)
        self._connections: list[socket.socket] = []
        self._is_closed = False
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            connection.settimeout(60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as stream:
                while request := _read(stream):
                    self.requests.append(request)
                    steps = self._script(request)
                    for step in [steps] if isinstance(steps, bytes) else steps:
                        if step is None:
                            return
                        if isinstance(step, float):
                            time.sleep(step)
                        else:
                            connection.sendall(step)
        except (OSError, ValueError):  # ValueError: the request ended inside a chunk
            self.num_hung_up += 1
            self.hung_up.set()


def _read(stream) -> RawRequest | None:
    lines: list[bytes] = []
    while (line := stream.readline()) not in (b"\r\n", b""):
        lines.append(line.rstrip(b"\r\n"))
    if not lines:
        return None
    request = RawRequest(b"\r\n".join(lines), b"")
    if request.headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(stream.readline(), 16):
            body += stream.read(size)
            stream.readline()
        stream.readline()
        return RawRequest(request.head, body)
    return RawRequest(request.head, stream.read(int(request.headers.get("content-length", 0))))
