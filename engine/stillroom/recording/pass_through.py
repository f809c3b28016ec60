"""One request that is passed on to its upstream, and the reply that is passed back."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from stillroom.recording.answering import Caller
from stillroom.recording.capture import CallCapture, Kept
from stillroom.recording.encodings import known_encodings
from stillroom.recording.heads import (
    Header,
    RequestHead,
    end_to_end,
    reply_bytes,
    request_bytes,
)
from stillroom.recording.journal import CallJournal, Outcome
from stillroom.recording.records import CallEnd
from stillroom.recording.refusals import Refused
from stillroom.recording.upstream_side import ConnectionPool, UpstreamConnection
from stillroom.recording.upstreams import Upstream

_WAIT_FOR_END_S = 0.025
"""Seconds for which the last event of a stream waits for the end of the reply behind it."""
_CLOSED_WITHIN_S = 1.0
_MOST_KEPT_TO_REPEAT = 1 << 20
_NO_CONTENT = (204, 304)


class PassThroughOwner(Protocol):
    """What all exchanges share."""

    loop: asyncio.AbstractEventLoop
    pool: ConnectionPool
    journal: CallJournal

    def ended(self, exchange: "PassThrough") -> None:
        """Takes note of an exchange that has ended."""

    def note(self, outcome: Outcome) -> None:
        """Takes note of whether a call could be recorded."""

    def complain(self, problem: str) -> None:
        """Tells the user of a problem."""


class PassThrough:
    """Passes one request and its reply on, block by block.

    The reply of a recorded call ends for the client only once the call is on the disk: its last
    block, or the block with the event after which clients read no more, is held back until then.
    """

    def __init__(
        self,
        owner: PassThroughOwner,
        client: Caller,
        head: RequestHead,
        upstream: Upstream,
        capture: CallCapture | None,
    ) -> None:
        self.client = client
        self._owner, self._head, self._upstream, self._capture = owner, head, upstream, capture
        self._request = capture.request if capture else Kept(_MOST_KEPT_TO_REPEAT)
        self._is_request_whole = False
        self._unsent: list[bytes] = []
        """What has come of the request's content before there is a connection."""
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._parts: list[bytes] = []
        """What has come of the reply and not been passed on, ready to be written."""
        self._held: list[bytes] = []
        self._is_held = False
        """Whether the end of the reply waits for the journal."""
        self._has_reply = False
        self._is_chunked = self._closes = self._is_framed = False
        self._ends_with_connection = False
        self._is_ended = self._is_recorded = self._is_durable = self._is_over = False
        self._is_reusable = self._is_broken = False
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # The request.

    def start(self) -> None:
        """Sends the request's head to the upstream, on an open connection if there is one."""
        connection = self._owner.pool.take(self._upstream)
        if connection is not None:
            self._begin_on(connection)
        else:
            self._connect()

    def request_block(self, data: bytes) -> None:
        """Sends a part of the request's content."""
        self._request.add(data)
        if self._connection is None:
            self._unsent.append(data)
        else:
            self._connection.write(self._framed(data))

    def request_end(self) -> None:
        """Ends the request."""
        self._is_request_whole = True
        if self._connection is not None and self._head.is_chunked:
            self._connection.write(b"0\r\n\r\n")
        if self._capture is not None:
            self._capture.prepare()

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._head.is_chunked else data

    def _connect(self) -> None:
        # What has come in the same block as the head is kept until there is a connection.
        self.client.pause_reading()
        self._connecting = self._owner.loop.create_task(self._connect_and_begin())

    async def _connect_and_begin(self) -> None:
        try:
            connection = await self._owner.pool.connect(self._upstream)
        except (OSError, TimeoutError) as error:
            reason = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
            self._fail(reason)
            return
        finally:
            self._connecting = None
        if self._is_over:
            connection.transport.abort()
            return
        self.client.resume_reading()
        self._begin_on(connection)

    def _begin_on(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        self._sent_at = self._owner.loop.time()
        connection.begin(self)
        accepted = None
        if self._capture is not None and (offered := self._head.get(b"accept-encoding")):
            accepted = known_encodings(offered.decode("latin-1")).encode("latin-1")
        sent = [request_bytes(self._head, self._upstream.host_header, accepted=accepted)]
        sent += [self._framed(part) for part in self._unsent]
        self._unsent = []
        if self._is_request_whole and self._head.is_chunked:
            sent.append(b"0\r\n\r\n")
        connection.write(b"".join(sent))

    # The reply.

    def reply_head(self, status: int, reason: bytes, headers: Sequence[Header]) -> None:
        """Takes the head of the reply."""
        self._has_reply = True
        if self._capture is not None:
            self._capture.begin_reply(status, reason, headers)
        names = {key.lower() for key, _ in headers}
        has_length = b"content-length" in names
        has_content = self._head.method != "HEAD" and status not in _NO_CONTENT
        is_chunked = has_content and not has_length
        self._ends_with_connection = is_chunked and b"transfer-encoding" not in names
        self._is_chunked = is_chunked and self.client.takes_chunks
        self._is_framed = has_length or self._is_chunked
        self._closes = self.client.closes or (is_chunked and not self._is_chunked)
        self._parts.append(
            reply_bytes(
                status, reason, end_to_end(headers),
                is_chunked=self._is_chunked, closes=self._closes,
            )
        )  # fmt: skip
        if self._head.method == "HEAD":
            # The parser waits for a content that will not come.
            self.reply_end(is_reusable=False)

    def reply_block(self, data: bytes) -> None:
        """Takes a part of the reply's content."""
        if self._is_ended:
            return  # a content after HEAD, which has none
        if self._capture is not None and not self._is_recorded:
            self._is_held = self._capture.add(data) or self._is_held
        self._parts.append(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def reply_end(self, *, is_reusable: bool) -> None:
        """Takes note that the reply has come whole."""
        if self._is_ended:
            return
        self._is_ended, self._is_reusable = True, is_reusable
        if self._is_chunked:
            self._parts.append(b"0\r\n\r\n")

    def pass_on(self) -> None:
        """Writes what has come to the client, except for an end that must be recorded first."""
        if self._capture is None or self._is_durable:
            self._write(self._parts)
            self._parts = []
            if self._is_ended:
                self._finish()
            return
        if not (self._is_held or self._is_ended):
            self._write(self._parts)
            self._parts = []
            self._capture.read_on()
            return
        self._is_held = True
        self._held += self._parts
        self._parts = []
        if self._is_ended:
            self._release_upstream()
            self._record("whole")
        elif self._timer is None:
            self._timer = self._owner.loop.call_later(_WAIT_FOR_END_S, self._record, "whole")

    def upstream_lost(self, error: Exception | None, *, problem: str | None = None) -> None:
        """Ends the reply where the upstream has left."""
        connection, self._connection = self._connection, None
        if self._is_over or self._is_ended:
            return
        if self._ends_with_connection and error is None and problem is None:
            self.reply_end(is_reusable=False)
            self.pass_on()
            return
        if connection is not None and self._may_be_repeated(connection):
            self._unsent = [*self._request.parts]
            self._connect()
            return
        self._fail(problem or (str(error) if error else "it closed the connection"))

    def _may_be_repeated(self, connection: UpstreamConnection) -> bool:
        """Returns whether a request may be sent again without being answered, and paid, twice.

        That is so only if the upstream closed an idle connection just as the request was sent.
        """
        is_just_sent = self._owner.loop.time() - self._sent_at < _CLOSED_WITHIN_S
        is_repeatable = not self._has_reply and self._request.is_whole
        return connection.is_used and is_just_sent and is_repeatable

    # Both ends.

    def client_lost(self) -> None:
        """Breaks off, as the upstream would see it without the proxy."""
        if not self._is_ended:
            self._record("client_left")
        self._end()

    def stop(self) -> None:
        """Breaks off, since the proxy stops."""
        if not self._is_ended:
            self._record("proxy_stopped")
        self._end()
        self.client.broken()

    def pause(self) -> None:
        """Reads no more of the reply while the client does not read."""
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        """Reads on."""
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def _fail(self, problem: str) -> None:
        """Ends a call that the upstream has not answered, or not to its end."""
        problem = f"{self._upstream.origin}: {problem}"
        if not self._has_reply:
            self._owner.complain(f"no reply from {problem}")
            refused = Refused(
                502, "no_reply", f"the upstream gave no reply: {problem}",
                "check the address that `stillroom record --upstream` was given, and the network",
            )  # fmt: skip
            self._held = [refused.reply()]
        self._is_broken = True
        if self._capture is None or self._is_durable:
            self._cut_off()
        else:
            self._record("upstream_left", problem)

    def _record(self, end: CallEnd, problem: str | None = None) -> None:
        """Puts the call into the journal, which calls `_recorded` once it is on the disk."""
        if self._timer is not None:
            self._timer.cancel()
        if self._capture is None or self._is_recorded:
            return
        self._is_recorded = True
        loop = self._owner.loop
        try:
            line = self._capture.line(end, problem)
        except Exception as error:  # the rim of one call: its client must not wait for ever
            loop.call_soon(self._recorded, error)
            return

        def done(outcome: Outcome) -> None:
            try:
                loop.call_soon_threadsafe(self._recorded, outcome)
            except RuntimeError:
                # The proxy has stopped, and the journal still writes what waits: nobody is left to
                # be answered, and the calls behind this one must be written too.
                self._owner.note(outcome)

        self._owner.journal.append(line, done)

    def _recorded(self, outcome: Outcome) -> None:
        self._owner.note(outcome)
        if self._is_over:
            return
        if outcome is not None:
            self._end()
            self.client.broken()
            return
        self._is_durable = True
        if self._is_broken:
            self._cut_off()
            return
        self._write(self._held)
        self._held = []
        if self._is_ended:
            self._finish()

    def _cut_off(self) -> None:
        """Ends a reply in its middle, or with an error of our own if it has not begun."""
        if self._has_reply:
            self._write([*self._held, *self._parts])
            self._end()
            self.client.cut_off(is_framed=self._is_framed)
        else:
            self._write(self._held)
            self._end()
            self.client.end_gently()

    def _write(self, parts: Sequence[bytes]) -> None:
        if parts and not self.client.transport.is_closing():
            self.client.transport.write(b"".join(parts) if len(parts) > 1 else parts[0])

    def _release_upstream(self) -> None:
        """Lets another exchange use the connection, while this one waits for the journal."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end(is_reusable=self._is_reusable and self._is_request_whole)

    def _finish(self) -> None:
        """Ends an exchange whose reply the client has whole."""
        self._release_upstream()
        self._is_over = True
        self._owner.ended(self)
        self.client.done(is_request_whole=self._is_request_whole, closes=self._closes)

    def _end(self) -> None:
        """Ends an exchange that was broken off."""
        self._is_over = True
        self._owner.ended(self)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.end(is_reusable=False)
