"""Runs an application over HTTP at a socket: that of the MCP server, and the dashboard."""

import socket

import anyio
import uvicorn
from starlette.types import ASGIApp

STOP_S = 5


def run_app(app: ASGIApp, listener: socket.socket, *, stop_s: int = STOP_S) -> None:
    """Serves an application at a socket until SIGINT or SIGTERM."""
    anyio.run(http_server(app, stop_s=stop_s).serve, [listener])


def http_server(app: ASGIApp, *, stop_s: int = STOP_S) -> uvicorn.Server:
    """Returns the HTTP server of an application.

    When it stops, requests that are being answered have `stop_s` seconds to end.
    """
    config = uvicorn.Config(
        app,
        lifespan="on",
        # The faster parser leaves blanks at the end of a header's value, where HTTP has none.
        http="h11",
        ws="none",
        log_level="warning",
        # Addresses in it would hold the token.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=stop_s,
    )
    return uvicorn.Server(config)
