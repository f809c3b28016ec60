"""Posting JSON to one endpoint: the small seam under the teacher's client.

httpx carries the request where it must: through a proxy, or over a transport that a test gives.
Everywhere else connections of our own do, as httpx costs several times the CPU per call.
"""

import select
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol
from urllib.parse import urlsplit

import anyio
import httptools
import httpx
from anyio.abc import ByteStream, SocketAttribute

from stillroom.settings import proxy_for

MAX_BODY_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 30.0
_READ_BYTES = 1 << 16


class ConnectionFailedError(Exception):
    """No whole response came: nobody listens, or the connection broke."""


class NotConnectedError(ConnectionFailedError):
    """Nothing was sent: nobody listens, or the name is not known."""


class UnreadableReplyError(Exception):
    """What came is no HTTP response, longer than any answer, or encoded in an unknown way."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole response; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpChannel(Protocol):
    """Sends one request at a time per caller; any number of callers at once."""

    async def post(self, body: bytes) -> HttpReply:
        """Returns the response to a JSON body.

        Raises:
            ConnectionFailedError: see there. Deadlines are the caller's.
            UnreadableReplyError: see there.
        """
        ...

    async def aclose(self) -> None:
        """Closes the connections that are idle."""
        ...


def open_channel(
    url: str, headers: Mapping[str, str], *, transport: httpx.AsyncBaseTransport | None = None
) -> HttpChannel:
    """Returns the channel for an address."""
    if transport is not None or proxy_for(url) is not None:
        return HttpxChannel(url, headers, transport)
    return KeepAliveChannel(url, headers)


class HttpxChannel:
    """Requests by httpx, which knows proxies."""

    def __init__(
        self, url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self._url = url
        self._client = httpx.AsyncClient(
            headers={**headers, "content-type": "application/json"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )

    async def post(self, body: bytes) -> HttpReply:
        """Sends the request."""
        try:
            response = await self._client.post(self._url, content=body)
        except httpx.TimeoutException as error:
            raise TimeoutError(type(error).__name__) from error
        except httpx.ConnectError as error:
            raise NotConnectedError(f"{type(error).__name__}: {error}") from error
        except httpx.TransportError as error:
            raise ConnectionFailedError(f"{type(error).__name__}: {error}") from error
        except httpx.DecodingError as error:
            raise UnreadableReplyError(str(error)) from error
        return HttpReply(response.status_code, dict(response.headers), response.content)

    async def aclose(self) -> None:
        """Closes the client."""
        await self._client.aclose()


class KeepAliveChannel:
    """HTTP/1.1 connections of our own: as many as there are callers, used again afterwards."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [
            f"POST {target or '/'} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "accept: application/json",
            "accept-encoding: identity",
            "content-type: application/json",
            *(f"{name}: {value}" for name, value in headers.items()),
            "content-length: ",
        ]
        self._head = "\r\n".join(lines).encode("latin-1")
        self._idle: list[ByteStream] = []

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The same trust in certificates that httpx has, SSL_CERT_FILE included."""
        return httpx.create_ssl_context()

    async def post(self, body: bytes) -> HttpReply:
        """Sends the request over an idle connection or a new one."""
        stream = await self._take_idle() or await self._connect()
        try:
            await stream.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            response = await _read_response(stream)
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError) as error:
            await _close(stream)
            detail = f": {error}" if str(error) else ""
            raise ConnectionFailedError(f"the connection broke{detail}") from error
        except BaseException:
            # Its answer may still be on the way, so it can serve no other request.
            await _close(stream)
            raise
        if response.keeps_alive:
            self._idle.append(stream)
        else:
            await _close(stream)
        return HttpReply(response.status, response.headers, _decoded(response))

    async def aclose(self) -> None:
        """Closes what is idle."""
        while self._idle:
            await _close(self._idle.pop())

    async def _take_idle(self) -> ByteStream | None:
        while self._idle:
            stream = self._idle.pop()
            # Something to read before a request was sent is the end, or nothing good.
            if not _is_readable(stream.extra(SocketAttribute.raw_socket)):
                return stream
            await _close(stream)
        return None

    async def _connect(self) -> ByteStream:
        try:
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                if not self._is_tls:
                    return await anyio.connect_tcp(self._host, self._port)
                return await anyio.connect_tcp(
                    self._host,
                    self._port,
                    tls=True,
                    ssl_context=self._tls,
                    tls_standard_compatible=False,
                )
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            reason = error.__cause__ or error
            message = f"cannot connect to {self._host}:{self._port}: {reason}"
            raise NotConnectedError(message) from error


@dataclass(slots=True)
class _Response:
    """A response as httptools reads it: the names of its callbacks are given."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    parts: list[bytes] = field(default_factory=list[bytes])
    num_bytes: int = 0
    has_head: bool = False
    is_complete: bool = False
    keeps_alive: bool = False
    status: int = 0
    parser: httptools.HttpResponseParser | None = None

    def on_message_begin(self) -> None:
        self.headers, self.parts = {}, []
        self.has_head = self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, part: bytes) -> None:
        self.num_bytes += len(part)
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.is_complete = True
        # Only here does the parser know.
        self.keeps_alive = self.parser is not None and self.parser.should_keep_alive()

    def ends_with_connection(self) -> bool:
        """Returns whether the body's end is the connection's end, as nothing else says it."""
        is_framed = {"content-length", "transfer-encoding"} & self.headers.keys()
        return self.has_head and not is_framed


async def _read_response(stream: ByteStream) -> _Response:
    response = _Response()
    response.parser = parser = httptools.HttpResponseParser(response)
    try:
        # 1xx only announces the real response.
        while not response.is_complete or parser.get_status_code() < 200:
            try:
                data = await stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                if not response.ends_with_connection():
                    raise
                break
            parser.feed_data(data)
            if response.num_bytes > MAX_BODY_BYTES:
                raise UnreadableReplyError(f"the answer is longer than {MAX_BODY_BYTES} bytes")
    except httptools.HttpParserError as error:
        raise UnreadableReplyError(f"the answer is not HTTP ({error})") from error
    response.status = parser.get_status_code()
    return response


def _decoded(response: _Response) -> bytes:
    body = b"".join(response.parts)
    if response.headers.get("content-encoding", "identity") == "identity":
        return body
    # We ask for none, but some servers compress all the same.
    try:
        return httpx.Response(200, headers=response.headers, content=body).content
    except httpx.DecodingError as error:
        raise UnreadableReplyError(str(error)) from error


def _is_readable(raw: socket.socket) -> bool:
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _close(stream: ByteStream) -> None:
    # Not a polite TLS goodbye: the other side may be what hangs.
    await anyio.aclose_forcefully(stream)
