"""Opens a channel to an endpoint, through the proxy that the environment names for it."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.settings import proxy_for
from stillroom.teachers.endpoint.http_channel import HttpChannel


def open_channel(url: str, headers: Mapping[str, str]) -> HttpChannel:
    """Returns a channel to an address, through the proxy that the environment names for it.

    Raises InputError if that proxy is not an HTTP proxy.
    """
    # aiohttp is imported only here, because the server process imports this module but makes no
    # calls; only worker processes do.
    from stillroom.teachers.endpoint.aiohttp_channel import AiohttpChannel

    return AiohttpChannel(url, headers, proxy=_http_proxy(url))


def _http_proxy(url: str) -> str | None:
    proxy = proxy_for(url)
    if proxy is None:
        return None
    # As curl does, a proxy without a scheme is taken for an HTTP proxy.
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(proxy)
    if parts.scheme in ("http", "https"):
        return proxy
    # The user information is left out of the message, since it may hold a password.
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    raise InputError(
        f"the environment names the proxy {address} for {url}, and only HTTP proxies are supported",
        "set HTTP_PROXY and HTTPS_PROXY to an http:// proxy, or add the host to NO_PROXY",
    )
