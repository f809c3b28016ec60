"""Sockets that listen: on this machine alone, unless callers must show a token of the user's."""

import ipaddress
import socket
from typing import Any

from stillroom.errors import EngineError, InputError
from stillroom_mcp.http.tokens import TOKEN_VARIABLE, ServerToken


def bound_socket(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Returns a socket that listens at an address. Raises OSError if it cannot."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def listening_socket(host: str, port: int, token: ServerToken) -> socket.socket:
    """Returns a socket that listens at an address; port 0 stands for any that is free.

    Raises InputError if the address is taken, is none of this machine, or can be reached from
    others although the user gave no token.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"--host {host!r} is no address of this machine: {error}", "leave it away for 127.0.0.1"
        ) from error
    family, _, _, _, address = found[0]
    if token.is_made and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise InputError(
            f"--host {host!r} can be reached from other machines, and no token was given",
            "give one: `(umask 077; openssl rand -hex 32 > TOKEN_FILE)`, then --token-file "
            f"TOKEN_FILE (or ${TOKEN_VARIABLE}); or leave --host away and use a tunnel "
            f"(ssh -L {port}:127.0.0.1:{port})",
        )
    try:
        return bound_socket(family, address)
    except OSError as error:
        raise EngineError(
            f"cannot listen at {host} port {port}: {error.strerror}",
            "give another port with --port (0 for any free one), or an address of this machine",
        ) from error


def address_of(listener: socket.socket) -> str:
    """Returns the URL at which a listening socket is reached, without a slash at its end."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
