"""A website on the loopback that counts who connects, in the event loop of the test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream


@dataclass(frozen=True)
class Request:
    """What the browser asked for."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: str


@dataclass(frozen=True)
class Response:
    """What it gets; `hang` leaves it without an answer."""

    body: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False

    def encoded(self) -> bytes:
        body = self.body.encode()
        headers = {"Content-Type": "text/html; charset=utf-8"} | self.headers
        lines = [f"HTTP/1.1 {self.status} x", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Website:
    """Answers each request with what `answer` returns; keeps connections open as servers do."""

    def __init__(self, answer: Callable[[Request], Response]) -> None:
        self._answer = answer
        self.port = 0
        self.num_connections = 0
        self.requests: list[Request] = []
        self.raw: list[bytes] = []

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        self.num_connections += 1
        received = BufferedByteReceiveStream(stream)
        gone = (anyio.BrokenResourceError, anyio.IncompleteRead, anyio.EndOfStream)
        async with stream:
            with suppress(*gone):
                while True:
                    response = self._answer(await self._receive(received))
                    if response.hang:
                        await anyio.sleep_forever()
                    await stream.send(response.encoded())

    async def _receive(self, received: BufferedByteReceiveStream) -> Request:
        head = await received.receive_until(b"\r\n\r\n", 1 << 20)
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = await received.receive_exactly(int(headers.get("content-length", 0)))
        method, url, _ = first.split(" ")
        parts = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        request = Request(method, parts.path, query, headers, body.decode())
        self.requests.append(request)
        self.raw.append(head + body)
        return request


@asynccontextmanager
async def open_website(answer: Callable[[Request], Response]) -> AsyncIterator[Website]:
    """A website for as long as the block runs."""
    site = Website(answer)
    async with serving(site.serve) as port:
        site.port = port
        yield site


@asynccontextmanager
async def serving(
    handle: Callable[[anyio.abc.SocketStream], Awaitable[None]],
) -> AsyncIterator[int]:
    """Lets `handle` serve connections to a free port of the loopback."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        tasks.cancel_scope.cancel()
