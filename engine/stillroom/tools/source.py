"""Tools as the rollout loop sees them, wherever they come from.

A ToolSource opens one ToolSession for each rollout, and a session runs the rollout's tool calls.
Each kind of source bounds its calls by a deadline in its own way:

- tools.py: UserPool.call in tools/user/pool.py; the worker's process is killed.
- MCP servers and containers: Connection.call in tools/mcp/connection.py; the session is closed.
- the browser: BrowseSession.call in tools/browser/session.py; the session's pages are closed.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from stillroom.errors import InputError
from stillroom.types import ToolSchema


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one tool call, as the model will read it."""

    content: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class ToolTask:
    """What tools may know of the task that they serve."""

    metadata: dict[str, Any]
    docker: str | None = None
    """The container with the task's MCP server: `local/NAME` or an image."""
    docker_env: dict[str, str] = field(default_factory=dict[str, str])


class ToolSession(Protocol):
    """The tools of one rollout; no other rollout sees their state."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool within its deadline; a tool that fails gives a result with `is_error`.

        Raises:
            CallFailedError: the tool could not be run at all.
        """
        ...


class ToolSource(Protocol):
    """A place that tools come from: tools.py, an MCP server, containers, the browser."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas that the model is shown, in a stable order."""
        ...

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the schemas that one task is shown; only containers depend on the task."""
        return self.schemas

    @property
    def keeps_state(self) -> bool:
        """Whether a call depends on earlier calls, so that a recorded reply is no use alone."""
        ...

    def session(self, task: ToolTask) -> AbstractAsyncContextManager[ToolSession]:
        """Opens the tools for one rollout; processes and pages start with the first call."""
        ...


def error_result(text: str) -> ToolResult:
    """Returns the result that tells the model what went wrong."""
    return ToolResult(content=f"error: {text}", is_error=True)


class CombinedTools(ToolSource):
    """The tools of several sources as one source. The caller opens and closes the sources."""

    def __init__(self, sources: Mapping[str, ToolSource]) -> None:
        """`sources`: each under the name that messages give it, e.g. the path of tools.py.

        Raises:
            InputError: two of them have a tool of the same name.
        """
        self._sources = dict(sources)
        self._source_of_tool: dict[str, str] = {}
        for source_name, source in self._sources.items():
            for schema in source.schemas:
                self._claim(schema["function"]["name"], source_name)

    def _claim(self, tool: str, source_name: str) -> None:
        other = self._source_of_tool.setdefault(tool, source_name)
        if other != source_name:
            raise InputError(
                f"the tool {tool!r} is in both {other} and {source_name}; a model could not tell "
                "them apart",
                "leave one of them out, rename the function if it is yours, or give the MCP "
                "server a prefix",
            )

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of all tools, source by source."""
        return [schema for source in self._sources.values() for schema in source.schemas]

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the schemas that one task is shown, source by source."""
        return [schema for source in self._sources.values() for schema in source.schemas_for(task)]

    @property
    def keeps_state(self) -> bool:
        """Whether any of the sources keeps state."""
        return any(source.keeps_state for source in self._sources.values())

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["_CombinedSession"]:
        """Opens a session of each source, always in the same order."""
        async with AsyncExitStack() as stack:
            sessions = {
                source_name: await stack.enter_async_context(source.session(task))
                for source_name, source in self._sources.items()
            }
            yield _CombinedSession(sessions, self._source_of_tool)


class _CombinedSession:
    """The tools of one rollout, each in the session of its source."""

    def __init__(
        self, sessions: Mapping[str, ToolSession], source_of_tool: Mapping[str, str]
    ) -> None:
        self._sessions, self._source_of_tool = sessions, source_of_tool

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        source_name = self._source_of_tool.get(name)
        if source_name is None:
            tools = ", ".join(self._source_of_tool)
            return error_result(f"unknown tool {name!r}; the tools are: {tools}")
        return await self._sessions[source_name].call(name, arguments)
