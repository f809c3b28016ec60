"""Posting JSON to a server: the small seam between a teacher's client and the HTTP library.

This module imports no HTTP library, so that a process which only reads requests loads none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.settings import proxy_for


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


def open_channel(url: str, headers: Mapping[str, str]) -> HttpChannel:
    """Returns a channel to an address, through the proxy that the environment names for it.

    Raises InputError if that proxy is not an HTTP proxy.
    """
    # The server process imports this module, and only worker processes make calls.
    from stillroom.teachers.endpoint.aiohttp_channel import AiohttpChannel

    return AiohttpChannel(url, headers, proxy=_http_proxy(url))


def _http_proxy(url: str) -> str | None:
    proxy = proxy_for(url)
    if proxy is None:
        return None
    # curl and others also take a proxy without a scheme.
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(proxy)
    if parts.scheme in ("http", "https"):
        return proxy
    # The user information may hold a password.
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    raise InputError(
        f"the environment names the proxy {address} for {url}, and only HTTP proxies are supported",
        "set HTTP_PROXY and HTTPS_PROXY to an http:// proxy, or add the host to NO_PROXY",
    )
