"""A server that answers a host's first requests from a file, before the engine is loaded.

Hosts wait a few seconds for their servers to start. Loading the engine and building the schemas of
its tools takes as long as loading the MCP SDK, so the first answers are stored in listing.json. A
test compares that file with the answers of the complete server.
"""

import functools
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup
from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.types import RequestParams, Tool

from stillroom import __version__
from stillroom.reporting import background_tasks

LISTING = Path(__file__).parent / "listing.json"
_ANSWERED_EARLY = frozenset({"initialize", "server/discover", "ping", "tools/list"})


class EarlyServer(MCPServer[TaskGroup]):
    """The MCP server of a workspace, which loads the engine at the first request that needs it."""

    def __init__(self, workspace: Path) -> None:
        listing: dict[str, Any] = json.loads(LISTING.read_bytes())
        super().__init__(
            "stillroom",
            title="Stillroom",
            version=__version__,
            instructions=listing["instructions"],
            middleware=[self._handle_once_loaded],
            lifespan=_lifespan,
            log_level="WARNING",
        )
        self._workspace = workspace
        self._tools = [Tool.model_validate(tool) for tool in listing["tools"]]
        self._loading = anyio.Lock()
        self._middleware: list[ServerMiddleware[Any]] | None = None
        # The answer to initialize lists the requests and extensions of the complete server.
        for method in listing["methods"]:
            if self._lowlevel_server.get_request_handler(method) is None:
                self._lowlevel_server.add_request_handler(method, RequestParams, _not_loaded)
        self._lowlevel_server.extensions.update(listing["extensions"])

    async def list_tools(self) -> list[Tool]:
        """Returns the tools in listing.json."""
        return self._tools

    async def _handle_once_loaded(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Handles a request; requests that need the engine wait until it is loaded."""
        if ctx.request_id is None or ctx.method in _ANSWERED_EARLY:
            return await call_next(ctx)
        async with self._loading:
            if self._middleware is None:
                self._middleware = await self._load(ctx.lifespan_context)
        call = call_next
        for middleware in reversed(self._middleware):
            call = functools.partial(middleware, call_next=call)
        return await call(ctx)

    async def _load(self, group: TaskGroup) -> list[ServerMiddleware[Any]]:
        """Installs the handlers of the complete server and returns its middleware."""
        server = await anyio.to_thread.run_sync(_complete_server, self._workspace)
        lowlevel = server._lowlevel_server
        for method in server.methods:
            entry = lowlevel.get_request_handler(method)
            if entry is not None and method not in _ANSWERED_EARLY:
                self._lowlevel_server.add_request_handler(method, entry.params_type, entry.handler)
        group.start_soon(server.updates.watch)
        return server.added_middleware


@asynccontextmanager
async def _lifespan(_server: MCPServer[TaskGroup]) -> AsyncGenerator[TaskGroup]:
    async with background_tasks() as group:
        yield group


def _complete_server(folder: Path) -> Any:
    # Imported here because these imports are slow.
    from stillroom.settings import open_workspace
    from stillroom_mcp.app import build_server

    return build_server(open_workspace(folder))


async def _not_loaded(_ctx: object, _params: object) -> None:
    raise AssertionError("a request was handled before the complete server was loaded")


def listing_of(server: Any) -> str:
    """Returns the text of listing.json for a complete server, with one tool on each line."""
    lowlevel = server._lowlevel_server
    tools = anyio.run(server.list_tools)
    lines = [
        tool.model_dump_json(by_alias=True, exclude_none=True, ensure_ascii=False) for tool in tools
    ]
    head = {
        "instructions": lowlevel.instructions,
        "methods": server.methods,
        "extensions": lowlevel.extensions,
    }
    return json.dumps(head)[:-1] + ', "tools": [\n' + ",\n".join(lines) + "\n]}\n"
