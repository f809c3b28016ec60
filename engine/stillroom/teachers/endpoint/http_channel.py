"""Posting JSON to a server: the small seam between a teacher's client and the HTTP library.

This module imports no HTTP library, so that a process which only reads requests loads none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class ConnectionFailedError(Exception):
    """No complete response came: nobody listens, or the connection broke."""


class NotConnectedError(ConnectionFailedError):
    """The request was not sent: nobody listens or answers, or the host's name is unknown."""


class UnreadableReplyError(Exception):
    """What came is not an HTTP response, is too long, or has an unknown encoding."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete response; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpChannel(Protocol):
    """Posts to one server; any number of requests may be under way at once."""

    async def post(self, body: bytes, *, timeout_s: float, path: str = "") -> HttpReply:
        """Returns the response to a JSON body; `path` is appended to the channel's address.

        Raises:
            TimeoutError: the complete response did not arrive within `timeout_s`.
            NotConnectedError: nothing was sent, so the request cannot have been billed.
            ConnectionFailedError: the connection broke after the request was sent.
            UnreadableReplyError: the response cannot be read or exceeds a limit.
        """
        ...

    async def aclose(self) -> None:
        """Closes all connections."""
        ...
