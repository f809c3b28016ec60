"""The endpoints behind the proxy, and the base URL with which a client reaches each of them."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult

from stillroom.errors import InputError
from stillroom.teachers.providers import PROVIDERS, provider_at, url_parts

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_RESERVED = ("token",)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Upstream:
    """One endpoint behind the proxy."""

    name: str
    """The first segment of the upstream's paths on the proxy, if there are several upstreams."""
    scheme: str
    host: str
    port: int
    base_path: str
    """The path of its OpenAI-compatible API, such as /v1 or /api/v1."""
    provider: str | None = None

    @property
    def origin(self) -> str:
        """The scheme and host, and the port unless it is the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def parse_upstreams(values: Sequence[str]) -> tuple[Upstream, ...]:
    """Parses the values of `--upstream`: each a provider, a URL or NAME=URL.

    Raises InputError for an invalid address, and for two upstreams of the same name.
    """
    upstreams = tuple(_parse_upstream(text, is_alone=len(values) == 1) for text in values)
    names = [upstream.name for upstream in upstreams]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two upstreams are named {name!r}; names must differ, because each one is the "
                f"first part of the upstream's path on the proxy (/{name}/…)",
                "give one of them another name: --upstream NAME=URL",
            )
    return upstreams


def check_no_loop(upstreams: Sequence[Upstream], listener: socket.socket) -> None:
    """Raises InputError if an upstream is the proxy itself, listening on this socket."""
    own_host, port, *_ = listener.getsockname()
    for upstream in upstreams:
        if upstream.port == port and _resolves_to(upstream.host, own_host):
            raise InputError(
                f"the upstream {upstream.origin} is this proxy itself",
                "give the address of the endpoint, or another port for the proxy with --port",
            )


def _resolves_to(host: str, own_host: str) -> bool:
    """Returns whether a host name resolves to the address on which a socket listens."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in addresses:
        if address[0] == own_host:
            return True
        # A socket bound to 0.0.0.0 or :: is reached at every address of this machine.
        if ipaddress.ip_address(own_host).is_unspecified:
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.bind(address)
                return True
    return False


def _parse_upstream(text: str, *, is_alone: bool) -> Upstream:
    """Parses one value of `--upstream`. Raises InputError if it is invalid."""
    name, separator, url = text.partition("=")
    if not separator or not _NAME.fullmatch(name):
        name, url = "", text
    if url in PROVIDERS and PROVIDERS[url].base_url:
        name, url = name or url, PROVIDERS[url].base_url
    parts = _parse_address(url)
    scheme, host = parts.scheme, parts.hostname or ""
    provider = provider_at(host) if scheme == "https" else None
    name = name or provider or ("upstream" if is_alone else "")
    if not name:
        raise InputError(
            f"the upstream {url!r} needs a name, since there are several upstreams",
            f"write --upstream NAME={url}; its path on the proxy is then /NAME",
        )
    if name in _RESERVED:
        raise InputError(
            f"the upstream name {name!r} is reserved", "give another name: --upstream NAME=URL"
        )
    path = parts.path.rstrip("/") or "/v1"
    return Upstream(name, scheme, host, parts.port or _PORTS[scheme], path, provider)


def _parse_address(url: str) -> SplitResult:
    """Parses the URL of an upstream. Raises InputError if it is invalid."""
    parts = url_parts(url)
    if parts is None:
        names = ", ".join(sorted(n for n, provider in PROVIDERS.items() if provider.base_url))
        raise InputError(
            f"the upstream {url!r} is neither a known provider nor a URL",
            f"give one of {names}, or a URL such as https://api.openai.com/v1 or "
            "NAME=http://127.0.0.1:8000/v1",
        )
    if "@" in parts.netloc:
        raise InputError(
            "the upstream's URL contains a login, which would be printed and recorded",
            "remove it; the proxy forwards the keys that clients send",
        )
    if parts.query or parts.fragment:
        raise InputError(
            "the upstream's URL has a query or a fragment; only the clients' requests may have one",
            "remove the query and the fragment: everything from ? or # on",
        )
    return parts


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The base URLs with which clients reach an upstream through the proxy."""

    openai: str
    """The base_url for OpenAI-compatible clients."""
    anthropic: str
    """The base_url for Anthropic's clients, which append /v1 themselves."""


def client_settings(upstream: Upstream, address: str, *, is_alone: bool) -> ClientSettings:
    """Returns the base URLs for an upstream. `address` is the proxy's URL, with its token if any.

    A base URL is the upstream's own, with `address` in place of scheme and host.
    """
    base = address if is_alone else f"{address}/{upstream.name}"
    openai = base + upstream.base_path
    return ClientSettings(openai, openai.removesuffix("/v1"))


def route(target: str, upstreams: Sequence[Upstream]) -> tuple[Upstream, str] | None:
    """Returns the upstream for a path, and the path at the upstream; None if no upstream matches.

    A single upstream gets all paths; one of several gets those that begin with its name.
    """
    if len(upstreams) == 1:
        return upstreams[0], target
    for upstream in upstreams:
        path = _strip_name(target, upstream.name)
        if path is not None:
            return upstream, path
    return None


def _strip_name(target: str, name: str) -> str | None:
    """Returns the part of a path after `/name`; None if the path does not begin with it."""
    path = target.removeprefix(f"/{name}")
    if path == target or (path and path[0] not in "/?"):
        return None
    return path if path.startswith("/") else f"/{path}"
