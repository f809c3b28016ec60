"""The recording proxy in a thread of the test's process, and clients that see raw bytes."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from fakes.raw_endpoint import RawEndpoint, RawRequest, Step
from stillroom.recording.admission import Admission
from stillroom.recording.journal import CallJournal, journals_in
from stillroom.recording.proxy import RecordingProxy
from stillroom.recording.records import RecordedCall, decode_call
from stillroom.recording.serving import Service, running
from stillroom.recording.upstreams import parse_upstreams

CHAT = "/v1/chat/completions"


@contextmanager
def in_thread(service: Service, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves in a thread, and yields the address."""
    listener = socket.create_server((host, 0))
    ready, loops = threading.Event(), []

    async def serve() -> None:
        stop = asyncio.Event()
        async with running(service, listener):
            loops.append((asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    loop, stop = loops[0]
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@contextmanager
def recording(
    folder: Path,
    *upstreams: str,
    token: str | None = None,
    hosts=(),
    **options,
) -> Iterator[str]:
    """Records into a folder, and yields the proxy's address."""
    journal = CallJournal(folder)
    proxy = RecordingProxy(journal, parse_upstreams(upstreams), Admission(token, hosts), **options)
    try:
        with in_thread(proxy) as url:
            yield url
    finally:
        journal.close()


def calls_in(folder: Path) -> list[RecordedCall]:
    """The calls of a folder's journals."""
    lines = [line for path in journals_in(folder) for line in path.read_bytes().splitlines()]
    return [decode_call(line) for line in lines]


def wait_until(is_so) -> None:
    """Returns once something is so, within 10 seconds."""
    for _ in range(1000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen in 10 seconds")


@dataclass(frozen=True)
class RawReply:
    """A reply as it came."""

    head: bytes
    body: bytes
    blocks: list[bytes]
    """The content's chunks, if it came in chunks."""
    is_whole: bool

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


class RawClient:
    """One connection to a server, on which requests are written by hand."""

    def __init__(self, url: str) -> None:
        self.host = url.removeprefix("http://")
        address, _, port = self.host.rpartition(":")
        self.socket = socket.create_connection((address, int(port)), timeout=10)
        self._stream = self.socket.makefile("rb")

    def send(self, method: str, path: str, body: bytes = b"", *headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", *headers]
        if not any(header.lower().startswith("host:") for header in headers):
            lines.append(f"Host: {self.host}")
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def read_head(self) -> bytes:
        lines: list[bytes] = []
        while (line := self._stream.readline()) not in (b"\r\n", b""):
            lines.append(line)
        return b"".join(lines)

    def read(self, *, has_body: bool = True) -> RawReply:
        head = self.read_head()
        reply = RawReply(head, b"", [], is_whole=True)
        if not has_body:
            return reply
        if reply.headers.get("transfer-encoding") == "chunked":
            blocks: list[bytes] = []
            while line := self._stream.readline():
                block = self._stream.read(int(line, 16))
                self._stream.readline()
                if not block:
                    return RawReply(head, b"".join(blocks), blocks, is_whole=True)
                blocks.append(block)
            return RawReply(head, b"".join(blocks), blocks, is_whole=False)
        length = int(reply.headers.get("content-length", -1))
        body = self._stream.read(length)
        return RawReply(head, body, [], is_whole=length < 0 or len(body) == length)

    def close(self) -> None:
        self._stream.close()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(url: str, method: str, path: str, body: bytes = b"", *headers: str) -> RawReply:
    """One request on a connection of its own."""
    with RawClient(url) as client:
        client.send(method, path, body, *headers)
        return client.read(has_body=method != "HEAD")


@dataclass(frozen=True)
class Exchange:
    """A request through the recorder: what the client got, the endpoint saw and the journal has."""

    reply: RawReply
    requests: list[RawRequest]
    calls: list[RecordedCall]

    @property
    def call(self) -> RecordedCall:
        (call,) = self.calls
        return call


def exchange(
    folder: Path,
    script: bytes | list[Step] | Callable[[RawRequest], Iterable[Step] | bytes],
    body: bytes = b"{}",
    *headers: str,
    path: str = CHAT,
    **options,
) -> Exchange:
    """Sends one request through the recorder to an endpoint that answers as `script` says."""
    answer = script if callable(script) else lambda _: script
    with RawEndpoint(answer) as endpoint, recording(folder, endpoint.url, **options) as url:
        reply = request(url, "POST", path, body, *headers)
        return Exchange(reply, endpoint.requests, calls_in(folder))
