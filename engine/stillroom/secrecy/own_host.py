"""Checks the Host and Origin headers of a request, against DNS rebinding and cross-site requests.

A page in the user's browser can send requests to any port of the machine, and with a DNS name that
resolves to 127.0.0.1 it could read the responses too.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def is_own_host(host_header: str, own_address: str, allowed: Collection[str] = ()) -> bool:
    """Returns whether a Host header names this server, ignoring the port, which a tunnel changes.

    An IP address must be equal to `own_address`, the local address of the connection. `allowed` has
    further host names in lower case.
    """
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return False
    if host in allowed:
        return True
    own = _address(own_address)
    if own is None:
        return False
    return own.is_loopback if host == "localhost" else _address(host) == own


def is_own_page(origin: str, host_header: str) -> bool:
    """Returns whether an Origin header is the origin of the server that the Host header names.

    Pages at other ports of this machine are other origins, although they share its cookies.
    """
    try:
        return urlsplit(origin).netloc.lower() == host_header.lower()
    except ValueError:
        return False


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns a host as an IP address (an IPv4-mapped one as IPv4); None if it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
