"""The listening sockets, the access token and the uvicorn server of the HTTP servers."""

import ipaddress
import os
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

from stillroom import bounds
from stillroom.errors import EngineError, InputError

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ServerToken:
    """The access token of a server, and its file or environment variable."""

    value: str
    source: str
    """The path of its file, or the name of its environment variable after a dollar sign."""
    is_generated: bool
    """Whether stillroom generated the token because the user gave none."""

    def __repr__(self) -> str:
        return f"ServerToken({self.source})"


def bound_socket(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Returns a socket that listens on an address, whose second element is its port.

    Raises InputError if there is no such port, and OSError if it cannot listen on the address.
    """
    if not 0 <= address[1] <= _MAX_PORT:
        raise InputError(
            f"there is no port {address[1]}: ports are numbers from 0 to {_MAX_PORT}",
            "choose another port with --port, or 0 for any free one",
        )
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
    """Returns a socket that listens on an address; port 0 means any free port.

    Raises EngineError if the address is in use, is not an address of this machine, or is reachable
    from other machines although the user gave no token, or if there is no such port.
    """
    try:
        # The port is left out, because getaddrinfo takes port 70000 for port 4464.
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"--host {host!r} is not an address of this machine: {error}",
            "leave it out for 127.0.0.1",
        ) from error
    family, _, _, _, address = addresses[0]
    if (
        token.is_generated
        and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    ):
        raise InputError(
            f"--host {host!r} can be reached from other machines, but no token was given",
            "create one: `(umask 077; openssl rand -hex 32 > TOKEN_FILE)`, then --token-file "
            f"TOKEN_FILE (or ${TOKEN_VARIABLE}); or leave out --host and use a tunnel "
            f"(ssh -L {port}:127.0.0.1:{port})",
        )
    try:
        return bound_socket(family, (address[0], port, *address[2:]))
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            "choose another port with --port (0 for any free one), or an address of this machine",
        ) from error


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a listening socket, without a trailing slash."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


TOKEN_VARIABLE = "STILLROOM_TOKEN"  # noqa: S105 (the name of a variable)
_MIN_LENGTH = 16


def default_token_file() -> Path:
    """Returns the file in the user's state folder that holds the generated token."""
    base = os.environ.get("XDG_STATE_HOME")
    # check_readable denies files of this name, so no tool reads it.
    return (Path(base) if base else Path.home() / ".local" / "state") / "stillroom" / "token"


def server_token(file: str | None) -> ServerToken:
    """Returns the token in `file`, else that of STILLROOM_TOKEN, else a generated token.

    A token is generated once and stored. Raises InputError for a file that others may read, or for
    a token that could be guessed.
    """
    if file is not None:
        path = Path(file).expanduser().absolute()
        if not path.exists():
            raise InputError(
                f"the token file {str(path)!r} does not exist",
                f"create it with `(umask 077; openssl rand -hex 32 > {path})`, or leave out "
                "--token-file, and stillroom generates a token",
            )
        return ServerToken(_read_token(path), str(path), is_generated=False)
    if value := os.environ.get(TOKEN_VARIABLE, "").strip():
        source = f"${TOKEN_VARIABLE}"
        return ServerToken(_checked_token(value, source), source, is_generated=False)
    path = default_token_file()
    if not path.exists():
        _store_token(path, secrets.token_urlsafe(32))
    return ServerToken(_read_token(path), str(path), is_generated=True)


def _store_token(path: Path, token: str) -> None:
    """Writes a token to a new file with mode 0600, unless another server has just written one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with NamedTemporaryFile(dir=path.parent) as stream, suppress(FileExistsError):
        stream.write(f"{token}\n".encode())
        stream.flush()
        os.link(stream.name, path)


def _read_token(path: Path) -> str:
    """Returns the token in a file. Raises InputError if other users may read the file."""
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read(4096).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise InputError(
            f"the token file {str(path)!r} cannot be read: {error.strerror}",
            "use a file that you can read, with mode 0600",
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise InputError(
            f"other users may read the token file {str(path)!r} (mode {stat.S_IMODE(mode):04o})",
            f"run `chmod 600 {path}`; if somebody may have read it, also write a new token",
        )
    return _checked_token(text, str(path))


def _checked_token(token: str, source: str) -> str:
    """Returns the token. Raises InputError if it could be guessed or does not fit into a header."""
    if len(token) < _MIN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            f"the token in {source} is not valid: it must have at least {_MIN_LENGTH} printable "
            "ASCII characters without spaces",
            "use a random one, for example from `openssl rand -hex 32`",
        )
    return token


STOP_S = 5
REQUEST_S = float(bounds.WHOLE_REQUEST.limit)


def run_app(app: "ASGIApp", listener: socket.socket, *, stop_s: int = STOP_S) -> None:
    """Serves an application on a socket until SIGINT or SIGTERM."""
    anyio.run(http_server(app, stop_s=stop_s).serve, [listener])


def http_server(
    app: "ASGIApp", *, stop_s: int = STOP_S, request_s: float = REQUEST_S
) -> "uvicorn.Server":
    """Returns the HTTP server of an application.

    When it stops, active requests have `stop_s` seconds to finish. A connection is closed if its
    first request, or any request that has begun, is not complete after `request_s` seconds.
    """
    # Imported here because `stillroom record` and `stillroom setup` do not need it.
    import uvicorn

    from stillroom_mcp.http.deadline import DeadlineProtocol

    config = uvicorn.Config(
        app,
        lifespan="on",
        # httptools keeps trailing spaces in header values, which HTTP does not allow.
        http=type("Protocol", (DeadlineProtocol,), {"request_s": request_s}),
        ws="none",
        log_level="warning",
        # URLs in the access log would contain the token.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=stop_s,
    )
    return uvicorn.Server(config)
