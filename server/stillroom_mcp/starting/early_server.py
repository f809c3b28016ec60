"""Answers what a host asks first from a file, and loads the engine when it asks for more.

A host waits some seconds for its servers at each of its starts. Loading the engine and making the
schemas of its tools takes as long as the protocol's own library, so what they come to is written
down in listing.json, which a test holds to what the server says when it has loaded everything.
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
    """The MCP server of a workspace, which loads the rest of itself at the first other request."""

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
        # A host is told which requests and extensions there are.
        for method in listing["methods"]:
            if self._lowlevel_server.get_request_handler(method) is None:
                self._lowlevel_server.add_request_handler(method, RequestParams, _unloaded)
        self._lowlevel_server.extensions.update(listing["extensions"])

    async def list_tools(self) -> list[Tool]:
        """Returns the tools as the file lists them."""
        return self._tools

    async def _loaded_first(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Passes a request on, once everything is loaded that may answer it."""
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
        """Takes over the handlers of the whole server, and returns its middleware."""
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
    # Imported here, since this is what takes long.
    from stillroom.settings import open_workspace
    from stillroom_mcp.app import build_server

    return build_server(open_workspace(folder))


async def _unloaded(_ctx: object, _params: object) -> None:
    raise AssertionError("a request reached the early server before the whole one was loaded")


def listing_of(whole: Any) -> str:
    """Returns what listing.json must hold for the whole server: a tool on each line."""
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
