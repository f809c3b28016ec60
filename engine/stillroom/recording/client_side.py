"""A client's connection to the proxy: requests come in here, and replies go out."""

import asyncio
from typing import cast

import httptools

from stillroom.recording.answering import Front, RequestAnswer
from stillroom.recording.heads import Header, RequestHead
from stillroom.recording.refusals import Refused

_MOST_HEAD_BYTES = 256 << 10
_IDLE_S = 300.0
_LINGER_S = 2.0


class ClientConnection(asyncio.Protocol):
    """One connection, with one request at a time on it."""

    transport: asyncio.Transport

    def __init__(self, front: Front) -> None:
        self._front = front
        self._parser = httptools.HttpRequestParser(self)
        self._answering: RequestAnswer | None = None
        """The answer to the request that has come, while it is not finished."""
        self._headers: list[Header] = []
        self._target = b""
        self._is_in_head, self._num_head_bytes = True, 0
        self._is_ahead = False
        """Whether the client sent a request before the last one was answered."""
        self._closes = self._is_http_1_0 = False
        self._idle: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for a request."""
        self.transport = cast("asyncio.Transport", transport)
        self._front.joined(self)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Breaks off what is being answered."""
        self._front.left(self)
        self._stop_waiting()
        if self._answering is not None:
            self._answering.client_lost()
            self._answering = None

    def data_received(self, data: bytes) -> None:
        """Takes the next bytes of a request."""
        if self._is_ahead:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(Refused.no_upgrade())
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
                raise cause from None
            self._refuse(Refused.malformed(str(error)))
        else:
            if self._is_in_head and self._num_head_bytes > _MOST_HEAD_BYTES:
                self._refuse(Refused.long_head(_MOST_HEAD_BYTES))

    def eof_received(self) -> bool | None:
        """Takes a client that sends no more for one that has left."""
        return None

    def pause_writing(self) -> None:
        """Stops the reply while the client does not read."""
        if self._answering is not None:
            self._answering.pause()

    def resume_writing(self) -> None:
        """Lets the reply go on."""
        if self._answering is not None:
            self._answering.resume()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Begins a request."""
        if self._answering is not None:
            # It is not answered, and the client sends it again once the connection is closed.
            self._is_ahead = self._closes = True

    def on_url(self, url: bytes) -> None:
        """Takes a part of the request's target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; those that follow a content in chunks are left out."""
        if self._is_in_head and not self._is_ahead:
            self._headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        """Begins to answer, or refuses to."""
        if self._is_ahead:
            return
        self._is_in_head = False
        self._stop_waiting()
        self._is_http_1_0 = self._parser.get_http_version() == "1.0"
        self._closes = not self._parser.should_keep_alive()
        head = RequestHead(
            self._parser.get_method().decode("latin-1"),
            self._target.decode("latin-1"),
            self._headers,
            is_http_1_0=self._is_http_1_0,
        )
        if (head.get(b"expect") or b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        answering = self._front.answer(self, head)
        if isinstance(answering, Refused):
            self._refuse(answering)
        else:
            self._answering = answering
            answering.start()

    def on_body(self, body: bytes) -> None:
        """Takes a part of the content."""
        if self._answering is not None and not self._is_ahead:
            self._answering.request_block(body)

    def on_message_complete(self) -> None:
        """Ends a request."""
        if self._answering is not None and not self._is_ahead:
            self._answering.request_end()

    # What answers use.

    @property
    def own_address(self) -> str:
        """The address of this machine at which the connection came in."""
        return str((self.transport.get_extra_info("sockname") or ("",))[0])

    @property
    def closes(self) -> bool:
        """Whether the connection ends with the reply."""
        return self._closes

    @property
    def takes_chunks(self) -> bool:
        """Whether a reply may come in chunks."""
        return not self._is_http_1_0

    def pause_reading(self) -> None:
        """Takes no more of the request for now."""
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Takes the rest of the request."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def done(self, *, is_request_whole: bool, closes: bool) -> None:
        """Ends an answer; the next request may come, if the connection stays."""
        self._answering = None
        if not is_request_whole:
            self.end_gently()
            return
        if closes or self._closes or self._front.is_stopping:
            self.transport.close()
            return
        self._headers, self._target = [], b""
        self._is_in_head, self._num_head_bytes = True, 0
        self.resume_reading()
        self._await_request()

    def broken(self) -> None:
        """Ends the connection in the middle of a reply, so that the client sees that it is."""
        self._answering = None
        self.transport.abort()

    def cut_off(self, *, is_framed: bool) -> None:
        """Ends the connection after what has been written of a reply that is not whole.

        Without a length or chunks (`is_framed`) only a reset tells that from the reply's end.
        """
        self._answering = None
        if is_framed:
            self.transport.close()
        else:
            self.transport.abort()

    def _refuse(self, refused: Refused) -> None:
        if self._answering is not None:
            self._answering.client_lost()
            self._answering = None
        self._closes = self._is_ahead = True
        self.transport.write(refused.reply())
        self.end_gently()

    def end_gently(self) -> None:
        """Ends a connection on which a client may still be sending.

        If it were closed at once, the client would be refused its next bytes, and might never read
        the reply.
        """
        self._is_ahead = True
        self.transport.resume_reading()
        self.transport.write_eof()
        self._idle = self._front.loop.call_later(_LINGER_S, self.transport.close)

    def _await_request(self) -> None:
        self._idle = self._front.loop.call_later(_IDLE_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
