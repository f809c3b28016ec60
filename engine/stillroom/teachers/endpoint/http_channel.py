"""Posting JSON to one endpoint: the small seam under the teacher's client.

httpx carries the request where it must: through a proxy, or over a transport that a test gives.
Everywhere else connections of our own do, as httpx costs several times the CPU per call.
"""

import asyncio
import select
import ssl
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import httptools
import httpx

from stillroom.settings import proxy_for

MAX_BODY_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 30.0
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class ConnectionFailedError(Exception):
    """No whole response came: nobody listens, or the connection broke."""


class NotConnectedError(ConnectionFailedError):
    """Nothing was sent: nobody listens or answers, or the name is not known."""


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

    async def post(self, body: bytes, *, timeout_s: float) -> HttpReply:
        """Returns the response to a JSON body.

        Raises:
            TimeoutError: it is not there in time.
            ConnectionFailedError: see there.
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
            headers={
                "accept-encoding": "identity",
                **headers,
                "content-type": "application/json",
            },
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )

    async def post(self, body: bytes, *, timeout_s: float) -> HttpReply:
        """Sends the request."""
        try:
            # httpx's own timeout starts again with every byte that comes in.
            with anyio.fail_after(timeout_s):
                async with self._client.stream("POST", self._url, content=body) as response:
                    content = await _read(response)
        except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise NotConnectedError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except httpx.TimeoutException as error:
            raise TimeoutError(type(error).__name__) from error
        except httpx.ConnectError as error:
            raise NotConnectedError(f"{type(error).__name__}: {error}") from error
        except httpx.TransportError as error:
            raise ConnectionFailedError(f"{type(error).__name__}: {error}") from error
        except httpx.DecodingError as error:
            raise UnreadableReplyError(str(error)) from error
        return HttpReply(response.status_code, dict(response.headers), content)

    async def aclose(self) -> None:
        """Closes the client."""
        await self._client.aclose()


class KeepAliveChannel:
    """HTTP/1.1 connections of our own: as many as there are callers, used again afterwards.

    They are asyncio's protocols, not anyio's streams: with hundreds of calls at once, what the
    streams do between one read and the next is most of a call's cost.
    """

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
        self._idle: list[_Connection] = []

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The same trust in certificates that httpx has, SSL_CERT_FILE included."""
        return httpx.create_ssl_context()

    async def post(self, body: bytes, *, timeout_s: float) -> HttpReply:
        """Sends the request over an idle connection or a new one."""
        connection = self._take_idle() or await self._connect(timeout_s)
        try:
            response = await connection.request(
                b"%b%d\r\n\r\n%b" % (self._head, len(body), body), timeout_s
            )
        except BaseException:
            # Its answer may still be on the way, so it can serve no other request.
            connection.close()
            raise
        if response.keeps_alive:
            self._idle.append(connection)
        else:
            connection.close()
        return HttpReply(response.status, response.headers, _decoded(response))

    async def aclose(self) -> None:
        """Closes what is idle."""
        while self._idle:
            self._idle.pop().close()
        # Closing takes effect in the loop's next round.
        await anyio.lowlevel.checkpoint()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_ended():
                return connection
            connection.close()
        return None

    async def _connect(self, timeout_s: float) -> "_Connection":
        loop = asyncio.get_running_loop()
        timeout_s = min(timeout_s, CONNECT_TIMEOUT_S)
        try:
            with anyio.fail_after(timeout_s):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls if self._is_tls else None
                )
        except OSError as error:
            why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error
            message = f"cannot connect to {self._host}:{self._port}: {why}"
            raise NotConnectedError(message) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection and the response it is waiting for."""

    def __init__(self) -> None:
        self.is_closed = False
        self._transport: asyncio.WriteTransport | None = None
        self._response = _Response()
        self._waiting: asyncio.Future[_Response] | None = None
        self._poll = select.poll()

    async def request(self, data: bytes, timeout_s: float) -> "_Response":
        """Sends a request and returns the response to it.

        Raises:
            TimeoutError: there was none in time.
            ConnectionFailedError, UnreadableReplyError: see there.
        """
        loop = asyncio.get_running_loop()
        self._response, self._waiting = _Response(), loop.create_future()
        deadline = loop.call_later(timeout_s, self._end, TimeoutError())
        try:
            if self._transport is None or self.is_closed:
                raise ConnectionFailedError("the connection broke")
            self._transport.write(data)
            return await self._waiting
        finally:
            deadline.cancel()
            self._waiting = None

    def has_ended(self) -> bool:
        """Returns whether the server closed it, also where the loop has not noticed yet."""
        if self._transport is None or self.is_closed:
            return True
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Ends it at once; a polite TLS goodbye could hang."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast("asyncio.WriteTransport", transport)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._waiting is None:
            # Nobody asked for it, so it would be taken for the next answer.
            self.close()
            return
        response = self._response
        try:
            response.feed(data)
        except httptools.HttpParserError as error:
            self._end(UnreadableReplyError(f"the answer is not HTTP ({error})"))
            return
        if response.is_final:
            self._finish()
        elif response.num_bytes > MAX_BODY_BYTES:
            self._end(_too_long())

    def eof_received(self) -> bool:
        """Called by asyncio; False closes the transport."""
        if self._waiting is not None and self._response.ends_with_connection():
            self._finish()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.is_closed = True
        detail = f": {exc}" if exc else ""
        self._end(ConnectionFailedError(f"the connection broke{detail}"))

    def _finish(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self._response)

    def _end(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


class _Response:
    """A response as httptools reads it: the names of its callbacks are given."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.num_bytes = 0
        self.has_head = self.is_complete = self.keeps_alive = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        """The status code."""
        return self._parser.get_status_code()

    @property
    def is_final(self) -> bool:
        """Whether it is there whole; 1xx only announces the real one."""
        return self.is_complete and self.status >= 200

    def feed(self, data: bytes) -> None:
        """Reads more of it."""
        self._parser.feed_data(data)

    def ends_with_connection(self) -> bool:
        """Returns whether the body's end is the connection's end, as nothing else says it."""
        is_framed = {"content-length", "transfer-encoding"} & self.headers.keys()
        return self.has_head and not is_framed

    def on_message_begin(self) -> None:
        """Called by httptools, as are the others."""
        self.headers, self.parts = {}, []
        self.has_head = self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Remembers that only the body is to come."""
        self.has_head = True

    def on_body(self, part: bytes) -> None:
        """Keeps a part of the body."""
        self.num_bytes += len(part)
        self.parts.append(part)

    def on_message_complete(self) -> None:
        """Asks what only here the parser knows."""
        self.is_complete = True
        self.keeps_alive = self._parser.should_keep_alive()


async def _read(response: httpx.Response) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in response.aiter_bytes():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_long()
        parts.append(part)
    return b"".join(parts)


def _decoded(response: _Response) -> bytes:
    body = b"".join(response.parts)
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    # We ask for none, but some servers compress all the same.
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise UnreadableReplyError(f"the answer is encoded as {encoding!r}")
    try:
        decoded = zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise UnreadableReplyError(str(error)) from error
    if len(decoded) > MAX_BODY_BYTES:
        raise _too_long()
    return decoded


def _too_long() -> UnreadableReplyError:
    return UnreadableReplyError(f"the answer is longer than {MAX_BODY_BYTES} bytes")
