"""What the parts of the proxy need of one another."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from stillroom.recording.heads import Header, RequestHead
from stillroom.recording.refusals import Refused


class Caller(Protocol):
    """A client's connection, as the answer to its request sees it."""

    transport: asyncio.Transport

    @property
    def own_address(self) -> str:
        """The address of this machine at which the connection came in."""
        ...

    @property
    def closes(self) -> bool:
        """Whether the connection ends with the reply."""
        ...

    @property
    def takes_chunks(self) -> bool:
        """Whether a reply may come in chunks."""
        ...

    def pause_reading(self) -> None:
        """Takes no more of the request for now."""

    def resume_reading(self) -> None:
        """Takes the rest of the request."""

    def done(self, *, is_request_whole: bool, closes: bool) -> None:
        """Ends an answer; the next request may come, if the connection stays."""

    def cut_off(self, *, is_framed: bool) -> None:
        """Ends the connection after what has been written of a reply that is not whole."""

    def broken(self) -> None:
        """Ends the connection at once."""

    def end_gently(self) -> None:
        """Ends a connection on which a client may still be sending."""


class RequestAnswer(Protocol):
    """The answer to one request, from its head on."""

    def start(self) -> None:
        """Begins, once the connection knows of the answer."""

    def request_block(self, data: bytes) -> None:
        """Takes a part of the request's content."""

    def request_end(self) -> None:
        """Takes note that the request has come whole."""

    def client_lost(self) -> None:
        """Breaks off, since nobody reads the reply."""

    def pause(self) -> None:
        """Writes less, since the client does not read."""

    def resume(self) -> None:
        """Goes on after `pause`."""


class Front(Protocol):
    """What answers the requests of all clients."""

    loop: asyncio.AbstractEventLoop
    is_stopping: bool

    @property
    def num_open(self) -> int:
        """The number of requests that are being answered."""
        ...

    def joined(self, client: Caller) -> None:
        """Takes note of a client's connection."""

    def left(self, client: Caller) -> None:
        """Takes note of a connection that has ended."""

    def answer(self, client: Caller, head: RequestHead) -> RequestAnswer | Refused:
        """Returns what answers a request, or why it is refused."""
        ...

    def stop(self) -> None:
        """Breaks off what is still being answered, and closes all connections."""


class ReplyTaker(Protocol):
    """What takes the reply of an upstream, block by block."""

    client: Caller

    def reply_head(self, status: int, reason: bytes, headers: Sequence[Header]) -> None:
        """Takes the head of the reply."""

    def reply_block(self, data: bytes) -> None:
        """Takes a part of the reply's content."""

    def reply_end(self, *, is_reusable: bool) -> None:
        """Takes note that the reply has come whole."""

    def pass_on(self) -> None:
        """Does what the parts that came together call for."""

    def upstream_lost(self, error: Exception | None, *, problem: str | None = None) -> None:
        """Takes note that nothing more will come."""
