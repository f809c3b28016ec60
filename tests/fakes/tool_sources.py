"""A source of tools that says what it was told to."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from stillroom.tools.source import ToolResult, ToolSession, ToolTask
from stillroom.types import ToolSchema


class DictTools:
    """Tools that always give the same result; `opened` and `closed` count the sessions."""

    def __init__(self, results: Mapping[str, str], *, keeps_state: bool = False) -> None:
        self._results = results
        self.keeps_state = keeps_state
        self.opened = self.closed = 0

    @property
    def schemas(self) -> list[ToolSchema]:
        return [
            {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
            for name in self._results
        ]

    def schemas_for(self, task: ToolTask) -> list[ToolSchema]:
        return self.schemas

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator[ToolSession]:
        self.opened += 1
        try:
            yield self
        finally:
            self.closed += 1

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(content=self._results[name], is_error=False)
