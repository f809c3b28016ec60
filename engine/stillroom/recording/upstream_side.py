"""Connections to the upstreams, which are used again for as long as they stay open."""

import asyncio
import time
from collections import defaultdict
from typing import cast

import httptools

from stillroom.recording.answering import ReplyTaker
from stillroom.recording.dialing import Dialer
from stillroom.recording.heads import Header
from stillroom.recording.upstreams import Upstream

_MOST_IDLE_S = 30.0
_MOST_IDLE = 512
_MOST_HEAD_BYTES = 256 << 10


class UpstreamConnection(asyncio.Protocol):
    """One connection to an upstream, with one exchange at a time on it."""

    transport: asyncio.Transport

    def __init__(self, pool: "ConnectionPool", upstream: Upstream) -> None:
        self.upstream = upstream
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: ReplyTaker | None = None
        self._headers: list[Header] = []
        self._reason = b""
        self._is_in_head, self._num_head_bytes = True, 0
        self._is_ended = self._is_ahead = False
        self.is_used = False
        """Whether an earlier exchange was made on it, so that the upstream may just close it."""
        self.idle_since = 0.0

    def begin(self, exchange: ReplyTaker) -> None:
        """Makes an exchange the one that the next reply belongs to."""
        self._exchange = exchange
        self._headers, self._reason = [], b""
        self._is_in_head, self._num_head_bytes, self._is_ended = True, 0, False

    def end(self, *, is_reusable: bool) -> None:
        """Ends the exchange; the connection waits for another one if it can be used again."""
        self._exchange = None
        self.is_used = True
        is_open = not self._is_ahead and not self.transport.is_closing()
        if is_reusable and self._is_ended and is_open:
            self.transport.resume_reading()
            self._pool.put(self)
        else:
            self.transport.abort()

    def write(self, data: bytes) -> None:
        """Sends bytes of a request."""
        self.transport.write(data)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the exchange that nothing more will come."""
        self._pool.forget(self)
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.upstream_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes the next bytes of a reply on."""
        exchange = self._exchange
        if exchange is None:
            # Nobody has requested them, and no later reply may begin with them.
            self.transport.abort()
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and error.__context__:
                raise error.__context__ from None
            self._fail(f"its reply is no HTTP/1.1: {error}")
            return
        if self._is_in_head and self._num_head_bytes > _MOST_HEAD_BYTES:
            self._fail(f"the head of its reply is longer than {_MOST_HEAD_BYTES} bytes")
            return
        if not self._is_in_head:
            exchange.pass_on()

    def pause_writing(self) -> None:
        """Stops the client's sending while the upstream does not read."""
        if self._exchange is not None:
            self._exchange.client.pause_reading()

    def resume_writing(self) -> None:
        """Lets the client send again."""
        if self._exchange is not None:
            self._exchange.client.resume_reading()

    def _fail(self, problem: str) -> None:
        exchange, self._exchange = self._exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.upstream_lost(None, problem=problem)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Notes a reply that nobody has requested, and after which none can be trusted."""
        self._is_ahead = self._is_ended

    def on_status(self, status: bytes) -> None:
        """Takes a part of the reason phrase."""
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; those that follow a content in chunks are left out."""
        if self._is_in_head and not self._is_ahead:
            self._headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        """Takes the head of a reply; one that only announces another is left out."""
        if self._is_ahead:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._headers, self._reason = [], b""
            return
        self._is_in_head = False
        if self._exchange is not None:
            self._exchange.reply_head(status, self._reason, self._headers)

    def on_body(self, body: bytes) -> None:
        """Takes a part of the content."""
        if self._exchange is not None and not self._is_ahead:
            self._exchange.reply_block(body)

    def on_message_complete(self) -> None:
        """Ends a reply."""
        if not self._is_in_head and not self._is_ended and self._exchange is not None:
            self._is_ended = True
            self._exchange.reply_end(is_reusable=self._parser.should_keep_alive())


class ConnectionPool:
    """The connections to all upstreams that wait for an exchange."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._dialer = Dialer(loop)
        self._idle = defaultdict[Upstream, list[UpstreamConnection]](list)

    def take(self, upstream: Upstream) -> UpstreamConnection | None:
        """Returns the connection that was used last, or None if a new one must be made."""
        idle, oldest = self._idle[upstream], time.monotonic() - _MOST_IDLE_S
        while idle:
            connection = idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    def put(self, connection: UpstreamConnection) -> None:
        """Keeps a connection for another exchange."""
        connection.idle_since = time.monotonic()
        idle = self._idle[connection.upstream]
        if len(idle) < _MOST_IDLE:
            idle.append(connection)
        else:
            connection.transport.abort()

    def forget(self, connection: UpstreamConnection) -> None:
        """Leaves out a connection that is closed."""
        idle = self._idle[connection.upstream]
        if connection in idle:
            idle.remove(connection)

    async def connect(self, upstream: Upstream) -> UpstreamConnection:
        """Returns a new connection. Raises OSError or TimeoutError if none can be made."""
        return await self._dialer.connect(upstream, lambda: UpstreamConnection(self, upstream))

    def close(self) -> None:
        """Closes the connections that wait."""
        for idle in self._idle.values():
            for connection in [*idle]:
                connection.transport.abort()
