"""The interface between the rollout loop and all kinds of tools.

A ToolSource opens one ToolSession for each rollout, and a session runs the rollout's tool calls.
Each kind of source handles a call that times out in its own way:

- tools.py: UserPool.call in tools/user/pool.py; the worker's process is killed.
- MCP servers and containers: Connection.call in tools/mcp/connection.py; the session is closed.
- the browser: BrowseSession.call in tools/browser/session.py; the session's pages are closed.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from stillroom.errors import CallFailedError, InputError
from stillroom.secrecy.redaction import Redactor
from stillroom.types import ToolSchema


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one tool call: the text for the model, and whether it is an error."""

    content: str
    is_error: bool
    is_none: bool = False
    """Whether a tool of tools.py returned None."""


@dataclass(frozen=True, slots=True)
class ToolTask:
    """The part of a task that its tools may see."""

    metadata: dict[str, Any]
    docker: str | None = None
    """The image with the task's MCP server, or `local/NAME` for Dockerfile.NAME; None if none."""
    docker_env: dict[str, str] = field(default_factory=dict[str, str])


class ToolSession(Protocol):
    """The tools of one rollout, whose state no other rollout shares."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool within its deadline; if the tool fails, the result has `is_error`.

        Raises:
            CallFailedError: the tool could not be run at all.
        """
        ...


class ToolSource(Protocol):
    """A source of tools: tools.py, an MCP server, containers, or the browser."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The tool schemas for the model, in a stable order."""
        ...

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the tool schemas for one task.

        Only the tools of containers depend on the task.
        """
        return self.schemas

    @property
    def keeps_state(self) -> bool:
        """Whether a call depends on earlier calls, so that one recorded reply cannot replace it."""
        ...

    def session(self, task: ToolTask) -> AbstractAsyncContextManager[ToolSession]:
        """Opens the tools of one rollout; its processes and pages start with the first call."""
        ...


def error_result(text: str) -> ToolResult:
    """Returns an error result with a text for the model."""
    return ToolResult(content=f"error: {text}", is_error=True)


@dataclass(frozen=True, slots=True)
class RedactedTools(ToolSource):
    """Tools with the run's secrets removed from their schemas and results.

    A tool may read a key from a file, or echo one from its command line. The key is removed before
    the text reaches the model's context, the journal and the rows.
    """

    source: ToolSource
    redactor: Redactor

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the source's tools."""
        return self.redactor.redact_value(list(self.source.schemas))

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the schemas that the model is shown for one task."""
        return self.redactor.redact_value(list(self.source.schemas_for(task)))

    @property
    def keeps_state(self) -> bool:
        """Whether the source keeps state."""
        return self.source.keeps_state

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator[ToolSession]:
        """Opens the tools of one rollout."""
        async with self.source.session(task) as session:
            yield _RedactedSession(session, self.redactor)


@dataclass(frozen=True, slots=True)
class _RedactedSession:
    session: ToolSession
    redactor: Redactor

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            result = await self.session.call(name, arguments)
        except CallFailedError as error:
            raise CallFailedError(error.kind, self.redactor.redact_text(error.message)) from error
        content = self.redactor.redact_text(result.content)
        return (
            result
            if content is result.content
            else msgspec.structs.replace(result, content=content)
        )


class CombinedTools(ToolSource):
    """The tools of several sources as one source. The caller opens and closes the sources."""

    def __init__(self, sources: Mapping[str, ToolSource]) -> None:
        """`sources` holds each source by its name in messages, e.g. the path of tools.py.

        Raises:
            InputError: two of them have a tool of the same name.
        """
        self._sources = dict(sources)
        self._source_of_tool: dict[str, str] = {}
        for source_name, source in self._sources.items():
            for schema in source.schemas:
                self._register(schema["function"]["name"], source_name)

    def _register(self, tool: str, source_name: str) -> None:
        other = self._source_of_tool.setdefault(tool, source_name)
        if other != source_name:
            raise InputError(
                f"the tool name {tool!r} is used by both {other} and {source_name}",
                "remove one of the two tools, or rename the function in tools.py",
            )

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of all tools, source by source."""
        return [schema for source in self._sources.values() for schema in source.schemas]

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the schemas that the model is shown for one task, source by source."""
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
