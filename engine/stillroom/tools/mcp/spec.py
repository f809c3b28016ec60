"""Which MCP server to use, and which transport and protocol generation it speaks."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.settings import tool_environment

_PORT = "{port}"
"""The placeholder in a command for the port that the server is to listen on."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server: the command that starts it, the URL where it runs, or both."""

    command: tuple[str, ...] = ()
    url: str = ""
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=tool_environment, repr=False)

    @property
    def is_shared(self) -> bool:
        """Whether one process serves all rollouts, over HTTP on a port that we choose."""
        return any(_PORT in argument for argument in self.command)

    def at_port(self, port: int) -> "ServerSpec":
        """Returns the spec of a shared server that is started on one port, with its URL."""
        command = tuple(argument.replace(_PORT, str(port)) for argument in self.command)
        # localhost and not 127.0.0.1: some servers refuse any other host name.
        return replace(self, command=command, url=f"http://localhost:{port}/mcp")

    def __str__(self) -> str:
        if self.command:
            return shlex.join(self.command)
        # A URL may hold a password or, in its query, a key; messages and logs must not.
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def parse_spec(
    server: str | Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerSpec:
    """Returns the server that a URL, a command line, or a command as a list of arguments names."""
    common: dict[str, Any] = {"folder": folder or Path.cwd()}
    if environment is not None:
        common["environment"] = environment
    if isinstance(server, str) and server.strip().startswith(("http://", "https://")):
        return ServerSpec(url=server.strip(), **common)
    try:
        command = tuple(shlex.split(server)) if isinstance(server, str) else tuple(server)
    except ValueError as error:
        raise InputError(
            f"the MCP server {server!r} is no command line: {error}", "close the quotes"
        ) from error
    if not command or not command[0]:
        raise InputError(
            f"the MCP server {server!r} is empty",
            "give a command line (npx @playwright/mcp@latest) or a URL (http://localhost:8931/mcp)",
        )
    return ServerSpec(command=command, **common)


@dataclass(frozen=True, slots=True)
class ServerDialect:
    """The transport and the protocol generation that a server is spoken to in.

    legacy: with a handshake and a session, which servers of both generations know; auto: without.
    """

    transport: Literal["stdio", "http", "sse"]
    mode: Literal["legacy", "auto"] = "legacy"


def first_dialect(spec: ServerSpec) -> ServerDialect:
    """Returns the dialect to try first."""
    return ServerDialect("http") if spec.url or spec.is_shared else ServerDialect("stdio")


def next_dialect(dialect: ServerDialect, code: int | None) -> ServerDialect | None:
    """Returns the dialect to try next, after the server refused one with a protocol error code."""
    from mcp.types.jsonrpc import UNSUPPORTED_PROTOCOL_VERSION

    if code is None:
        return None
    if code == UNSUPPORTED_PROTOCOL_VERSION and dialect.mode == "legacy":
        return ServerDialect(dialect.transport, "auto")
    return ServerDialect("sse") if dialect.transport == "http" else None
