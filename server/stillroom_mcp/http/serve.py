"""Serves the MCP server over HTTP."""

import logging
import shlex
import sys
from collections.abc import Iterable, Sequence

from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from stillroom import bounds
from stillroom.api import Operation
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server
from stillroom_mcp.http.guard import Guard
from stillroom_mcp.http.listening import (
    TOKEN_VARIABLE,
    ServerToken,
    address_of,
    listening_socket,
    run_app,
    server_token,
)

MCP_PATH = "/mcp"


def serve_http(
    workspace: Workspace,
    operations: Sequence[Operation],
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token_file: str | None = None,
    allow_host: Iterable[str] = (),
) -> int:
    """Runs the MCP server over streamable HTTP until the process gets SIGINT or SIGTERM.

    Raises InputError if it would listen for other machines and the user gave no token.
    """
    token = server_token(token_file)
    with listening_socket(host, port, token) as listener:
        # The token is redacted from answers, like other secrets.
        redacting_workspace = Workspace(
            workspace.root, {**workspace.secrets, TOKEN_VARIABLE: token.value}
        )
        app = mcp_app(
            build_server(redacting_workspace, operations),
            token=token.value,
            allowed_hosts=allow_host,
        )
        _announce(f"{address_of(listener)}{MCP_PATH}", token)
        run_app(app, listener)
    return 0


def _is_not_disconnect(record: logging.LogRecord) -> bool:
    """Returns whether a log record is about anything but a client that disconnected."""
    return record.exc_info is None or not isinstance(record.exc_info[1], ClientDisconnect)


def mcp_app(server: MCPServer, *, token: str | None, allowed_hosts: Iterable[str] = ()) -> ASGIApp:
    """Returns the application that serves an MCP server at `/mcp` to clients with the token."""
    # The SDK logs a traceback for each client that disconnects during a request.
    logging.getLogger("mcp.server.streamable_http").addFilter(_is_not_disconnect)
    inner = server.streamable_http_app(
        streamable_http_path=MCP_PATH,
        max_sessions=bounds.SESSIONS.limit,
        max_request_body_size=bounds.MCP_REQUEST.limit,
        # The guard checks Host and Origin, and knows the names that the user allowed.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Guard(inner, token=token, hosts=allowed_hosts)


def _announce(url: str, token: ServerToken) -> None:
    token_text = (
        f"$(cat {shlex.quote(token.source)})" if not token.source.startswith("$") else token.source
    )
    sys.stderr.write(
        f"stillroom serves MCP at {url}\n"
        f"token: {token.source}\n"
        f"for example: claude mcp add --transport http stillroom {url} --header "
        f'"Authorization: Bearer {token_text}"\n'
    )
    sys.stderr.flush()
