"""Sends requests to the upstreams, over connections that are kept and used again."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from stillroom.recording.capture import Kept
from stillroom.recording.headers import Headers, RequestHead, decoded_headers
from stillroom.recording.upstreams import Upstream
from stillroom.settings import proxy_for

_CONNECT_S = 30.0
_KEEP_ALIVE_S = 30.0
_CLOSED_WITHIN_S = 1.0
"""Seconds within which an upstream that had closed an idle connection refuses a request on it."""
_LONGEST_LINE = 256 << 10
_MOST_HEADERS = 256
_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class UpstreamError(Exception):
    """The upstream gave no reply, or not all of it; the message says why."""


class RequestBody:
    """The content of a client's request, which can be sent again as far as it was kept."""

    def __init__(
        self,
        content: aiohttp.StreamReader,
        kept: Kept,
        when_whole: Callable[[], None] = lambda: None,
    ) -> None:
        self.kept = kept
        self._content, self._when_whole = content, when_whole

    async def blocks(self) -> AsyncIterator[bytes]:
        """Yields the content from its beginning."""
        for part in [*self.kept.parts]:
            yield part
        async for block in self._content.iter_any():
            self.kept.add(block)
            yield block
        self._when_whole()


class UpstreamReply:
    """A reply whose head has come."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply
        self.status, self.reason = reply.status, reply.reason or ""
        self.headers: Headers = decoded_headers(reply.raw_headers)
        connection = reply.connection
        self._unframed_connection: ResponseHandler | None = None
        """The connection whose end is the reply's; None where a length or chunks tell the end."""
        is_framed = "Content-Length" in reply.headers or "Transfer-Encoding" in reply.headers
        if connection is not None and not is_framed:
            self._unframed_connection = connection.protocol

    @property
    def has_come(self) -> bool:
        """Whether the reply has come to its end, even if not all of it has been read."""
        return self._reply.content.is_eof()

    @property
    def is_read(self) -> bool:
        """Whether all of the reply has been read."""
        return self._reply.content.at_eof()

    async def next_block(self) -> bytes:
        """Returns the next chunk, or what has come of it; b"" after the end.

        Raises UpstreamError if the upstream broke the reply off.
        """
        try:
            while not self._reply.content.at_eof():
                # A chunk that is read already may still have an end.
                block, _ = await self._reply.content.readchunk()
                if block:
                    return block
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(_reason(error)) from error
        connection = self._unframed_connection
        if connection is not None and isinstance(connection.exception(), OSError):
            raise UpstreamError("it reset the connection")
        return b""

    def close(self) -> None:
        """Closes the connection, unless the reply was read whole."""
        self._reply.close()


class UpstreamClient:
    """Sends requests. With `has_tls`, upstreams show a certificate that the system trusts."""

    def __init__(self, *, has_tls: bool) -> None:
        self._has_tls = has_tls
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, upstream: Upstream, head: RequestHead, headers: Headers, body: RequestBody | None
    ) -> UpstreamReply:
        """Sends a request and returns the reply, once its head has come. Raises UpstreamError.

        A request that the upstream refused because it had just closed the idle connection is sent
        again: no other one is, since it may be answered, and paid, already.
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
                    proxy=_proxy_of(upstream),
                    trace_request_ctx=attempt,
                )
            except (aiohttp.ClientError, OSError, ValueError) as error:
                is_stale = attempt.is_reused and loop.time() - sent_at < _CLOSED_WITHIN_S
                if is_stale and _is_disconnection(error) and (body is None or body.kept.is_whole):
                    # The writer of the last attempt leaves the content.
                    await asyncio.sleep(0)
                    continue
                raise UpstreamError(_reason(error)) from error
            if reply.status == 101:
                reply.close()
                raise UpstreamError("its reply is not HTTP/1.1: it changes the protocol")
            return UpstreamReply(reply)

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()


def _new_session(*, has_tls: bool) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEEP_ALIVE_S,
            ssl=ssl.create_default_context() if has_tls else True,
        ),
        # What a server sets in one program's call goes into no other program's.
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
        max_headers=_MOST_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
        trace_configs=[trace],
    )


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True


def _proxy_of(upstream: Upstream) -> str | None:
    """Returns the proxy that the environment names, which sees the upstream's name only."""
    proxy = proxy_for(upstream.origin) if upstream.scheme == "https" else None
    if proxy is None:
        return None
    url = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise OSError(f"the proxy {parts.hostname} of the environment is not an HTTP proxy")
    return url


def _is_disconnection(error: Exception) -> bool:
    return isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionError))


def _reason(error: Exception) -> str:
    """Returns why there is no reply, without the URL: it may hold a key, or the proxy's login."""
    if isinstance(error, TimeoutError):
        return f"it did not answer within {_CONNECT_S:g} s"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy of the environment refused the connection: {error.message}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, (aiohttp.InvalidURL, aiohttp.ClientPayloadError)):
        return (
            "it broke its reply off"
            if isinstance(error, aiohttp.ClientPayloadError)
            else "the path is not a URL"
        )
    if isinstance(error, aiohttp.ClientResponseError):
        # Behind the colon is what the upstream sent.
        return f"its reply is not HTTP/1.1: {error.message.partition(':')[0]}"
    return str(error)
