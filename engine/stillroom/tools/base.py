"""What the rollout loop sees of tools, wherever they come from."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from stillroom.types import ToolSchema


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one tool call, as the model will read it."""

    content: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class ToolTask:
    """What tools may know of the task they serve."""

    metadata: dict[str, Any]
    docker: str | None = None
    """The container with the task's MCP server: `local/NAME` or an image."""
    docker_env: dict[str, str] = field(default_factory=dict[str, str])


class ToolSession(Protocol):
    """The tools of one rollout; nothing of it is seen by another rollout."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool within its deadline; a failing tool is a result with `is_error`.

        Raises:
            CallFailedError: the tool could not be run at all.
        """
        ...


class ToolSource(Protocol):
    """A place that tools come from: tools.py, an MCP server, the browser."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """What the model is shown, in a stable order."""
        ...

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the tools that one task can have: all, but for containers of its own."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether a call depends on those before it, so that replies cannot be replayed alone."""
        ...

    def session(self, task: ToolTask) -> AbstractAsyncContextManager[ToolSession]:
        """Opens the tools for one rollout; what costs is started with the first call."""
        ...


def error_result(text: str) -> ToolResult:
    """Returns the result that tells the model what went wrong."""
    return ToolResult(content=f"error: {text}", is_error=True)
