"""Serves the dashboard on the loopback until it is stopped."""

import secrets
import socket
import sys
import webbrowser

import uvicorn

from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom_mcp.dashboard.app import build_dashboard

_HOST = "127.0.0.1"
_STOP_WAIT_S = 2


def serve_dashboard(workspace: Workspace, *, port: int, is_opened: bool) -> None:
    """Serves the dashboard until it is interrupted, and prints the address to open.

    Raises InputError if the port is taken.
    """
    token = secrets.token_urlsafe(24)
    listening = listen(port)
    url = f"http://{_HOST}:{listening.getsockname()[1]}/?token={token}"
    sys.stdout.write(f"dashboard of {workspace.root}, read-only, for this machine alone:\n{url}\n")
    sys.stdout.write("stop it with Ctrl-C; runs go on without it\n")
    sys.stdout.flush()
    if is_opened:
        webbrowser.open(url)
    # Addresses in the access log would hold the token.
    config = uvicorn.Config(
        build_dashboard(workspace, token), log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=_STOP_WAIT_S,
    )  # fmt: skip
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on a port of the loopback; 0 is any free one.

    Raises InputError if another program listens there.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise InputError(
            f"port {port} of {_HOST} cannot be used: {error.strerror}",
            "choose another with --port, or 0 for any that is free",
        ) from error
    return listening
