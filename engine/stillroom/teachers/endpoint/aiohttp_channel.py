"""Sends requests to a server with aiohttp, and limits the size of its responses."""

import functools
import select
import zlib
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
import anyio
import anyio.lowlevel
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

from stillroom import bounds
from stillroom.teachers.endpoint.http_channel import (
    ConnectionFailedError,
    HttpReply,
    NotConnectedError,
    UnreadableReplyError,
)
from stillroom.teachers.tls import client_context

MAX_BODY_BYTES = bounds.BODY.limit
"""The maximum number of bytes of a response's body, before and after decompression."""
MAX_HEADERS, MAX_HEADER_BYTES = bounds.REPLY_HEADERS.limit, bounds.REPLY_HEADER.limit
"""The maximum number of headers of a response, and the maximum number of bytes of each."""
CONNECT_TIMEOUT_S = bounds.CONNECT.limit
"""The timeout in seconds for connecting to a server."""
_KEEP_ALIVE_S = 60.0
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class AiohttpChannel:
    """Posts requests over pooled connections, one per request in flight, opened on demand."""

    def __init__(self, url: str, headers: Mapping[str, str], *, proxy: str | None = None) -> None:
        self._url = url
        self._address = urlsplit(url).netloc.rpartition("@")[2]
        self._headers = {
            "accept": "application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
            **headers,
        }
        proxy_url = URL(proxy or "")
        login = aiohttp.BasicAuth.from_url(proxy_url, encoding="utf-8")
        self.proxy = str(proxy_url.with_user(None)) if proxy else None
        self._proxy_headers = {} if login is None else {"proxy-authorization": login.encode()}
        if url.startswith("http:"):
            # The proxy reads each plain http request itself, so each must carry the proxy's login.
            # For https, aiohttp sends `proxy_headers` once, with the request that opens the tunnel.
            self._headers |= self._proxy_headers
        self._session: aiohttp.ClientSession | None = None
        self._used: WeakSet[BaseProtocol] = WeakSet()

    async def post(self, body: bytes, *, timeout_s: float, path: str = "") -> HttpReply:
        """Posts a JSON body and returns the response; see `HttpChannel.post` for the errors."""
        session = self._session = self._session or self._open_session()
        while True:
            payload = _Payload(body, self._used)
            try:
                # aiohttp's own total timeout is rounded up to whole seconds.
                with anyio.fail_after(timeout_s):
                    return await self._post(session, payload, path)
            except _StaleConnectionError:
                continue
            except (aiohttp.ClientError, OSError) as error:
                if not payload.is_sent:
                    raise NotConnectedError(self._connect_error_text(error, timeout_s)) from error
                raise _failure_after_sending(error) from error

    async def _post(
        self, session: aiohttp.ClientSession, payload: "_Payload", path: str
    ) -> HttpReply:
        """Posts a payload and returns the response, with its body decompressed."""
        async with session.post(
            self._url + path,
            data=payload,
            headers=self._headers,
            allow_redirects=False,
            proxy=self.proxy,
            proxy_headers=self._proxy_headers,
        ) as response:
            body = await _read(response.content)
            headers = {name.lower(): value for name, value in response.headers.items()}
            return HttpReply(response.status, headers, _decoded(body, headers))

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            # asyncio closes the sockets in the event loop's next iteration.
            await anyio.lowlevel.checkpoint()

    def _open_session(self) -> aiohttp.ClientSession:
        """Returns a session without cookies and redirects, whose connections are reused."""
        is_tls = self._url.startswith("https:") or (self.proxy or "").startswith("https:")
        connector = ReplyConnector(
            # The limiter already bounds the number of requests in flight.
            limit=0,
            keepalive_timeout=_KEEP_ALIVE_S,
            ssl=client_context() if is_tls else True,
            resolver=aiohttp.ThreadedResolver(),
        )
        return aiohttp.ClientSession(
            connector=connector,
            request_class=_Request,
            # A cookie that a server sets in one conversation must not be sent in another one.
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    def _connect_error_text(self, error: Exception, timeout_s: float) -> str:
        reason = str(error)
        if isinstance(error, TimeoutError):
            reason = f"timed out after {min(timeout_s, CONNECT_TIMEOUT_S):g} s"
        return f"cannot connect to {self._address}: {reason}"


class _ReplyProtocol(ResponseHandler):
    """Parses the status line and headers of a reply separately from its body.

    aiohttp drops a reply, which may have been paid for, if bytes that are not HTTP follow it in the
    same read. If the head is parsed first, it drops only those bytes and closes the connection.
    """

    def set_response_params(self, **options: Any) -> None:
        """Prepares for the next reply on the connection."""
        self._payload = None
        self._read_before = b""
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Parses bytes from the connection."""
        while self._payload is None:
            # The blank line at the end of the head may have begun in the read before.
            start = (self._read_before + data).find(b"\r\n\r\n")
            end = start + 4 - len(self._read_before)
            if start < 0 or end >= len(data):
                break
            super().data_received(data[:end])
            data, self._read_before = data[end:], b""
        self._read_before = data[-3:]
        super().data_received(data)
        payload, error = self._payload, self.exception()
        if error is not None and payload is not None and not payload.is_eof():
            # aiohttp's parser abandons the body in which it failed: its reader would wait forever.
            payload.set_exception(aiohttp.ClientPayloadError("the body is not HTTP"), error)


class ReplyConnector(aiohttp.TCPConnector):
    """Opens connections that keep a reply even if stray bytes follow its end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = functools.partial(_ReplyProtocol, loop=self._loop)


class _StaleConnectionError(Exception):
    """An idle connection was closed by the server, or holds data that no request asked for."""


class _Payload(aiohttp.BytesPayload):
    """A request's body, which records whether the request was sent."""

    def __init__(self, body: bytes, used: WeakSet[BaseProtocol]) -> None:
        super().__init__(body)
        self.used = used
        """The channel's connections that have already carried a request."""
        self.is_sent = False


class _Request(aiohttp.ClientRequest):
    """A request that reuses an idle connection only if its socket has nothing to read.

    aiohttp itself checks only what its event loop has already noticed. It would take an unrequested
    response, which arrived while the connection was idle, for the response to the next request.
    """

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        """Sends the request. Raises _StaleConnectionError if an idle connection is unusable."""
        payload, protocol = cast("_Payload", self.body), conn.protocol
        if protocol is not None and protocol in payload.used:
            if protocol.should_close or _is_readable(conn):
                raise _StaleConnectionError
        elif protocol is not None:
            payload.used.add(protocol)
        payload.is_sent = True
        return await super().send(conn)


def _is_readable(connection: Connection) -> bool:
    """Whether a connection's socket has data to read, or is closed."""
    transport = connection.transport
    if transport is None:
        return True
    # select.select cannot handle file descriptors of 1,024 and above; poll can.
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _failure_after_sending(error: Exception) -> Exception:
    """Returns the exception to raise for an error that occurred after the request was sent."""
    if isinstance(error, TimeoutError):
        return error
    if isinstance(error, aiohttp.ClientResponseError):
        return UnreadableReplyError(f"the response is not HTTP ({error.message})")
    detail = f": {error}" if isinstance(error, OSError) else ""
    return ConnectionFailedError(f"the connection broke{detail}")


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Returns a response's body. Raises UnreadableReplyError if it exceeds MAX_BODY_BYTES."""
    parts: list[bytes] = []
    num_bytes = 0
    async for part in content.iter_any():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_long()
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decoded(body: bytes, headers: Mapping[str, str]) -> bytes:
    """Returns the decompressed body. Raises UnreadableReplyError if it cannot be decompressed."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    # The request asks for no compression, but some servers compress anyway.
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise UnreadableReplyError(f"the response has an unsupported encoding, {encoding!r}")
    try:
        decoded = zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise UnreadableReplyError(str(error)) from error
    if len(decoded) > MAX_BODY_BYTES:
        raise _too_long()
    return decoded


def _too_long() -> UnreadableReplyError:
    return UnreadableReplyError(f"the response is longer than {MAX_BODY_BYTES} bytes")
