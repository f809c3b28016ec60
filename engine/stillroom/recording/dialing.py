"""Opens connections to upstreams: directly, or through the proxy that the environment names."""

import asyncio
import base64
import ssl
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from stillroom.recording.upstreams import Upstream
from stillroom.settings import proxy_for

CONNECT_S = 30.0
_MOST_HEAD_BYTES = 64 << 10
_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class Dialer:
    """Opens connections; TLS is checked against the certificates that the system trusts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tls: ssl.SSLContext | None = None

    async def connect(self, upstream: Upstream, make: Callable[[], _Protocol]) -> _Protocol:
        """Returns the protocol of a new connection.

        Raises OSError or TimeoutError if none can be made.
        """
        context = self._context() if upstream.scheme == "https" else None
        proxy = proxy_for(upstream.origin)
        async with asyncio.timeout(CONNECT_S):
            if proxy is not None and context is not None:
                return await self._tunnel(proxy, upstream, make(), context)
            _, protocol = await self._loop.create_connection(
                make, upstream.host, upstream.port, ssl=context
            )
        return protocol

    async def _tunnel(
        self, proxy: str, upstream: Upstream, protocol: _Protocol, context: ssl.SSLContext
    ) -> _Protocol:
        """Connects through a proxy, which sees the upstream's name and nothing of the calls."""
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        where = f"the proxy {parts.hostname}:{parts.port or 80} of the environment"
        if parts.scheme != "http" or parts.hostname is None:
            raise OSError(f"{where} is no HTTP proxy, and no other kind is known")
        plain, opening = await self._loop.create_connection(
            lambda: _Opening(self._loop), parts.hostname, parts.port or 80
        )
        try:
            host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
            name = f"{host}:{upstream.port}"
            login = _login(parts.username, parts.password)
            plain.write(f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n{login}\r\n".encode())
            status = (await opening.head).split(b"\r\n")[0].decode("latin-1")
            if status.split(" ")[1:2] != ["200"]:
                raise OSError(f"{where} refused the connection: {status[:100]}")
            transport = await self._loop.start_tls(
                plain, protocol, context, server_hostname=upstream.host
            )
            if transport is None:
                raise OSError(f"{where} closed the connection")
        except BaseException:
            plain.abort()
            raise
        protocol.connection_made(transport)
        return protocol

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


class _Opening(asyncio.Protocol):
    """Waits for the head of a proxy's answer, behind which the upstream speaks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.head: asyncio.Future[bytes] = loop.create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self.head.done():
            return
        if b"\r\n\r\n" in self._data:
            self.head.set_result(self._data)
        elif len(self._data) > _MOST_HEAD_BYTES:
            self.head.set_exception(OSError("the proxy of the environment sends no HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.head.done():
            self.head.set_exception(exc or OSError("the proxy of the environment hung up"))


def _login(name: str | None, password: str | None) -> str:
    if name is None:
        return ""
    pair = f"{unquote(name)}:{unquote(password or '')}".encode()
    return f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}\r\n"
