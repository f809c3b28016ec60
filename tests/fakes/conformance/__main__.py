"""Serves our own server with the suite's fixtures: `python -m fakes.conformance FOLDER PORT`."""

import sys
from pathlib import Path

import anyio

from fakes.conformance.fixtures import add_fixtures
from fakes.conformance.tasks import FakeTasks, add_task_tools
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server
from stillroom_mcp.http.listening import ServerToken, address_of, http_server, listening_socket
from stillroom_mcp.http.serve import mcp_app


async def main(root: Path, port: int) -> None:
    token = ServerToken("", "nowhere", is_generated=True)
    listener = listening_socket("127.0.0.1", port, token)
    async with anyio.create_task_group() as group:
        server = build_server(Workspace(root), more_tasks=[FakeTasks(group)])
        add_fixtures(server)
        add_task_tools(server)
        # The suite shows no token.
        app = mcp_app(server, token=None)
        print(f"{address_of(listener)}/mcp", flush=True)  # noqa: T201
        await http_server(app).serve([listener])
        group.cancel_scope.cancel()


anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
