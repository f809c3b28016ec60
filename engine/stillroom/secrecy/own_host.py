"""Decides by Host and Origin whether a request was meant for the server that it reached.

A page in the user's browser can send requests to any port of the machine, and with a name that it
makes resolve to 127.0.0.1 it could read the answers too.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def is_own_host(named: str, own_address: str, allowed: Collection[str] = ()) -> bool:
    """Returns whether a Host header names this server, on whichever port.

    An address must be `own_address`, the one the request came in at; ports differ behind a tunnel.
    `allowed` holds other names in lower case.
    """
    try:
        host = urlsplit(f"//{named}").hostname or ""
    except ValueError:
        return False
    if host in allowed:
        return True
    own = _address(own_address)
    if own is None:
        return False
    return own.is_loopback if host == "localhost" else _address(host) == own


def is_own_page(origin: str, named: str) -> bool:
    """Returns whether an Origin header is that of a page of the server that `Host` names.

    Pages at other ports of this machine are foreign pages, too, and may have its cookies.
    """
    try:
        return urlsplit(origin).netloc.lower() == named.lower()
    except ValueError:
        return False


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
