"""The channel against a server that says exactly what a test wants, byte by byte."""

import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from fakes.waiting import run_async
from stillroom.errors import InputError
from stillroom.teachers.endpoint import aiohttp_channel
from stillroom.teachers.endpoint.aiohttp_channel import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    AiohttpChannel,
)
from stillroom.teachers.endpoint.attempts import open_channel
from stillroom.teachers.endpoint.http_channel import (
    ConnectionFailedError,
    HttpReply,
    NotConnectedError,
    UnreadableReplyError,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
PROXIED = {"url": "http://teacher.test/v1/chat", "proxy": "http://127.0.0.1:{port}"}
HALF_CHUNK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nh"


class Server:
    """Answers each request with the next pieces of the script; `None` closes the connection."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0

    async def handle(self, stream: SocketStream) -> None:
        self.num_connections += 1
        async with stream:
            while self._answers:
                request = b""
                while b"\r\n\r\n" not in request or not request.endswith(b"}"):
                    try:
                        request += await stream.receive()
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        return
                self.requests.append(request)
                for piece in self._answers.pop(0):
                    if piece is None:
                        return
                    await stream.send(piece)
                    await anyio.lowlevel.checkpoint()


def talk(
    server: Server,
    scenario: Callable[[AiohttpChannel], Awaitable[Any]],
    *,
    url: str = "http://127.0.0.1:{port}/v1/chat",
    proxy: str | None = None,
) -> Any:
    """Runs a scenario; `{port}` in an address is the server's."""

    async def main() -> Any:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, server.handle)
            channel = AiohttpChannel(
                url.format(port=port), {"x-key": "k"}, proxy=proxy and proxy.format(port=port)
            )
            try:
                with anyio.fail_after(10):
                    return await scenario(channel)
            except (ConnectionFailedError, UnreadableReplyError) as error:
                # Raised through the group it would be inside another exception.
                return error
            finally:
                await channel.aclose()
                group.cancel_scope.cancel()

    result = run_async(main)
    if isinstance(result, Exception):
        raise result
    return result


def posts(server: Server, num: int = 1, *, waits: bool = True, **addresses: str) -> list[HttpReply]:
    """Posts one request after the other, and waits until nothing moves between them."""

    async def scenario(channel: AiohttpChannel) -> list[HttpReply]:
        replies: list[HttpReply] = []
        for number in range(num):
            if number and waits:
                await anyio.wait_all_tasks_blocked()
            replies.append(await channel.post(b"{}", timeout_s=5))
        return replies

    return talk(server, scenario, **addresses)


def post_once(*pieces: bytes | None, **addresses: str) -> HttpReply:
    return posts(Server(list(pieces)), **addresses)[0]


def test_a_request_is_what_a_server_expects() -> None:
    server = Server([OK])

    assert posts(server) == [HttpReply(200, {"content-length": "2"}, b"hi")]
    head, body = server.requests[0].split(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    # The names of headers may be written in either case.
    lines = [first, *(header.lower() for header in headers)]
    assert lines[0] == "POST /v1/chat HTTP/1.1"
    assert lines[1].startswith("host: 127.0.0.1:")
    assert {"x-key: k", "content-length: 2", "content-type: application/json"} <= set(lines)
    assert body == b"{}"


@pytest.mark.parametrize(
    "pieces",
    [
        [OK],
        [OK[i : i + 1] for i in range(len(OK))],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nh", b"i", None],
        [b"HTTP/1.0 200 OK\r\n\r\nhi", None],
        [b"HTTP/1.1 100 Continue\r\n\r\n", OK],
        [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK],
        [b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
         % (len(gzip.compress(b"hi")), gzip.compress(b"hi"))],
    ],
    ids=["whole", "bytes", "chunked", "until the end", "http 1.0", "continue", "hints", "gzip"],
)  # fmt: skip
def test_every_framing_of_a_body_is_read(pieces: list[bytes | None]) -> None:
    reply = post_once(*pieces)
    assert (reply.status, reply.body) == (200, b"hi")


@pytest.mark.parametrize(
    "pieces",
    [[None], [OK[:20], None], [OK[:-1], None], [HALF_CHUNK, None]],
    ids=["nothing", "half a head", "half a body", "half a chunk"],
)  # fmt: skip
def test_a_response_that_breaks_off_is_no_response(pieces: list[bytes | None]) -> None:
    with pytest.raises(ConnectionFailedError, match="broke"):
        post_once(*pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"SSH-2.0-OpenSSH_9.6\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nhi"],
        [b"HTTP/1.1 200 OK\r\ncontent-encoding: zstd\r\ncontent-length: 2\r\n\r\nhi"],
        [b"HTTP/1.1 200 OK\r\n" + b"x-a: 1\r\n" * (MAX_HEADERS + 2)],
        [b"HTTP/1.1 200 OK\r\nx-a: " + b"1" * (MAX_HEADER_BYTES + 1)],
        [b"HTTP/1.1 200 OK\r\n" + b"x" * (MAX_HEADER_BYTES + 1)],
    ],
    ids=["another protocol", "no length", "not gzip", "zstd", "many headers", "a long header",
         "a header without an end"],
)  # fmt: skip
def test_what_is_no_http_or_too_long_is_refused(pieces: list[bytes | None]) -> None:
    with pytest.raises(UnreadableReplyError):
        post_once(*pieces)


@pytest.mark.parametrize("is_proxied", [False, True])
def test_a_body_that_is_or_unpacks_to_a_huge_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_proxied: bool
) -> None:
    monkeypatch.setattr(aiohttp_channel, "MAX_BODY_BYTES", 1000)
    with pytest.raises(UnreadableReplyError, match="longer than 1000"):
        post_once(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n", b"x" * 3000, b"x" * 2000)
    bomb = gzip.compress(b"0" * 100_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)

    with pytest.raises(UnreadableReplyError, match="longer than 1000 bytes"):
        post_once(head + bomb, **(PROXIED if is_proxied else {}))


OTHER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother"


@pytest.mark.parametrize(
    ("answers", "waits", "num_connections"),
    [
        ([[OK], [OK], [OK]], False, 1),
        ([[OK, None], [OK]], True, 2),
        ([[OK + OTHER], [OK]], False, 2),
        ([[OK + b"\x00junk"], [OK]], False, 2),
        ([[OK, OTHER], [OK]], True, 2),
    ],
    ids=["idle", "closed", "a second response", "junk", "an unrequested response"],
)
def test_a_connection_is_used_again_only_if_nothing_came_on_it_meanwhile(
    answers: list[list[bytes | None]], waits: bool, num_connections: int
) -> None:
    server = Server(*answers)

    replies = posts(server, len(answers), waits=waits)
    assert [reply.body for reply in replies] == [b"hi"] * len(answers)
    assert server.num_connections == num_connections


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one() -> None:
    server = Server([OK[:10]], [OK])

    async def scenario(channel: AiohttpChannel) -> HttpReply:
        with pytest.raises(TimeoutError):
            await channel.post(b"{}", timeout_s=0.05)
        return await channel.post(b"{}", timeout_s=5)

    assert talk(server, scenario).body == b"hi"
    assert server.num_connections == 2


def test_nobody_listening_is_said_plainly(free_tcp_port: int) -> None:
    with pytest.raises(NotConnectedError, match=f"cannot connect to 127.0.0.1:{free_tcp_port}"):
        post_once(url=f"http://127.0.0.1:{free_tcp_port}/v1")


def test_a_connection_that_never_comes_about_sent_nothing() -> None:
    async def scenario(channel: AiohttpChannel) -> None:
        with pytest.raises(NotConnectedError, match=r"timed out after 0\.05 s"):
            await channel.post(b"{}", timeout_s=0.05)

    # The server waits for a request, and the client for its part of the handshake.
    talk(Server([None]), scenario, url="https://127.0.0.1:{port}/v1/chat")


def test_a_request_through_a_proxy_names_the_whole_address() -> None:
    server = Server([OK], [OK])

    posts(server, 2, url=PROXIED["url"], proxy="http://me:a%40b@127.0.0.1:{port}")
    for request in server.requests:
        assert request.startswith(b"POST http://teacher.test/v1/chat HTTP/1.1\r\n")
        assert request.count(b"roxy-") == request.count(b": Basic bWU6YUBi\r\n") == 1
    assert server.num_connections == 1


def test_a_proxy_that_refuses_the_tunnel_sent_nothing() -> None:
    class Proxy(Server):
        async def handle(self, stream: SocketStream) -> None:
            async with stream:
                self.requests.append(await stream.receive())
                await stream.send(b"HTTP/1.1 407 Who are you?\r\ncontent-length: 0\r\n\r\n")

    async def scenario(channel: AiohttpChannel) -> None:
        with pytest.raises(NotConnectedError, match="407"):
            await channel.post(b"{}", timeout_s=5)

    proxy = Proxy()
    talk(proxy, scenario, url="https://teacher.test/v1/chat", proxy="http://me:it@127.0.0.1:{port}")
    [request] = proxy.requests
    assert request.startswith(b"CONNECT teacher.test:443 HTTP/1.1\r\n")
    assert b": Basic bWU6aXQ=\r\n" in request
    # The key is for the teacher alone.
    assert b"x-key" not in request


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://proxy.test:3128"}, "http://proxy.test:3128"),
        ({"HTTPS_PROXY": "proxy.test:3128"}, "http://proxy.test:3128"),
        ({"HTTPS_PROXY": "http://proxy.test:3128", "NO_PROXY": "teacher.test"}, None),
        ({"HTTP_PROXY": "http://proxy.test:3128"}, None),
        ({"ALL_PROXY": "http://proxy.test:3128"}, "http://proxy.test:3128"),
    ],
)
def test_a_proxy_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], proxy: str | None
) -> None:
    set_proxies(monkeypatch, environment)
    channel = open_channel("https://teacher.test/v1", {})
    assert isinstance(channel, AiohttpChannel)
    assert channel.proxy == proxy


def test_a_socks_proxy_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxies(monkeypatch, {"ALL_PROXY": "socks5://me:secret@proxy.test:1080"})
    with pytest.raises(InputError, match=r"socks5://proxy\.test:1080 for https") as caught:
        open_channel("https://teacher.test/v1", {})
    assert "secret" not in str(caught.value)
    assert "NO_PROXY" in caught.value.fix


def test_no_login_is_read_from_a_netrc_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    server = Server([OK])

    posts(server)
    assert b"authorization" not in server.requests[0].lower()


def set_proxies(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
