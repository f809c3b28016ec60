"""The browser's only way to the network: a forward proxy that dials only addresses it has checked.

The proxy resolves each name once, checks all of its addresses, and connects to one of exactly
these. So the policy also covers redirects, frames, scripts' requests and websockets, and DNS
rebinding cannot bypass it.
"""

import base64
import binascii
import hmac
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

import anyio
import anyio.abc
from anyio import AsyncContextManagerMixin
from anyio.streams.buffered import BufferedByteReceiveStream

from stillroom import bounds
from stillroom.reporting import background_tasks
from stillroom.tools.browser.addresses import (
    AddressBlockedError,
    AddressPolicy,
    IPAddress,
    Target,
)

_MAX_HEAD_BYTES = bounds.PROXY_HEAD.limit
_MAX_ADDRESSES = 4
_MAX_FAILURES = 64
_CHUNK_BYTES = 64 << 10

# Headers that concern one connection only, or hold the browser's credential for this proxy.
_HOP_HEADERS = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
        "proxy-connection", "te", "trailer", "upgrade",
    }
)  # fmt: skip
_DISCONNECTED = (
    anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead,
    OSError,
)  # fmt: skip

_Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a name. Raises OSError if it has none."""
Dial = Callable[[IPAddress, int], Awaitable[anyio.abc.ByteStream]]
"""Connects to exactly one address. Raises OSError if that fails."""


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Limits of one connection through the proxy."""

    connect_timeout_s: float = 15.0
    """The limit in seconds of each step: the request's head, the DNS lookup, connecting."""
    idle_timeout_s: float = 120.0
    max_connection_s: float = 900.0
    max_bytes: int = 128 << 20
    """The limit of bytes in each direction."""
    max_connections: int = 1024


@dataclass(eq=False, slots=True)
class ProxyAccess:
    """One session's credential for the proxy. It and its connections end with the session."""

    username: str
    password: str
    failures: dict[str, str] = field(default_factory=dict[str, str])
    """The latest reasons why targets were blocked or not reached, by `host:port`."""
    scopes: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])

    def record_failure(self, target: str, reason: str) -> None:
        """Records why a target was not reached, for the message to the model."""
        self.failures.pop(target, None)
        self.failures[target] = reason
        if len(self.failures) > _MAX_FAILURES:
            del self.failures[next(iter(self.failures))]


class BrowseProxy(AsyncContextManagerMixin):
    """A proxy on a free port of the loopback, for CONNECT and plain http with a ProxyAccess.

    Use as an async context manager.
    """

    def __init__(
        self,
        policy: AddressPolicy,
        *,
        limits: ProxyLimits | None = None,
        resolve: _Resolve | None = None,
        dial: Dial | None = None,
    ) -> None:
        self._policy = policy
        self._limits = limits or ProxyLimits()
        self._resolve = resolve or _resolve
        self._dial = dial or _dial
        self._accesses: dict[str, ProxyAccess] = {}
        self._num_open = 0
        self.port = 0
        self.num_blocked = 0
        """The number of requests that the policy blocked."""
        self.num_dialled = 0
        """The number of attempted connections; a blocked request attempts none."""

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        try:
            async with background_tasks() as tasks:
                tasks.start_soon(listener.serve, self.serve)
                yield self
        finally:
            with anyio.CancelScope(shield=True):
                await listener.aclose()

    @property
    def url(self) -> str:
        """The proxy's URL for the browser."""
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def open_access(self) -> Generator[ProxyAccess]:
        """Yields a credential, which is revoked and its connections closed at the block's end."""
        access = ProxyAccess(username=secrets.token_hex(8), password=secrets.token_urlsafe(32))
        self._accesses[access.username] = access
        try:
            yield access
        finally:
            del self._accesses[access.username]
            for scope in access.scopes:
                scope.cancel()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        """Serves one connection of the browser; raises no error if either side closes it early."""
        if self._num_open >= self._limits.max_connections:
            await stream.aclose()
            return
        self._num_open += 1
        try:
            with suppress(*_DISCONNECTED):
                async with stream:
                    with (
                        anyio.move_on_after(self._limits.max_connection_s),
                        anyio.move_on_after(self._limits.connect_timeout_s) as scope,
                    ):
                        await self._serve(_BrowserConnection(stream, scope))
        finally:
            self._num_open -= 1

    async def _serve(self, browser: "_BrowserConnection") -> None:
        """Reads a request, checks its credential and forwards it."""
        try:
            request = _parse_request(await _receive_head(browser.received))
        except (anyio.DelimiterNotFound, _BadRequestError) as error:
            await browser.stream.send(_encode_reply("400 Bad Request", str(error)))
            return
        access = self._find_access(request)
        if access is None:
            challenge = 'Proxy-Authenticate: Basic realm="stillroom"\r\n'
            await browser.stream.send(
                _encode_reply("407 Proxy Authentication Required", "", challenge)
            )
            return
        access.scopes.add(browser.scope)
        # The DNS lookup and the connection have their own, shorter timeouts.
        browser.extend(3 * self._limits.connect_timeout_s)
        try:
            await self._forward(browser, request, access)
        finally:
            access.scopes.discard(browser.scope)

    def _find_access(self, request: "_Request") -> ProxyAccess | None:
        """Returns the access whose credential a request has; None if it has no valid one."""
        scheme, _, credential = request.header("proxy-authorization").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            decoded = base64.b64decode(credential.strip(), validate=True).decode("ascii")
        except (binascii.Error, UnicodeError):
            return None
        username, _, password = decoded.partition(":")
        access = self._accesses.get(username)
        if access is None or not hmac.compare_digest(access.password, password):
            return None
        return access

    async def _forward(
        self, browser: "_BrowserConnection", request: "_Request", access: ProxyAccess
    ) -> None:
        """Connects to the target of a request and relays its bytes, or replies with an error."""
        try:
            target = self._checked_target(request)
            addresses = await self._resolve_checked(target)
        except AddressBlockedError as error:
            self.num_blocked += 1
            access.record_failure(request.authority, str(error))
            await browser.stream.send(_encode_reply("403 Forbidden", f"refused: {error}"))
            return
        except (OSError, TimeoutError, UnicodeError):
            reason = "its host name has no address"
            access.record_failure(request.authority, reason)
            await browser.stream.send(_encode_reply("502 Bad Gateway", reason))
            return
        try:
            server = await self._connect(addresses, target.port)
        except (OSError, TimeoutError) as error:
            reason = f"the connection failed ({error or 'timed out'})"
            access.record_failure(request.authority, reason)
            await browser.stream.send(_encode_reply("504 Gateway Timeout", reason))
            return
        async with server:
            browser.extend(self._limits.idle_timeout_s)
            if request.is_connect:
                await self._tunnel(browser, server)
            else:
                await self._exchange(browser, server, request)

    def _checked_target(self, request: "_Request") -> Target:
        """Returns the target of a request. Raises AddressBlockedError if it is not allowed."""
        if request.is_connect:
            return self._policy.check_authority(request.target, default_port=None)
        if not request.target.lower().startswith("http://"):
            raise AddressBlockedError("without CONNECT only http:// URLs are forwarded")
        return self._policy.check_url(request.target)

    async def _resolve_checked(self, target: Target) -> list[IPAddress]:
        """Returns the addresses to dial. Raises AddressBlockedError if any of them is blocked."""
        if target.address is not None:
            return [self._policy.check_address(target.address, target)]
        with anyio.fail_after(self._limits.connect_timeout_s):
            addresses = await self._resolve(target.host, target.port)
        checked = [self._policy.check_address(address, target) for address in addresses]
        if not checked:
            raise OSError("no address")
        return list(dict.fromkeys(checked))[:_MAX_ADDRESSES]

    async def _connect(self, addresses: list[IPAddress], port: int) -> anyio.abc.ByteStream:
        """Returns a connection to the first address that accepts one. Raises the last OSError."""
        failure: OSError | None = None
        with anyio.fail_after(self._limits.connect_timeout_s):
            for address in addresses:
                self.num_dialled += 1
                try:
                    return await self._dial(address, port)
                except OSError as error:
                    failure = error
        raise failure or OSError("no address")

    async def _tunnel(self, browser: "_BrowserConnection", server: anyio.abc.ByteStream) -> None:
        """Relays bytes in both directions until either side closes."""
        await browser.stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        async with anyio.create_task_group() as tasks:

            async def send_upstream() -> None:
                with suppress(*_DISCONNECTED):
                    await self._forward_bytes(browser, browser.received, server)
                tasks.cancel_scope.cancel()

            tasks.start_soon(send_upstream)
            with suppress(*_DISCONNECTED):
                await self._forward_bytes(browser, server, browser.stream)
            tasks.cancel_scope.cancel()

    async def _exchange(
        self, browser: "_BrowserConnection", server: anyio.abc.ByteStream, request: "_Request"
    ) -> None:
        """Forwards one request and its reply. The connection serves no further request."""
        await server.send(request.head_for_server())
        async with anyio.create_task_group() as tasks:

            async def send_body() -> None:
                with suppress(*_DISCONNECTED):
                    length = request.body_length
                    await self._forward_bytes(browser, browser.received, server, length)
                    # Nothing may follow the body; this waits until the browser disconnects.
                    await browser.received.receive(1)
                tasks.cancel_scope.cancel()

            tasks.start_soon(send_body)
            with suppress(*_DISCONNECTED):
                reply = BufferedByteReceiveStream(server)
                await self._forward_reply(browser, reply, request.method)
            tasks.cancel_scope.cancel()

    async def _forward_reply(
        self, browser: "_BrowserConnection", server: BufferedByteReceiveStream, method: str
    ) -> None:
        """Forwards the server's reply to the browser."""
        try:
            status_line, headers = _parse_head(await _receive_head(server))
            # Interim replies (1xx) are dropped. No upgrade (101) can come, as none is passed on.
            while status_line.startswith("HTTP/1.1 1"):
                status_line, headers = _parse_head(await _receive_head(server))
        except (anyio.DelimiterNotFound, _BadRequestError):
            await browser.stream.send(
                _encode_reply("502 Bad Gateway", "the server sent an invalid reply")
            )
            return
        reply_headers = [*_without_hop_headers(headers), ("Connection", "close")]
        await browser.stream.send(_encode_head(status_line, reply_headers))
        length = _body_length(method, status_line, headers)
        await self._forward_bytes(browser, server, browser.stream, length)

    async def _forward_bytes(
        self,
        browser: "_BrowserConnection",
        source: anyio.abc.ByteReceiveStream,
        sink: anyio.abc.ByteSendStream,
        num_bytes: int | None = None,
    ) -> None:
        """Copies bytes until the source ends, or `num_bytes` or the limit is reached."""
        bytes_left = self._limits.max_bytes
        if num_bytes is not None:
            bytes_left = min(bytes_left, num_bytes)
        while bytes_left > 0:
            # Traffic in either direction keeps the connection alive.
            browser.extend(self._limits.idle_timeout_s)
            chunk = await source.receive(min(bytes_left, _CHUNK_BYTES))
            await sink.send(chunk)
            bytes_left -= len(chunk)


class _BadRequestError(Exception):
    """The received bytes are not an HTTP request that this proxy accepts."""


class _BrowserConnection:
    """The browser's side of a connection, with the scope that holds its deadline."""

    def __init__(self, stream: anyio.abc.ByteStream, scope: anyio.CancelScope) -> None:
        self.stream, self.scope = stream, scope
        self.received = BufferedByteReceiveStream(stream)

    def extend(self, timeout_s: float) -> None:
        """Moves the connection's deadline to `timeout_s` seconds from now."""
        self.scope.deadline = anyio.current_time() + timeout_s


@dataclass(frozen=True, slots=True)
class _Request:
    """The head of a request to the proxy."""

    method: str
    target: str
    """The `host:port` of a CONNECT request, else the absolute URL."""
    headers: list[tuple[str, str]]

    @property
    def is_connect(self) -> bool:
        return self.method == "CONNECT"

    @property
    def authority(self) -> str:
        """The `host:port` under which failures of this request are recorded."""
        if self.is_connect:
            return self.target.lower()
        return authority_of(self.target)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def body_length(self) -> int:
        return int(self.header("content-length") or 0)

    def head_for_server(self) -> bytes:
        """Returns the head for the server, in origin form, with `Connection: close`."""
        _, _, rest = self.target.partition("://")
        split = min((rest.find(mark) for mark in "/?#" if mark in rest), default=len(rest))
        authority, path = rest[:split], rest[split:].partition("#")[0]
        others = [(k, v) for k, v in _without_hop_headers(self.headers) if k.lower() != "host"]
        request_line = f"{self.method} {path if path.startswith('/') else '/' + path} HTTP/1.1"
        return _encode_head(request_line, [("Host", authority), *others, ("Connection", "close")])


def authority_of(url: str) -> str:
    """Returns the `host:port` of a URL in the browser's notation; empty if it has none."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    host = parts.netloc.rpartition("@")[2].lower()
    if not host or host.rpartition("]")[2].startswith(":") or ":" in host.rpartition("]")[2]:
        return host
    return f"{host}:{443 if parts.scheme in ('https', 'wss') else 80}"


async def _receive_head(stream: BufferedByteReceiveStream) -> bytes:
    return await stream.receive_until(b"\r\n\r\n", _MAX_HEAD_BYTES)


def _parse_request(head: bytes) -> _Request:
    """Parses the head of a request. Raises _BadRequestError."""
    request_line, headers = _parse_head(head)
    parts = request_line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[0].isalpha():
        raise _BadRequestError("this is not an HTTP/1 request to a proxy")
    request = _Request(method=parts[0], target=parts[1], headers=headers)
    if request.header("transfer-encoding"):
        raise _BadRequestError("a body without a content length is not forwarded")
    length = request.header("content-length")
    if length and not (length.isascii() and length.isdigit() and len(length) < 12):
        raise _BadRequestError("the content length is not a number")
    return request


def _parse_head(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    """Returns the first line and the headers. Raises _BadRequestError."""
    # latin-1 keeps every byte as it is; a lone CR or LF could hide a header from this check.
    first_line, *lines = head.decode("latin-1").split("\r\n")
    headers: list[tuple[str, str]] = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or any(mark in line for mark in "\r\n\0"):
            raise _BadRequestError("a header is not written as `name: value`")
        headers.append((name.strip(), value.strip()))
    return first_line, headers


def _body_length(method: str, status_line: str, headers: list[tuple[str, str]]) -> int | None:
    """Returns the length of a reply's body; None if it is chunked or ends with the connection."""
    if method == "HEAD" or status_line[9:12] in ("204", "304"):
        return 0
    values = {name.lower(): value for name, value in headers}
    length = values.get("content-length", "")
    if "transfer-encoding" in values or not (length.isascii() and length.isdigit()):
        return None
    return int(length[:12])


def _without_hop_headers(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_HEADERS]


def _encode_head(first_line: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [first_line, *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _encode_reply(status: str, text: str, header: str = "") -> bytes:
    body = text.encode("utf-8")
    head = (
        f"HTTP/1.1 {status}\r\n{header}Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


async def _resolve(host: str, port: int) -> Sequence[str]:
    addresses = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [address[4][0] for address in addresses]


async def _dial(address: IPAddress, port: int) -> anyio.abc.ByteStream:
    # A literal address, so that nothing is resolved a second time.
    return await anyio.connect_tcp(str(address), port)
