"""The server that answers a host's first requests from a file, before the engine is loaded.

Hosts wait some seconds for their servers at each start. Loading the engine and making the schemas
of its tools takes as long as loading the protocol's library, so the answers are kept in
listing.json. A test compares that file with what the whole server answers.
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
_AT_ONCE = frozenset({"initialize", "server/discover", "ping", "tools/list"})


class EarlyServer(MCPServer[TaskGroup]):
    """The MCP server of a workspace, which loads the engine at the first other request."""

    def __init__(self, workspace: Path) -> None:
        listing: dict[str, Any] = json.loads(LISTING.read_bytes())
        super().__init__(
            "stillroom",
            title="Stillroom",
            version=__version__,
            instructions=listing["instructions"],
            middleware=[self._loaded_first],
            lifespan=_lifespan,
            log_level="WARNING",
        )
        self._workspace = workspace
        self._tools = [Tool.model_validate(tool) for tool in listing["tools"]]
        self._loading = anyio.Lock()
        self._middleware: list[ServerMiddleware[Any]] | None = None
        # The answer to initialize names the requests and extensions of the whole server.
        for method in listing["methods"]:
            if self._lowlevel_server.get_request_handler(method) is None:
                self._lowlevel_server.add_request_handler(method, RequestParams, _unloaded)
        self._lowlevel_server.extensions.update(listing["extensions"])

    async def list_tools(self) -> list[Tool]:
        """Returns the tools that the file lists."""
        return self._tools

    async def _loaded_first(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Passes a request on; all but the first ones wait until the engine is loaded."""
        if ctx.request_id is None or ctx.method in _AT_ONCE:
            return await call_next(ctx)
        async with self._loading:
            if self._middleware is None:
                self._middleware = await self._load(ctx.lifespan_context)
        call = call_next
        for middleware in reversed(self._middleware):
            call = functools.partial(middleware, call_next=call)
        return await call(ctx)

    async def _load(self, group: TaskGroup) -> list[ServerMiddleware[Any]]:
        """Takes over the handlers of the whole server and returns its middleware."""
        whole = await anyio.to_thread.run_sync(_whole_server, self._workspace)
        low = whole._lowlevel_server
        for method in whole.methods:
            entry = low.get_request_handler(method)
            if entry is not None and method not in _AT_ONCE:
                self._lowlevel_server.add_request_handler(method, entry.params_type, entry.handler)
        group.start_soon(whole.updates.watch)
        return whole.own_middleware


@asynccontextmanager
async def _lifespan(_server: MCPServer[TaskGroup]) -> AsyncGenerator[TaskGroup]:
    async with background_tasks() as group:
        yield group


def _whole_server(folder: Path) -> Any:
    # Imported here, since these imports take long.
    from stillroom.settings import open_workspace
    from stillroom_mcp.app import build_server

    return build_server(open_workspace(folder))


async def _unloaded(_ctx: object, _params: object) -> None:
    raise AssertionError("a request reached the early server before the whole one was loaded")


def listing_of(whole: Any) -> str:
    """Returns the text of listing.json for the whole server, with one tool on each line."""
    low = whole._lowlevel_server
    tools = anyio.run(whole.list_tools)
    lines = [
        tool.model_dump_json(by_alias=True, exclude_none=True, ensure_ascii=False) for tool in tools
    ]
    head = {
        "instructions": low.instructions,
        "methods": whole.methods,
        "extensions": low.extensions,
    }
    return json.dumps(head)[:-1] + ', "tools": [\n' + ",\n".join(lines) + "\n]}\n"
