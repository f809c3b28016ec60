"""The address of an MCP server: its command or URL, its transport and protocol generation."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.secrecy.commands import without_secrets
from stillroom.secrecy.environments import tool_environment

_PORT = "{port}"
"""The placeholder in a command for the port on which the server must listen."""
_BARE_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):(\d{1,5})(/\S*)?")
"""Matches a host with its port, such as localhost:8931, which no command line starts with."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """An MCP server, given by the command that starts it, its URL, or both."""

    command: tuple[str, ...] = ()
    url: str = ""
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=tool_environment, repr=False)

    @property
    def is_shared(self) -> bool:
        """Whether one process serves all rollouts over HTTP, on a port that Stillroom chooses."""
        return any(_PORT in argument for argument in self.command)

    def at_port(self, port: int) -> "ServerSpec":
        """Returns the spec of the shared server on `port`, with its URL."""
        command = tuple(argument.replace(_PORT, str(port)) for argument in self.command)
        # localhost and not 127.0.0.1: some servers refuse any other host name.
        return replace(self, command=command, url=f"http://localhost:{port}/mcp")

    def __str__(self) -> str:
        if self.command:
            return without_secrets(shlex.join(self.command))
        # A URL may hold a password, or a key in its query; neither may get into messages or logs.
        parts = urlsplit(self.url)
        return without_secrets(
            parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        )


def parse_spec(
    server: str | Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerSpec:
    """Returns the spec of a server given as a URL, a command line, or a list of arguments.

    Raises InputError if it is empty or has an unclosed quote.
    """
    common: dict[str, Any] = {"folder": folder or Path.cwd()}
    if environment is not None:
        common["environment"] = environment
    if isinstance(server, str) and server.strip().startswith(("http://", "https://")):
        return ServerSpec(url=server.strip(), **common)
    bare = _BARE_ADDRESS.fullmatch(server.strip()) if isinstance(server, str) else None
    if bare is not None:
        return ServerSpec(url=f"http://{bare[1]}:{bare[2]}{bare[3] or '/mcp'}", **common)
    try:
        command = tuple(shlex.split(server)) if isinstance(server, str) else tuple(server)
    except ValueError as error:
        raise InputError(
            f"the MCP server {without_secrets(str(server))!r} is not a command line: {error}",
            "close all quotes, and end with no backslash",
        ) from error
    if not command or not command[0]:
        raise InputError(
            f"the MCP server {server!r} is empty",
            "give a command line (npx @playwright/mcp@latest) or a URL (http://localhost:8931/mcp)",
        )
    return ServerSpec(command=command, **common)


def is_local_port(server: str, port: int) -> bool:
    """Returns whether `server` is an address of this machine with `port` and without a scheme.

    An example is localhost:8931.
    """
    bare = _BARE_ADDRESS.fullmatch(server.strip())
    return bare is not None and bare[1] in _THIS_MACHINE and bare[2] == str(port)


@dataclass(frozen=True, slots=True)
class ServerDialect:
    """The transport and the protocol generation to use with a server.

    In mode `legacy` a session begins with a handshake, which most servers of both generations
    support; mode `auto` skips it.
    """

    transport: Literal["stdio", "http", "sse"]
    mode: Literal["legacy", "auto"] = "legacy"


def first_dialect(spec: ServerSpec) -> ServerDialect:
    """Returns the dialect to try first."""
    return ServerDialect("http") if spec.url or spec.is_shared else ServerDialect("stdio")


def next_dialect(dialect: ServerDialect, code: int | None) -> ServerDialect | None:
    """Returns the dialect to try after a server rejected one; None if none is left.

    `code` is the error code that the server sent; None if it sent none.
    """
    from mcp.types.jsonrpc import UNSUPPORTED_PROTOCOL_VERSION

    if code is None:
        return None
    if code == UNSUPPORTED_PROTOCOL_VERSION and dialect.mode == "legacy":
        return ServerDialect(dialect.transport, "auto")
    return ServerDialect("sse") if dialect.transport == "http" else None
