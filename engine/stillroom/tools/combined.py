"""Several sources of tools as one."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from stillroom.errors import InputError
from stillroom.tools.base import ToolResult, ToolSession, ToolSource, ToolTask, error_result
from stillroom.types import ToolSchema


class CombinedTools:
    """The tools of several sources, which are open already and stay their owner's to close."""

    def __init__(self, sources: Mapping[str, ToolSource]) -> None:
        """`sources`: each under the name that messages give it, e.g. the path of tools.py.

        Raises:
            InputError: two of them have a tool of the same name.
        """
        self._sources = dict(sources)
        self._owners: dict[str, str] = {}
        for owner, source in self._sources.items():
            for schema in source.schemas:
                self._claim(schema["function"]["name"], owner)

    def _claim(self, tool: str, owner: str) -> None:
        other = self._owners.setdefault(tool, owner)
        if other != owner:
            raise InputError(
                f"the tool {tool!r} is in both {other} and {owner}; a model could not tell them "
                "apart",
                "leave one of them out, rename the function if it is yours, or give the MCP "
                "server a prefix",
            )

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """All tools, source by source."""
        return [schema for source in self._sources.values() for schema in source.schemas]

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the tools that one task can have, source by source."""
        return [schema for source in self._sources.values() for schema in source.schemas_for(task)]

    @property
    def keeps_state(self) -> bool:
        """Whether any of the sources does."""
        return any(source.keeps_state for source in self._sources.values())

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["CombinedSession"]:
        """Opens a session of each source, always in one order; they start with their first call."""
        async with AsyncExitStack() as stack:
            sessions = {
                owner: await stack.enter_async_context(source.session(task))
                for owner, source in self._sources.items()
            }
            yield CombinedSession(sessions, self._owners)


class CombinedSession:
    """The tools of one rollout, each in the session of its source."""

    def __init__(self, sessions: Mapping[str, ToolSession], owners: Mapping[str, str]) -> None:
        self._sessions, self._owners = sessions, owners

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool where it comes from."""
        owner = self._owners.get(name)
        if owner is None:
            return error_result(f"unknown tool {name!r}; the tools are: {', '.join(self._owners)}")
        return await self._sessions[owner].call(name, arguments)
