"""The browser on this machine, with the tools of the Playwright MCP server that it stands in for.

Rows with `docker: local/playwright` are written for that server, and models know its tools. Where
there is no container engine they get these: the same names and arguments, over the browser's own.
"""

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stillroom.tools.schema import ArgumentChecker, ArgumentError, tool_schema
from stillroom.tools.source import ToolResult, ToolSession, ToolSource, ToolTask, error_result
from stillroom.types import ToolSchema

_OLDER = ("ref", "target")
"""The argument that names an element in older versions of the server, and its name since."""


def browser_navigate(url: str) -> None:
    """Navigate to a URL and read the page: its text, then its numbered links, buttons and
    fields."""


def browser_navigate_back() -> None:
    """Go back to the previous page and read it."""


def browser_snapshot(page: int = 1) -> None:
    """Read the current page: its text and its numbered elements. Long pages have several parts;
    page is the number of one."""


def browser_click(target: str, element: str = "") -> None:
    """Click an element. target: its number in the latest snapshot; element: what it is, in
    words."""


def browser_type(target: str, text: str, element: str = "", submit: bool = False) -> None:
    """Type text into a field. target: its number in the latest snapshot; submit: press Enter
    after."""


def browser_select_option(target: str, values: list[str], element: str = "") -> None:
    """Select an option in a dropdown. target: its number in the latest snapshot; values: the
    label of the option."""


_TOOLS: tuple[Callable[..., None], ...] = (
    browser_navigate,
    browser_navigate_back,
    browser_snapshot,
    browser_click,
    browser_type,
    browser_select_option,
)
_OURS = {
    "browse_open": "browser_navigate",
    "browse_back": "browser_navigate_back",
    "browse_read": "browser_snapshot",
    "browse_click": "browser_click",
    "browse_type": "browser_type",
}
"""The browser's own tools, which its replies speak of, and those that they stand in for."""
_NAME = re.compile(rf"\b({'|'.join(_OURS)})\b")


class PlaywrightNames(ToolSource):
    """The tools of an open browser under the names of the Playwright MCP server."""

    def __init__(self, browser: ToolSource) -> None:
        self._browser = browser
        self._schemas = [tool_schema(function) for function in _TOOLS]
        self._checkers = {function.__name__: ArgumentChecker(function) for function in _TOOLS}

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the tools that most browsing needs."""
        return self._schemas

    @property
    def keeps_state(self) -> bool:
        """True, since the open page depends on all calls before."""
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator[ToolSession]:
        """Opens a browser context for one rollout."""
        async with self._browser.session(task) as session:
            yield _NamedSession(session, self._checkers)


class _NamedSession:
    """A session of the browser whose calls and replies use the other names."""

    def __init__(self, session: ToolSession, checkers: dict[str, ArgumentChecker]) -> None:
        self._session, self._checkers = session, checkers

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool; what the browser cannot do is an error that names what it can."""
        checker = self._checkers.get(name)
        if checker is None:
            return error_result(
                f"{name} is not offered by the browser on this machine; there are "
                f"{', '.join(self._checkers)}"
            )
        older, now = _OLDER
        given = {now if key == older else key: value for key, value in arguments.items()}
        try:
            checked = checker.check(given)
            own_name, own = _own_call(name, checked)
        except ArgumentError as error:
            return error_result(str(error))
        result = await self._session.call(own_name, own)
        content = _NAME.sub(lambda found: _OURS[found[0]], result.content)
        return ToolResult(content=content, is_error=result.is_error)


def _own_call(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the browser's own tool and arguments for a call. Raises ArgumentError."""
    match name:
        case "browser_navigate":
            return "browse_open", arguments
        case "browser_navigate_back":
            return "browse_back", {}
        case "browser_snapshot":
            return "browse_read", arguments
        case "browser_click":
            return "browse_click", {"ref": _number(arguments["target"])}
        case "browser_type":
            more = {key: arguments[key] for key in ("text", "submit") if key in arguments}
            return "browse_type", {"ref": _number(arguments["target"]), **more}
        case _:
            if len(arguments["values"]) != 1:
                raise ArgumentError("wrong arguments: values: give one option")
            option = arguments["values"][0]
            return "browse_type", {"ref": _number(arguments["target"]), "text": option}


def _number(target: str) -> int:
    found = re.fullmatch(r"\[?(?:ref=)?e?(\d+)\]?", target.strip())
    if found is None:
        raise ArgumentError(f"wrong arguments: target: {target!r} is no number of the snapshot")
    return int(found[1])
