"""HTTP/1.1 with a deadline for each request; uvicorn has one only between requests."""

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class DeadlineProtocol(H11Protocol):
    """One connection, which is closed if a request that has begun is not complete in time.

    An invalid request closes it even if the application is already answering that request.
    """

    request_s: float
    _deadline: Any = None

    def connection_made(self, transport: Any) -> None:
        """Starts the deadline of the first request."""
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """Starts the deadline of a request that begins, or cancels that of a complete one."""
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the deadline."""
        super().connection_lost(exc)
        self._cancel_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answers an invalid request, unless it is being answered, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        # What the application sends from now on would be a protocol error.
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

    def _update_deadline(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_s, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
