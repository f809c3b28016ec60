"""Defines the interface for posting JSON to a server, independent of the HTTP library.

This module imports no HTTP library, so a process that only validates requests need not load one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stillroom.secrecy.redaction import Redactor


class ConnectionFailedError(Exception):
    """No complete response arrived, because connecting failed or the connection broke."""


class NotConnectedError(ConnectionFailedError):
    """The request was not sent, because no connection to the server could be made."""


class UnreadableReplyError(Exception):
    """The response is not valid HTTP, is too long, or has an unknown encoding."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    """The header values by lower-case name."""
    body: bytes
    """The decompressed body."""


class HttpChannel(Protocol):
    """Posts requests to one server, any number of them at once."""

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


class RedactedChannel:
    """A channel that removes the redactor's secrets from responses and errors.

    Servers may echo the key that they were sent, in errors, headers or answers.
    """

    def __init__(self, channel: HttpChannel, redactor: Redactor) -> None:
        self._channel, self.redactor = channel, redactor

    async def post(self, body: bytes, *, timeout_s: float, path: str = "") -> HttpReply:
        """Returns the response to a JSON body; see `HttpChannel.post` for the errors."""
        redactor = self.redactor
        try:
            reply = await self._channel.post(body, timeout_s=timeout_s, path=path)
        except (ConnectionFailedError, UnreadableReplyError) as error:
            raise type(error)(redactor.redact_text(str(error))) from error
        headers = reply.headers
        # The headers are searched as one text, which is faster: they hardly ever hold a secret.
        text = "\n".join(map(": ".join, headers.items()))
        if redactor.redact_text(text) != text:
            headers = redactor.redact_value(headers)
        return HttpReply(reply.status, headers, redactor.redact_bytes(reply.body))

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._channel.aclose()
