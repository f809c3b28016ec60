"""The endpoints behind the proxy: their addresses, and what a client sets to reach each of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.teachers.providers import PROVIDERS

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_RESERVED = ("token",)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Upstream:
    """One endpoint. Its host is the only one that requests to it can reach."""

    name: str
    """What stands before the path where there are several, and for a known provider its name."""
    scheme: str
    host: str
    port: int
    base_path: str
    """The path of its OpenAI-compatible API, such as /v1 or /api/v1."""
    provider: str | None = None

    @property
    def origin(self) -> str:
        """The scheme, host and port, without the port that the scheme implies."""
        return f"{self.scheme}://{self.host_header}"

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def upstreams_of(given: Sequence[str]) -> tuple[Upstream, ...]:
    """Returns the upstreams that a user named: a provider, a URL or NAME=URL each.

    Raises InputError for one that is no endpoint, and where two have the same name.
    """
    found = tuple(_upstream(text, is_alone=len(given) == 1) for text in given)
    names = [upstream.name for upstream in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two upstreams are called {name!r}, so a path cannot tell them apart",
                "give one of them another name: --upstream NAME=URL",
            )
    return found


def _upstream(text: str, *, is_alone: bool) -> Upstream:
    name, separator, url = text.partition("=")
    if not separator or not _NAME.fullmatch(name):
        name, url = "", text
    if url in PROVIDERS and PROVIDERS[url].base_url:
        name, url = name or url, PROVIDERS[url].base_url
    scheme, host, port, path = _address(url)
    provider = _provider_at(host) if scheme == "https" else None
    name = name or provider or ("upstream" if is_alone else "")
    if not name:
        raise InputError(
            f"the upstream {url!r} has no name, and with several of them each needs one",
            f"write --upstream NAME={url}; it is then reached at /NAME",
        )
    if name in _RESERVED:
        raise InputError(f"an upstream cannot be called {name!r}", "give it another name")
    return Upstream(name, scheme, host, port, path, provider)


def _address(url: str) -> tuple[str, str, int, str]:
    fix = (
        f"give one of {', '.join(sorted(_named_providers()))}, or an address such as "
        "https://api.openai.com/v1 or NAME=http://127.0.0.1:8000/v1"
    )
    if url.isascii() and url.isprintable() and " " not in url:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"the upstream {url!r} is no address: {error}", fix) from error
        if "@" in parts.netloc:
            raise InputError(
                "the upstream's address holds a login, which would be shown and recorded",
                "take it out; the proxy passes on the keys that clients send",
            )
        if parts.query or parts.fragment:
            raise InputError(
                "the upstream's address has a query, and queries come from the clients",
                "take away the question mark and what follows it",
            )
        if parts.scheme in _PORTS and parts.hostname and port != 0:
            path = parts.path.rstrip("/")
            return parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path or "/v1"
    raise InputError(f"the upstream {url!r} is neither a known provider nor an address", fix)


def _named_providers() -> list[str]:
    return [name for name, provider in PROVIDERS.items() if provider.base_url]


def _provider_at(host: str) -> str | None:
    """Returns the provider whose own host this is."""
    for name, provider in PROVIDERS.items():
        if not provider.is_local and urlsplit(provider.base_url).hostname == host:
            return name
    return None


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
