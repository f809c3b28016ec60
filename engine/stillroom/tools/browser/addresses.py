"""Decides which addresses the browser may reach: the public web and the user's allowlist.

Two checks must pass: one of the host as spelled, and one of every address that it resolves to. The
proxy makes the second check, because it must cover exactly the address that is dialled.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import urlsplit

import idna

from stillroom.errors import InputError

IPAddress = IPv4Address | IPv6Address
_IPNetwork = IPv4Network | IPv6Network

_DEFAULT_PORTS = {"http": 80, "https": 443}

# Source: https://fetch.spec.whatwg.org/#port-blocking
# fmt: off
_UNSAFE_PORTS = frozenset({
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101,
    102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427,
    465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990,
    993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667,
    6668, 6669, 6679, 6697, 10080,
})
# fmt: on

# Source: https://www.iana.org/assignments/iana-ipv4-special-registry. `ipaddress.is_global` would
# not do: it lets some of these pass, and which ones depends on the version of Python.
_BLOCKED_V4 = {
    "0.0.0.0/8": "an unspecified address",
    "10.0.0.0/8": "a private address",
    "100.64.0.0/10": "an address of a carrier's own network",
    "127.0.0.0/8": "a loopback address",
    "168.63.129.16/32": "a cloud's metadata endpoint",
    "169.254.0.0/16": "a link-local or metadata address",
    "172.16.0.0/12": "a private address",
    "192.0.0.0/24": "a reserved address",
    "192.0.2.0/24": "a reserved address",
    "192.31.196.0/24": "a reserved address",
    "192.52.193.0/24": "a reserved address",
    "192.88.99.0/24": "a 6to4 relay",
    "192.168.0.0/16": "a private address",
    "192.175.48.0/24": "a reserved address",
    "198.18.0.0/15": "a reserved address",
    "198.51.100.0/24": "a reserved address",
    "203.0.113.0/24": "a reserved address",
    "224.0.0.0/4": "a multicast address",
    "240.0.0.0/4": "a reserved address",
}
# All IPv6 addresses of the public internet are in here; the blocks below are not public.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# Source: https://www.iana.org/assignments/iana-ipv6-special-registry
_BLOCKED_V6 = {
    "::/128": "an unspecified address",
    "::1/128": "a loopback address",
    "::ffff:0:0/96": "an IPv4 address in IPv6",
    "64:ff9b::/96": "a NAT64 address",
    "64:ff9b:1::/48": "a NAT64 address",
    "2001::/32": "a Teredo address",
    "2001::/23": "a reserved address",
    "2001:db8::/32": "a reserved address",
    "2002::/16": "a 6to4 address",
    "2620:4f:8000::/48": "a reserved address",
    "3ffe::/16": "a reserved address",
    "3fff::/20": "a reserved address",
    "fc00::/7": "a private address",
    "fe80::/10": "a link-local address",
    "fec0::/10": "a private address",
    "ff00::/8": "a multicast address",
}
_BLOCKED: list[tuple[_IPNetwork, str]] = [
    (ip_network(block), description) for block, description in (_BLOCKED_V4 | _BLOCKED_V6).items()
]
# Even an allowed *name* may not resolve to these: metadata endpoints, multicast and the like.
_NEVER_BY_NAME = tuple(
    ip_network(block)
    for block in (
        "0.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4",
        "::/128", "fd00:ec2::/32", "fd20:ce::/32", "fe80::/10", "ff00::/8",
    )
)  # fmt: skip

_LOCAL_SUFFIXES = (
    "localhost", "localdomain", "local", "internal", "intranet", "private", "corp", "home", "lan",
    "home.arpa", "onion",
)  # fmt: skip

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# Browsers read a host whose last label looks like this as an IPv4 address.
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PLAIN_IPV4 = re.compile(r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){3}")
_AUTHORITY = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(:(?P<port>[0-9]{1,5}))?", re.ASCII)
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


class AddressBlockedError(Exception):
    """The policy does not allow an address; the text is shown to the model."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a request: a host whose spelling has passed the check, and a port."""

    host: str
    """A name in lower case or an IP address, without brackets."""
    port: int

    @property
    def address(self) -> IPAddress | None:
        """The host as an IP address; None for a name."""
        return _parse_ip(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AddressPolicy:
    """Decides which targets may be reached, and raises AddressBlockedError for all others.

    `allow` holds targets in addition to the public web, each as `host`, `host:port` or a CIDR
    block. A host is allowed only as it is spelled there, and not under other names for the same
    address. The addresses of a block are allowed under every name.
    """

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._networks: list[_IPNetwork] = []
        self._hosts: set[tuple[str, int | None]] = set()
        for entry in allow:
            self._add_allowed(entry)

    def check_url(self, url: str) -> Target:
        """Returns the target of a URL. Raises AddressBlockedError if it is not allowed."""
        if not url.isprintable() or "\\" in url or url != url.strip() or " " in url:
            raise AddressBlockedError("the URL contains a space, backslash or control character")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise AddressBlockedError(f"this is not a URL: {error}") from error
        if parts.scheme not in _DEFAULT_PORTS:
            raise AddressBlockedError("only absolute http:// or https:// URLs can be opened")
        if "@" in parts.netloc:
            raise AddressBlockedError("a URL with a user name or password cannot be opened")
        return self.check_authority(parts.netloc, default_port=_DEFAULT_PORTS[parts.scheme])

    def check_authority(self, authority: str, *, default_port: int | None) -> Target:
        """Returns the target of `host[:port]`, as it is written in a URL."""
        match = _AUTHORITY.fullmatch(authority)
        port = (match["port"] or default_port) if match else None
        if not match or port is None:
            raise AddressBlockedError("the host is not written as host:port")
        return self._check_target(match["host"], int(port))

    def _check_target(self, host: str, port: int) -> Target:
        """Returns the checked target of a host and a port; an IPv6 address must be in brackets."""
        target = Target(_canonical_host(host), port)
        # Not even `allow` opens these ports: browsers block them as well.
        if port in _UNSAFE_PORTS or not 0 < port < 65536:
            raise AddressBlockedError(f"port {port} is out of range or blocked by browsers")
        address = target.address
        if address is not None:
            self.check_address(address, target)
        elif not self._is_allowlisted(target):
            _check_public_name(target.host)
        return target

    def check_address(self, address: IPAddress | str, target: Target) -> IPAddress:
        """Returns an address that `target` resolved to. Raises AddressBlockedError."""
        parsed = _parse_ip(address) if isinstance(address, str) else address
        if parsed is None:
            raise AddressBlockedError(f"{target.host} resolves to no IP address")
        if any(parsed in network for network in self._networks):
            return parsed
        if self._is_allowlisted(target) and (
            target.address is not None or not any(parsed in block for block in _NEVER_BY_NAME)
        ):
            return parsed
        reason = non_public_reason(parsed)
        if reason is not None:
            verb = "is" if target.address else "resolves to"
            raise AddressBlockedError(f"{target.host} {verb} {reason}, not part of the public web")
        return parsed

    def _is_allowlisted(self, target: Target) -> bool:
        """Returns whether `allow` has the host of a target, with its port or without a port."""
        return not self._hosts.isdisjoint({(target.host, None), (target.host, target.port)})

    def _add_allowed(self, entry: str) -> None:
        """Adds an entry of `allow`. Raises InputError if it is neither a host nor a CIDR block."""
        try:
            if "/" in entry:
                self._networks.append(ip_network(entry))
                return
            # An IPv6 address without brackets is a host as well.
            authority = f"[{entry}]" if _parse_ip(entry) and ":" in entry else entry
            match = _AUTHORITY.fullmatch(authority)
            if not match:
                raise ValueError("it is neither a host nor a CIDR block")
            port = int(match["port"]) if match["port"] else None
            self._hosts.add((_canonical_host(match["host"]), port))
        except (ValueError, AddressBlockedError) as error:
            raise InputError(
                f"browse_allow: {entry!r} is not a valid entry: {error}",
                "write a host such as `wiki.internal` or `127.0.0.1:8000`, or a CIDR block such as "
                "`10.1.0.0/16`",
            ) from error


def non_public_reason(address: IPAddress) -> str | None:
    """Returns what makes an address non-public, e.g. "a private address"; None if it is public."""
    for network, description in _BLOCKED:
        if address in network:
            return description
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return "an address with a zone"
        if address not in _GLOBAL_UNICAST:
            return "a reserved address"
        if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
            return "an ISATAP address"
    return None


def _canonical_host(host: str) -> str:
    """Returns the host in its canonical spelling. Raises AddressBlockedError for odd spellings."""
    if host.startswith("["):
        return _canonical_ipv6(host)
    name = host.lower()
    if not name.isascii():
        name = _ascii_name(name)
    labels = name.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        if not _PLAIN_IPV4.fullmatch(name) or _parse_ip(name) is None:
            raise AddressBlockedError("the host is an IP address in a non-standard notation")
        return name
    if name.endswith("."):
        raise AddressBlockedError("the host ends with a dot")
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise AddressBlockedError("the host is not a valid name")
    return name


def _canonical_ipv6(host: str) -> str:
    address = _parse_ip(host[1:-1])
    if not isinstance(address, IPv6Address) or address.scope_id is not None:
        raise AddressBlockedError("the host is not a plain IPv6 address")
    return str(address)


def _ascii_name(name: str) -> str:
    """Returns an international name in its ASCII form (IDNA)."""
    # Full-width and circled letters and digits only disguise ASCII; no honest URL has them.
    if unicodedata.normalize("NFKC", name).isascii():
        raise AddressBlockedError("the host is written with look-alikes of ASCII characters")
    try:
        return idna.encode(name, uts46=True).decode("ascii")
    except UnicodeError as error:
        raise AddressBlockedError(f"the host is not a valid name: {error}") from error


def _check_public_name(name: str) -> None:
    """Raises AddressBlockedError for a name that only a local network has."""
    if "." not in name and name != "localhost":
        raise AddressBlockedError(f"{name} is a name of a local network, not of the public web")
    if any(name == suffix or name.endswith(f".{suffix}") for suffix in _LOCAL_SUFFIXES):
        raise AddressBlockedError(f"{name} is a local name, not part of the public web")


def _parse_ip(text: str) -> IPAddress | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
