"""Sends requests to upstreams over pooled connections."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from stillroom import bounds
from stillroom.errors import InputError
from stillroom.recording.capture import CapturedBody
from stillroom.recording.headers import Headers, RequestHead, decode_headers, decode_reason
from stillroom.recording.upstreams import Upstream
from stillroom.teachers.endpoint.aiohttp_channel import ReplyConnector
from stillroom.teachers.endpoint.attempts import http_proxy
from stillroom.teachers.tls import client_context

_CONNECT_S = bounds.CONNECT.limit
_KEEP_ALIVE_S = 30.0
_CLOSED_WITHIN_S = 1.0
"""A disconnect this soon after sending means that the pooled connection was already closed."""
_LONGEST_LINE = bounds.UPSTREAM_LINE.limit
_MAX_HEADERS = bounds.UPSTREAM_HEADERS.limit
_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class UpstreamError(Exception):
    """Raised if the upstream does not reply, or its reply is incomplete."""

    def __init__(self, reason: str, *, was_sent: bool = True) -> None:
        super().__init__(reason)
        self.was_sent = was_sent
        """Whether the request may have reached the upstream."""


class RequestBody:
    """The body of a client's request, which can be sent again if it was captured completely.

    `on_complete` is called after the last block.
    """

    def __init__(
        self,
        content: aiohttp.StreamReader,
        captured: CapturedBody,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self.captured = captured
        self._content, self._on_complete = content, on_complete

    async def blocks(self) -> AsyncIterator[bytes]:
        """Yields the whole body: the captured part, then the rest as it arrives."""
        for part in [*self.captured.parts]:
            yield part
        async for block in self._content.iter_any():
            self.captured.add(block)
            yield block
        self._on_complete()

    async def receive(self) -> bool:
        """Waits until the body has arrived; returns False if it is too long to be captured."""
        async for block in self._content.iter_any():
            self.captured.add(block)
            if not self.captured.is_complete:
                return False
        return True


class UpstreamReply:
    """A reply whose status and headers have arrived."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply
        self.status, self.reason = reply.status, decode_reason(reply.reason or "")
        self.headers: Headers = decode_headers(reply.raw_headers)
        connection = reply.connection
        self._unframed_connection: ResponseHandler | None = None
        """The connection whose end is the end of the reply; None with Content-Length or chunks."""
        is_framed = "Content-Length" in reply.headers or "Transfer-Encoding" in reply.headers
        if connection is not None and not is_framed:
            self._unframed_connection = connection.protocol

    @property
    def is_received(self) -> bool:
        """Whether the whole reply has arrived, even if it has not been read."""
        return self._reply.content.is_eof()

    @property
    def is_read(self) -> bool:
        """Whether the whole reply has been read."""
        return self._reply.content.at_eof()

    async def next_block(self) -> bytes:
        """Returns the next chunk, or the part of it that has arrived; b"" at the end.

        Raises UpstreamError if the upstream aborted the reply.
        """
        try:
            while not self._reply.content.at_eof():
                # readchunk returns an empty block for the end of a chunk that was already read.
                block, _ = await self._reply.content.readchunk()
                if block:
                    return block
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(_reason(error)) from error
        connection = self._unframed_connection
        if connection is not None and isinstance(connection.exception(), OSError):
            raise UpstreamError("connection reset by the upstream")
        return b""

    def close(self) -> None:
        """Closes the connection, or returns it to the pool if the reply was read completely."""
        self._reply.close()


class UpstreamClient:
    """Sends requests. With `has_tls`, certificates are verified (see `tls.client_context`)."""

    def __init__(self, *, has_tls: bool) -> None:
        self._has_tls = has_tls
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, upstream: Upstream, head: RequestHead, headers: Headers, body: RequestBody | None
    ) -> UpstreamReply:
        """Sends a request and returns the reply once its headers arrive. Raises UpstreamError.

        A request is resent only if its pooled connection turned out to be closed. Otherwise it
        is not, since a request that was sent may already have been processed, and billed.
        """
        session = self._session = self._session or _new_session(has_tls=self._has_tls)
        loop = asyncio.get_running_loop()
        while True:
            attempt = SimpleNamespace(is_reused=False)
            sent_at = loop.time()
            try:
                reply = await session.request(
                    head.method,
                    URL(f"{upstream.origin}{head.target}", encoded=True),
                    headers=headers,
                    data=body.blocks() if body else None,
                    skip_auto_headers=_AUTO_HEADERS,
                    allow_redirects=False,
                    # The proxy in HTTPS_PROXY sees only the upstream's host name.
                    proxy=http_proxy(upstream.origin) if upstream.scheme == "https" else None,
                    trace_request_ctx=attempt,
                )
            except (aiohttp.ClientError, InputError, OSError, ValueError) as error:
                is_disconnected = isinstance(error, (aiohttp.ServerDisconnectedError, OSError))
                is_stale = attempt.is_reused and loop.time() - sent_at < _CLOSED_WITHIN_S
                if is_disconnected and is_stale and (body is None or body.captured.is_complete):
                    # The previous attempt's writer must stop reading the body.
                    await asyncio.sleep(0)
                    continue
                was_sent = not isinstance(error, (aiohttp.ClientConnectorError, InputError))
                raise UpstreamError(_reason(error), was_sent=was_sent) from error
            if reply.status == 101:
                reply.close()
                raise UpstreamError("the reply is not HTTP/1.1: 101 Switching Protocols")
            return UpstreamReply(reply)

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()


def _new_session(*, has_tls: bool) -> aiohttp.ClientSession:
    """Returns a client session without cookies and without automatic decompression."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_record_reuse)
    return aiohttp.ClientSession(
        connector=ReplyConnector(
            limit=0,
            keepalive_timeout=_KEEP_ALIVE_S,
            ssl=client_context() if has_tls else True,
        ),
        # A cookie from one program's call must not be sent with another program's call.
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
        max_headers=_MAX_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
        trace_configs=[trace],
    )


async def _record_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    """Records that an attempt uses a pooled connection."""
    context.trace_request_ctx.is_reused = True


def _reason(error: Exception) -> str:
    """Describes an error without the URL, which may contain a key or the proxy's login."""
    if isinstance(error, TimeoutError):
        return f"connecting timed out after {_CONNECT_S:g} s"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy in HTTP_PROXY or HTTPS_PROXY refused the connection: {error.message}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the upstream closed the connection without a reply"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the upstream closed the connection in the middle of its reply"
    if isinstance(error, aiohttp.InvalidURL):
        return "the request's path is not valid in a URL"
    if isinstance(error, InputError):
        return error.problem
    if isinstance(error, aiohttp.ClientResponseError):
        # The colon is followed by bytes that the upstream sent.
        return f"the reply is not HTTP/1.1: {error.message.partition(':')[0]}"
    return str(error)
