"""Notifies clients that subscribed to a run when the run has changed.

Clients of protocol version 2026-07-28 call subscriptions/listen, older ones resources/subscribe,
with the URIs of runs. Another process writes the folder of a run, so the server polls it twice a
second while a client is subscribed.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ResourceUpdated, ServerEvent
from mcp.types import EmptyResult, SubscribeRequestParams, UnsubscribeRequestParams

from stillroom.reporting import background_tasks
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

_POLL_S = 0.5
_SCHEME = "run://"


class RunUpdates:
    """Watches the runs that clients subscribed to, and publishes their changes on a bus."""

    def __init__(self, workspace: Workspace) -> None:
        self.bus = InMemorySubscriptionBus()
        self._workspace = workspace
        self._watched = Counter[str]()
        self._last_states: dict[str, object] = {}
        self._has_watchers = anyio.Event()

    @asynccontextmanager
    async def lifespan(self, _server: MCPServer) -> AsyncGenerator[TaskGroup]:
        """Watches while the server runs; requests get the task group as their lifespan context."""
        async with background_tasks() as group:
            group.start_soon(self.watch)
            yield group

    async def middleware(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Watches the runs in a subscriptions/listen request until the request ends."""
        if ctx.method != "subscriptions/listen":
            return await call_next(ctx)
        notifications: Any = (ctx.params or {}).get("notifications")
        uris: Any = (
            notifications.get("resourceSubscriptions") if isinstance(notifications, dict) else None
        )
        with self._watching(uris if isinstance(uris, list) else ()):
            return await call_next(ctx)

    def add_to(self, server: MCPServer) -> None:
        """Adds the subscription requests of earlier protocol versions."""
        add = server._lowlevel_server.add_request_handler  # pyright: ignore[reportPrivateUsage]
        add("resources/subscribe", SubscribeRequestParams, self._subscribe)
        add("resources/unsubscribe", UnsubscribeRequestParams, self._unsubscribe)

    async def _subscribe(
        self, ctx: ServerRequestContext[Any, Any], params: SubscribeRequestParams
    ) -> EmptyResult:
        uri, session, group = str(params.uri), ctx.session, ctx.lifespan_context
        connection = session._connection  # pyright: ignore[reportPrivateUsage]
        subscriptions: dict[str, Any] = connection.state.setdefault(__name__, {})
        if uri in subscriptions:
            return EmptyResult()

        def deliver(event: ServerEvent) -> None:
            if isinstance(event, ResourceUpdated) and event.uri == uri:
                group.start_soon(_notify, session, uri)

        watching = self._watching([uri])
        watching.__enter__()
        unsubscribe = self.bus.subscribe(deliver)

        def end() -> None:
            if subscriptions.pop(uri, None) is not None:
                unsubscribe()
                watching.__exit__(None, None, None)

        subscriptions[uri] = end
        connection.exit_stack.callback(end)
        return EmptyResult()

    async def _unsubscribe(
        self, ctx: ServerRequestContext[Any, Any], params: UnsubscribeRequestParams
    ) -> EmptyResult:
        connection = ctx.session._connection  # pyright: ignore[reportPrivateUsage]
        end = connection.state.get(__name__, {}).get(str(params.uri))
        if end is not None:
            end()
        return EmptyResult()

    @contextmanager
    def _watching(self, uris: Iterable[Any]) -> Generator[None]:
        """Watches the runs among the URIs until the block ends."""
        runs = [uri for uri in uris if isinstance(uri, str) and uri.startswith(_SCHEME)]
        for uri in runs:
            # The state at the time of the subscription is not a change.
            if not self._watched[uri]:
                self._last_states[uri] = self._state_of(uri)
            self._watched[uri] += 1
            self._has_watchers.set()
        try:
            yield
        finally:
            self._watched -= Counter(runs)

    async def watch(self) -> None:
        """Publishes the changes of watched runs until it is cancelled."""
        while True:
            if not self._watched:
                self._has_watchers = anyio.Event()
                await self._has_watchers.wait()
            await anyio.sleep(_POLL_S)
            for uri in list(self._watched):
                state = self._state_of(uri)
                if state != self._last_states.get(uri):
                    self._last_states[uri] = state
                    await self.bus.publish(ResourceUpdated(uri=uri))

    def _state_of(self, uri: str) -> object:
        """Returns the timestamps and sizes of a run's files, which change with the run."""
        run_id = uri.removeprefix(_SCHEME).partition("/")[0]
        if not run_id or run_id.startswith("."):
            return None
        folder, stamps = RunFolder(self._workspace.runs / run_id), list[tuple[int, int]]()
        for file in (folder.state_file, folder.events):
            with suppress(OSError, ValueError):
                file_stat = file.stat()
                stamps.append((file_stat.st_mtime_ns, file_stat.st_size))
        return stamps


async def _notify(session: Any, uri: str) -> None:
    # A client that has disconnected needs no notification.
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        await session.send_resource_updated(uri)
