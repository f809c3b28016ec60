"""The endpoints behind the proxy: their addresses, and what a client sets to reach each of them."""

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
    """One endpoint. Its host is the only one that requests to it can reach."""

    name: str
    """The first part of its paths if there are several upstreams; a known provider's own name."""
    scheme: str
    host: str
    port: int
    base_path: str
    """The path of its OpenAI-compatible API, such as /v1 or /api/v1."""
    provider: str | None = None

    @property
    def origin(self) -> str:
        """The scheme, host and port, without the port that the scheme implies."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def upstreams_of(given: Sequence[str]) -> tuple[Upstream, ...]:
    """Returns the upstreams that a user named: a provider, a URL or NAME=URL each.

    Raises InputError for one that is no endpoint, and where two have the same name.
    """
    upstreams = tuple(_upstream(text, is_alone=len(given) == 1) for text in given)
    names = [upstream.name for upstream in upstreams]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two upstreams are called {name!r}, so a path cannot tell them apart",
                "give one of them another name: --upstream NAME=URL",
            )
    return upstreams


def check_no_loop(upstreams: Sequence[Upstream], listener: socket.socket) -> None:
    """Raises InputError for an upstream that is the proxy itself, listening at this socket."""
    own_host, port, *_ = listener.getsockname()
    for upstream in upstreams:
        if upstream.port == port and _leads_to(upstream.host, own_host):
            raise InputError(
                f"the upstream {upstream.origin} is this proxy itself",
                "give the endpoint's own address, or another port with --port",
            )


def _leads_to(host: str, own_host: str) -> bool:
    """Returns whether a host is the address at which a socket listens, or one of all of them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        if address[0] == own_host:
            return True
        # A socket that listens at all addresses is reached at each address of this machine.
        if ipaddress.ip_address(own_host).is_unspecified:
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.bind(address)
                return True
    return False


def _upstream(text: str, *, is_alone: bool) -> Upstream:
    name, separator, url = text.partition("=")
    if not separator or not _NAME.fullmatch(name):
        name, url = "", text
    if url in PROVIDERS and PROVIDERS[url].base_url:
        name, url = name or url, PROVIDERS[url].base_url
    parts = _address(url)
    scheme, host = parts.scheme, parts.hostname or ""
    provider = provider_at(host) if scheme == "https" else None
    name = name or provider or ("upstream" if is_alone else "")
    if not name:
        raise InputError(
            f"the upstream {url!r} has no name, and with several of them each needs one",
            f"write --upstream NAME={url}; it is then reached at /NAME",
        )
    if name in _RESERVED:
        raise InputError(f"an upstream cannot be called {name!r}", "give it another name")
    path = parts.path.rstrip("/") or "/v1"
    return Upstream(name, scheme, host, parts.port or _PORTS[scheme], path, provider)


def _address(url: str) -> SplitResult:
    parts = url_parts(url)
    if parts is None:
        named = ", ".join(sorted(name for name, one in PROVIDERS.items() if one.base_url))
        raise InputError(
            f"the upstream {url!r} is neither a known provider nor an address",
            f"give one of {named}, or an address such as https://api.openai.com/v1 or "
            "NAME=http://127.0.0.1:8000/v1",
        )
    if "@" in parts.netloc:
        raise InputError(
            "the upstream's address holds a login, which would be shown and recorded",
            "take it out; the proxy passes on the keys that clients send",
        )
    if parts.query or parts.fragment:
        raise InputError(
            "the upstream's address has a query, and queries come from the clients",
            "remove the question mark and what follows it",
        )
    return parts


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What programs set so that their calls go through the proxy."""

    openai: str
    """The base_url of OpenAI's clients, and of all that speak like them."""
    anthropic: str
    """The base_url of Anthropic's clients, which append /v1 themselves."""


def client_settings(upstream: Upstream, address: str, *, is_alone: bool) -> ClientSettings:
    """Returns the base URLs for an upstream; `address` is the proxy's, with a token if it has one.

    A client's URL is the upstream's own, with the proxy in place of scheme and host.
    """
    base = address if is_alone else f"{address}/{upstream.name}"
    openai = base + upstream.base_path
    return ClientSettings(openai, openai.removesuffix("/v1"))


def route(target: str, upstreams: Sequence[Upstream]) -> tuple[Upstream, str] | None:
    """Returns the upstream of a path, and the path there; None if it leads to none.

    A single upstream has all paths; of several each has those after its name.
    """
    if len(upstreams) == 1:
        return upstreams[0], target
    for upstream in upstreams:
        inner = _after(target, upstream.name)
        if inner is not None:
            return upstream, inner
    return None


def _after(target: str, name: str) -> str | None:
    """Returns what follows `/name` in a path, or None if it does not begin so."""
    rest = target.removeprefix(f"/{name}")
    if rest == target or (rest and rest[0] not in "/?"):
        return None
    return rest if rest.startswith("/") else f"/{rest}"
