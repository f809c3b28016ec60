"""What the rollout loop sees of tools, wherever they come from."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from stillroom.types import ToolSchema


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one tool call, as the model will read it."""

    content: str
    is_error: bool


class ToolSource(Protocol):
    """A set of tools that can be called."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """What the model is shown, in a stable order."""
        ...

    async def call(
        self, name: str, arguments: dict[str, Any], *, metadata: dict[str, Any]
    ) -> ToolResult:
        """Runs one tool within its deadline; a failing tool is a result with `is_error`.

        Raises:
            CallFailedError: the tool could not be run at all.
        """
        ...


def error_result(text: str) -> ToolResult:
    """Returns the result that tells the model what went wrong."""
    return ToolResult(content=f"error: {text}", is_error=True)
