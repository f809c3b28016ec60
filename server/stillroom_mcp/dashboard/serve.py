"""Serves the dashboard on the loopback until it is stopped."""

import secrets
import socket
import sys
import webbrowser

from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom_mcp.dashboard.app import build_dashboard
from stillroom_mcp.http.listening import bound_socket, run_app

_HOST = "127.0.0.1"
_STOP_S = 2


def serve_dashboard(workspace: Workspace, *, port: int, is_opened: bool) -> None:
    """Serves the dashboard until it is interrupted, and prints the address to open.

    Raises InputError if the port is taken.
    """
    token = secrets.token_urlsafe(24)
    listening = listen(port)
    url = f"http://{_HOST}:{listening.getsockname()[1]}/?token={token}"
    sys.stdout.write(f"dashboard of {workspace.root}, read-only, for this machine alone:\n{url}\n")
    sys.stdout.write("stop it with Ctrl-C; runs continue without it\n")
    sys.stdout.flush()
    if is_opened:
        webbrowser.open(url)
    with listening:
        run_app(build_dashboard(workspace, token), listening, stop_s=_STOP_S)


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on a port of the loopback; 0 is any free one.

    Raises InputError if another program listens there.
    """
    try:
        return bound_socket(socket.AF_INET, (_HOST, port))
    except OSError as error:
        raise InputError(
            f"port {port} of {_HOST} cannot be used: {error.strerror}",
            "choose another with --port, or 0 for any that is free",
        ) from error
