"""A dashboard in this process: called without a network, or served to a real browser."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.testclient import TestClient

from fakes.waiting import wait_until
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom_mcp.dashboard.app import build_dashboard

TOKEN = "a-token-of-this-test"


def client_of(folder: Path) -> TestClient:
    """Returns a browser that has the cookie of the folder's dashboard."""
    app = build_dashboard(Workspace(folder), TOKEN)
    client = TestClient(app, base_url="http://127.0.0.1:8484", raise_server_exceptions=True)
    assert client.get(f"/?token={TOKEN}").status_code == 200
    return client


@dataclass(frozen=True)
class ServedDashboard:
    """A dashboard on a port of the loopback."""

    base: str

    @property
    def entrance(self) -> str:
        return f"{self.base}/?token={TOKEN}"


@contextmanager
def served(folder: Path) -> Iterator[ServedDashboard]:
    """Serves the folder's dashboard from a thread for as long as the block runs."""
    config = uvicorn.Config(
        build_dashboard(Workspace(folder), TOKEN), log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        yield ServedDashboard(f"http://127.0.0.1:{listening.getsockname()[1]}")
        server.should_exit = True
        thread.join(5)


@contextmanager
def kept_running(folder: Path) -> Iterator[None]:
    """Has the run of the folder seem alive: without the lock it would be closed when it is read."""
    lock = RunFolder(folder).owner_lock()
    assert lock.try_acquire()
    yield
    lock.release()
