"""Which MCP server is meant, and how it is spoken to."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.settings import tool_environment

PORT = "{port}"
"""What stands in a command for the port that the server is to listen on."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Which server: the command that starts one, the URL where one runs, or both."""

    command: tuple[str, ...] = ()
    url: str = ""
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=tool_environment, repr=False)

    @property
    def is_shared(self) -> bool:
        """Whether one process serves all rollouts, over HTTP at a port that it is given."""
        return any(PORT in word for word in self.command)

    def at_port(self, port: int) -> "ServerSpec":
        """Returns how a shared server is started on a port, and where it is then."""
        command = tuple(word.replace(PORT, str(port)) for word in self.command)
        # By this name: some servers answer to no other.
        return replace(self, command=command, url=f"http://localhost:{port}/mcp")

    def __str__(self) -> str:
        if self.command:
            return shlex.join(self.command)
        # A password or a key in the query is nobody's business.
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def parse_spec(
    given: str | Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerSpec:
    """Returns the server meant by a URL, a command line, or a command as a list of words."""
    where: dict[str, Any] = {"folder": folder or Path.cwd()}
    if environment is not None:
        where["environment"] = environment
    if isinstance(given, str) and given.strip().startswith(("http://", "https://")):
        return ServerSpec(url=given.strip(), **where)
    try:
        words = tuple(shlex.split(given)) if isinstance(given, str) else tuple(given)
    except ValueError as error:
        raise InputError(
            f"the MCP server {given!r} is no command line: {error}", "close the quotes"
        ) from error
    if not words or not words[0]:
        raise InputError(
            f"the MCP server {given!r} is empty",
            "give a command line (npx @playwright/mcp@latest) or a URL (http://localhost:8931/mcp)",
        )
    return ServerSpec(command=words, **where)


@dataclass(frozen=True, slots=True)
class Way:
    """How a server is spoken to: over what, and in which generation of the protocol.

    legacy: with a handshake and a session, which servers of both generations know; auto: without.
    """

    transport: Literal["stdio", "http", "sse"]
    mode: Literal["legacy", "auto"] = "legacy"


def first_way(spec: ServerSpec) -> Way:
    """Returns the way that is tried first."""
    return Way("http") if spec.url or spec.is_shared else Way("stdio")


def next_way(way: Way, code: int | None) -> Way | None:
    """Returns the way to try after the server refused `way` with an error code of the protocol."""
    from mcp.types.jsonrpc import UNSUPPORTED_PROTOCOL_VERSION

    if code is None:
        return None
    if code == UNSUPPORTED_PROTOCOL_VERSION and way.mode == "legacy":
        return Way(way.transport, "auto")
    return Way("sse") if way.transport == "http" else None
