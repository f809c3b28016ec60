"""The proxy over real sockets of the loopback, with names that resolve as a test says."""

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import pytest

from fakes.addresses import FORBIDDEN_ADDRESSES, FORBIDDEN_HOSTS
from fakes.waiting import run_async
from fakes.websites import Request, Response, Website, open_website, serving
from stillroom.tools.browser.addresses import AddressPolicy, IPAddress
from stillroom.tools.browser.proxy import (
    BrowseProxy,
    ProxyAccess,
    ProxyLimits,
    authority_of,
)

PUBLIC_ADDRESS = "93.184.215.14"
NUMBERED = list(enumerate(FORBIDDEN_ADDRESSES))


@dataclass
class Internet:
    """Names with a list of answers each, of which the last one stays; dials one website only."""

    names: dict[str, list[Sequence[str]]]
    site_port: int
    lookups: list[str] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        if host not in self.names:
            raise OSError("no such name")
        answers = self.names[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def dial(self, address: IPAddress, port: int) -> anyio.abc.ByteStream:
        self.dialled.append(str(address))
        return await anyio.connect_tcp("127.0.0.1", self.site_port)


@dataclass
class Setting:
    site: Website
    proxy: BrowseProxy
    access: ProxyAccess
    internet: Internet

    async def ask(self, head: str, body: str = "", *, access: ProxyAccess | None = None) -> str:
        """Sends one request with the credential and returns all that comes back."""
        pair = f"{(access or self.access).username}:{(access or self.access).password}"
        credential = base64.b64encode(pair.encode()).decode()
        request = f"{head}\r\nProxy-Authorization: Basic {credential}\r\n\r\n{body}"
        return await self.send(request.encode("latin-1"))

    async def send(self, request: bytes) -> str:
        async with await anyio.connect_tcp("127.0.0.1", self.proxy.port) as stream:
            await stream.send(request)
            received = b""
            try:
                while True:
                    received += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return received.decode()


def hello(request: Request) -> Response:
    return Response(f"hello {request.path} {request.body}")


@asynccontextmanager
async def a_setting(
    names: dict[str, list[Sequence[str]]] | None = None,
    *,
    allow: Sequence[str] = (),
    answer: Callable[[Request], Response] = hello,
    limits: ProxyLimits | None = None,
) -> AsyncIterator[Setting]:
    async with open_website(answer) as site:
        internet = Internet(names or {"example.com": [[PUBLIC_ADDRESS]]}, site.port)
        policy = AddressPolicy([entry.format(port=site.port) for entry in allow])
        proxy = BrowseProxy(policy, limits=limits, resolve=internet.resolve, dial=internet.dial)
        async with proxy:
            with proxy.open_access() as access:
                yield Setting(site, proxy, access, internet)


def test_plain_request_reaches_the_checked_address_without_the_credential() -> None:
    async def body() -> None:
        async with a_setting() as setting:
            reply = await setting.ask(
                "POST http://example.com/a?b=1 HTTP/1.1\r\nHost: other\r\nContent-Length: 2\r\n"
                "Proxy-Connection: keep-alive",
                "hi",
            )
            assert reply.startswith("HTTP/1.1 200")
            assert reply.endswith("hello /a hi")
            assert setting.internet.dialled == [PUBLIC_ADDRESS]
            sent = setting.site.raw[0].decode().lower()
            assert sent.startswith("post /a?b=1 http/1.1\r\nhost: example.com\r\n")
            assert "proxy" not in sent

    run_async(body)


def test_reply_ends_the_connection_so_that_no_request_for_another_host_follows() -> None:
    async def body() -> None:
        async with a_setting() as setting:
            second = "GET http://other.example/secret HTTP/1.1\r\n\r\n"
            reply = await setting.ask("GET http://example.com/ HTTP/1.1", second)
            assert reply == "" or "connection: close" in reply.lower()
            assert [request.path for request in setting.site.requests] in ([], ["/"])

    run_async(body)


def test_tunnel_passes_bytes_both_ways() -> None:
    async def body() -> None:
        async with a_setting() as setting, open_tunnel(setting) as stream:
            for path in ("/one", "/two"):
                await stream.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert (await stream.receive()).endswith(f"hello {path} ".encode())
            assert setting.internet.dialled == [PUBLIC_ADDRESS]

    run_async(body)


@asynccontextmanager
async def open_tunnel(setting: Setting) -> AsyncIterator[anyio.abc.ByteStream]:
    pair = f"{setting.access.username}:{setting.access.password}".encode()
    credential = base64.b64encode(pair).decode()
    head = f"CONNECT example.com:443 HTTP/1.1\r\nProxy-Authorization: basic {credential}\r\n\r\n"
    async with await anyio.connect_tcp("127.0.0.1", setting.proxy.port) as stream:
        await stream.send(head.encode())
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")
        yield stream


def test_forbidden_spelling_is_neither_resolved_nor_dialled() -> None:
    async def body() -> None:
        async with a_setting({}) as setting:
            for host in FORBIDDEN_HOSTS:
                place = f"{host.encode('utf-8').decode('latin-1')}:{setting.site.port}"
                for head in (f"GET http://{place}/ HTTP/1.1", f"CONNECT {place} HTTP/1.1"):
                    reply = await setting.ask(head)
                    assert reply.startswith(("HTTP/1.1 403", "HTTP/1.1 400")), host
            assert setting.internet.lookups == []
            assert setting.internet.dialled == []
            assert setting.site.num_connections == setting.proxy.num_dialled == 0

    run_async(body)


def test_name_with_one_forbidden_address_is_not_dialled() -> None:
    async def body() -> None:
        names = {f"evil{n}.example": [[PUBLIC_ADDRESS, a]] for n, a in NUMBERED}
        names |= {f"bad{n}.example": [[a]] for n, a in NUMBERED}
        async with a_setting(names) as setting:
            for host in names:
                reply = await setting.ask(f"GET http://{host}/ HTTP/1.1")
                assert reply.startswith("HTTP/1.1 403")
                assert (await setting.ask(f"CONNECT {host}:443 HTTP/1.1")).startswith(
                    "HTTP/1.1 403"
                )
                assert "not part of the public web" in setting.access.failures[f"{host}:443"]
            assert setting.proxy.num_blocked == 2 * len(names)
            assert setting.site.num_connections == setting.proxy.num_dialled == 0

    run_async(body)


def test_name_that_resolves_differently_the_second_time_is_dialled_only_the_first() -> None:
    async def body() -> None:
        names = {f"evil{n}.example": [[PUBLIC_ADDRESS], [a]] for n, a in NUMBERED}
        async with a_setting(names) as setting:
            for number, host in enumerate(names, start=1):
                first = await setting.ask(f"GET http://{host}/ HTTP/1.1")
                assert first.startswith("HTTP/1.1 200")
                assert setting.internet.lookups.count(host) == 1
                second = await setting.ask(f"GET http://{host}/ HTTP/1.1")
                assert second.startswith("HTTP/1.1 403"), host
                assert setting.internet.dialled == [PUBLIC_ADDRESS] * number
                assert setting.site.num_connections == number

    run_async(body)


def test_redirect_is_passed_on_and_its_target_is_checked_anew() -> None:
    async def body() -> None:
        location = {"Location": "http://127.0.0.1:9/x"}
        async with a_setting(answer=lambda _: Response(status=302, headers=location)) as setting:
            reply = await setting.ask("GET http://example.com/ HTTP/1.1")
            assert "Location: http://127.0.0.1:9/x" in reply
            assert (await setting.ask("GET http://127.0.0.1:9/x HTTP/1.1")).startswith(
                "HTTP/1.1 403"
            )
            assert setting.site.num_connections == 1

    run_async(body)


def test_allowed_host_is_dialled_for_real() -> None:
    async def body() -> None:
        async with open_website(hello) as site:
            proxy = BrowseProxy(AddressPolicy([f"127.0.0.1:{site.port}"]))
            async with proxy:
                with proxy.open_access() as access:
                    setting = Setting(site, proxy, access, Internet({}, 0))
                    reply = await setting.ask(f"GET {site.origin}/x HTTP/1.1")
                    assert reply.endswith("hello /x ")
                    own = await setting.ask(f"GET {proxy.url}/ HTTP/1.1")
                    assert own.startswith("HTTP/1.1 403")

    run_async(body)


@pytest.mark.parametrize(
    "header",
    ["", "Proxy-Authorization: Basic !\r\n", "Proxy-Authorization: Bearer x\r\n",
     "Proxy-Authorization: Basic eDp5\r\n", "Proxy-Authorization: Basic /////w==\r\n"],
)  # fmt: skip
def test_nobody_is_served_without_the_credential(header: str) -> None:
    async def body() -> None:
        async with a_setting() as setting:
            head = f"CONNECT example.com:443 HTTP/1.1\r\n{header}\r\n"
            assert (await setting.send(head.encode())).startswith("HTTP/1.1 407")
            assert setting.internet.lookups == []

    run_async(body)


def test_credential_and_connections_end_with_the_access() -> None:
    async def body() -> None:
        async with a_setting() as setting:
            with setting.proxy.open_access() as access:
                other = Setting(setting.site, setting.proxy, access, setting.internet)
                tunnel = open_tunnel(other)
                stream = await tunnel.__aenter__()
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
            await stream.aclose()
            reply = await setting.ask("GET http://example.com/ HTTP/1.1", access=access)
            assert reply.startswith("HTTP/1.1 407")
            async with open_tunnel(setting):
                pass

    run_async(body)


@pytest.mark.parametrize(
    "head",
    ["nonsense", "GET / HTTP/2.0", "GET http://example.com/", "GET http://e.com/ HTTP/1.1\r\nbad",
     "POST http://e.com/ HTTP/1.1\r\nTransfer-Encoding: chunked",
     "POST http://e.com/ HTTP/1.1\r\nContent-Length: -1",
     "GET http://e.com/ HTTP/1.1\r\na: b\nc: d",
     "GET http://e.com/ HTTP/1.1\r\nx: " + "y" * 70_000],
)  # fmt: skip
def test_malformed_request_is_refused(head: str) -> None:
    async def body() -> None:
        async with a_setting() as setting:
            # Its end may come before the reply was read, where much was left to read.
            assert (await setting.ask(head)).startswith("HTTP/1.1 400") or len(head) > 65_536
            assert setting.internet.lookups == []

    run_async(body)


@pytest.mark.parametrize("target", ["/", "https://example.com/", "ftp://example.com/", "e.com:80"])
def test_what_is_not_plain_http_needs_a_tunnel(target: str) -> None:
    async def body() -> None:
        async with a_setting() as setting:
            assert (await setting.ask(f"GET {target} HTTP/1.1")).startswith("HTTP/1.1 403")

    run_async(body)


def test_silence_is_cut_off() -> None:
    async def body() -> None:
        limits = ProxyLimits(connect_timeout_s=0.05, idle_timeout_s=0.05)
        async with a_setting(answer=lambda _: Response(hang=True), limits=limits) as setting:
            assert await setting.send(b"GET http://example.com/ HT") == ""
            assert await setting.ask("GET http://example.com/ HTTP/1.1") == ""
            assert setting.internet.dialled == [PUBLIC_ADDRESS]

    run_async(body)


def test_reply_is_cut_at_the_limit() -> None:
    async def body() -> None:
        limits = ProxyLimits(max_bytes=1000)
        async with a_setting(answer=lambda _: Response("x" * 5000), limits=limits) as setting:
            reply = await setting.ask("GET http://example.com/ HTTP/1.1")
            assert reply.partition("\r\n\r\n")[2] == "x" * 1000

    run_async(body)


def test_unknown_name_and_silent_server_are_told() -> None:
    async def body() -> None:
        async with serving(refuse) as port, a_setting() as setting:
            setting.internet.site_port = port
            assert (await setting.ask("GET http://nobody.example/ HTTP/1.1")).startswith(
                "HTTP/1.1 502"
            )
            assert (await setting.ask("GET http://example.com/ HTTP/1.1")) == ""
            assert "no address" in setting.access.failures["nobody.example:80"]

    run_async(body)


async def refuse(stream: anyio.abc.SocketStream) -> None:
    await stream.aclose()


@pytest.mark.parametrize(
    ("url", "authority"),
    [("http://A.com/x", "a.com:80"), ("https://a.com", "a.com:443"), ("wss://a.com", "a.com:443"),
     ("https://u@a.com:8/", "a.com:8"), ("http://[::1]/", "[::1]:80"),
     ("http://[::1]:8/", "[::1]:8"),
     ("about:blank", ""), ("http://[", "")],
)  # fmt: skip
def test_note_is_found_under_host_and_port(url: str, authority: str) -> None:
    assert authority_of(url) == authority
