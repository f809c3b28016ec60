"""What a client's connection needs of the proxy that passes its requests on, or replays them."""

import asyncio
from typing import Protocol

from stillroom.recording.client_side import ClientConnection
from stillroom.recording.heads import RequestHead
from stillroom.recording.refusals import Refused


class Answering(Protocol):
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
    clients: set[ClientConnection]
    is_stopping: bool

    def answer(self, client: ClientConnection, head: RequestHead) -> Answering | Refused:
        """Returns what answers a request, or why it is refused."""
        ...
