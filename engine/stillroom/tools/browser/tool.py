"""The built-in tool `browse`: web pages as text, in one Chromium for all rollouts.

Rows with `docker: local/playwright` are written for the Playwright MCP server, and models know its
tools. Without a container engine, the built-in browser offers the same names and arguments.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio import AsyncContextManagerMixin

from stillroom.errors import CallFailedError, EngineError, FailureClass, missing_extra
from stillroom.tools.browser.addresses import AddressPolicy
from stillroom.tools.browser.proxy import BrowseProxy, Dial
from stillroom.tools.browser.text import TextReader
from stillroom.tools.schema import ArgumentChecker, ArgumentError, tool_schema
from stillroom.tools.source import ToolResult, ToolSession, ToolSource, ToolTask, error_result
from stillroom.types import ToolSchema

if TYPE_CHECKING:
    from stillroom.tools.browser.chromium import Chromium
    from stillroom.tools.browser.session import BrowseSession


def browse_open(url: str) -> None:
    """Open a web page by its full URL and read it: its text, then its numbered links, buttons and
    fields."""


def browse_click(ref: int) -> None:
    """Click the link or button with this number in the latest list, and read the resulting page."""


def browse_type(ref: int, text: str, submit: bool = False) -> None:
    """Replace the text of the field with this number, or choose an option of a select by its label;
    with submit, then press Enter. Shows the resulting page."""


def browse_back() -> None:
    """Go back to the previous page and read it."""


def browse_read(page: int = 1) -> None:
    """Read one part of the current page; long pages have several. Part 1 reads the page again."""


_TOOLS: tuple[Callable[..., None], ...] = (
    browse_open,
    browse_click,
    browse_type,
    browse_back,
    browse_read,
)


def _checkers(tools: Iterable[Callable[..., None]]) -> dict[str, ArgumentChecker]:
    return {function.__name__: ArgumentChecker(function) for function in tools}


class BrowseTools(ToolSource, AsyncContextManagerMixin):
    """The tool source `browse`. Use as an async context manager; Chromium runs while it is open.

    allow: addresses that may be reached in addition to the public web, as AddressPolicy takes them.
    max_contexts: the maximum number of sessions with open pages; the others wait. max_chars: the
    maximum length of a reply's text and list of elements together. nav_timeout_s: the time limit of
    a page load. call_timeout_s: the time limit of a call, which must exceed nav_timeout_s. A call
    that times out loses the session's pages. executable, sandbox: see ChromiumOptions. dial:
    connects to an address that passed all checks; tests give one that records the addresses.
    """

    def __init__(
        self,
        *,
        allow: Iterable[str] = (),
        max_contexts: int = 20,
        max_chars: int = 12_000,
        nav_timeout_s: float = 20.0,
        call_timeout_s: float = 60.0,
        executable: Path | None = None,
        sandbox: bool | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.policy = AddressPolicy(allow)
        self.proxy = BrowseProxy(self.policy, dial=dial)
        self.reader = TextReader()
        self.slots = anyio.Semaphore(max_contexts)
        self.max_chars = max_chars
        self.nav_timeout_s, self.call_timeout_s = nav_timeout_s, call_timeout_s
        self._executable, self._sandbox = executable, sandbox
        self._schemas = [tool_schema(function) for function in _TOOLS]
        self._checkers = _checkers(_TOOLS)
        self._launching = anyio.Lock()
        self._chromium: Chromium | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        if not (find_spec("playwright") and find_spec("trafilatura")):
            raise missing_extra("browse", "the tool `browse`")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.proxy)
            await stack.enter_async_context(self.reader)
            stack.push_async_callback(self._end_chromium)
            # Started now and not with the first call, so that a missing browser costs no tokens.
            await self.chromium()
            yield self

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the five browse tools."""
        return self._schemas

    @property
    def keeps_state(self) -> bool:
        """True, since the open page depends on all earlier calls."""
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator[ToolSession]:
        """Opens a browser context for one rollout; its first page opens with the first call."""
        from stillroom.tools.browser.session import BrowseSession

        del task
        session = BrowseSession(self)
        try:
            yield _CheckedSession(self._checkers, partial(_call_browser, session))
        finally:
            await session.aclose()

    async def chromium(self) -> "Chromium":
        """Returns the running browser, started again if it has ended."""
        from stillroom.tools.browser.chromium import Chromium, ChromiumOptions

        async with self._launching:
            if self._chromium is None or not self._chromium.is_alive:
                await self._end_chromium()
                options = ChromiumOptions(self.proxy.url, self._executable, self._sandbox)
                self._chromium = await Chromium.launch(options)
            return self._chromium

    async def discard(self, chromium: "Chromium") -> None:
        """Stops a browser that no longer responds; the next call starts another one."""
        async with self._launching:
            if self._chromium is chromium:
                await self._end_chromium(is_hung=True)

    async def _end_chromium(self, *, is_hung: bool = False) -> None:
        chromium, self._chromium = self._chromium, None
        if chromium is not None:
            await chromium.aclose(is_hung=is_hung)


@dataclass(frozen=True, slots=True)
class _CheckedSession:
    """A session that checks the arguments of each call before it runs the call."""

    checkers: dict[str, ArgumentChecker]
    run: Callable[[str, dict[str, Any]], Awaitable[ToolResult]]
    """Runs a tool with checked arguments. Raises ArgumentError."""
    new_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The current names of arguments by their former names."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool; an unknown tool is an error result that lists the known ones."""
        checker = self.checkers.get(name)
        if checker is None:
            return error_result(
                f"{name} is not offered by the browser on this machine; its tools are "
                f"{', '.join(self.checkers)}"
            )
        renamed = {self.new_names.get(key, key): value for key, value in arguments.items()}
        try:
            return await self.run(name, checker.check(renamed))
        except ArgumentError as error:
            return error_result(str(error))


async def _call_browser(
    session: "BrowseSession", name: str, arguments: dict[str, Any]
) -> ToolResult:
    """Runs one tool. Raises CallFailedError if the browser cannot be restarted."""
    try:
        return await session.call(name, arguments)
    except EngineError as error:
        problem = f"the browser exited and could not be restarted: {error.problem}"
        raise CallFailedError(FailureClass.TOOL_HOST, problem) from error


_NEW_NAMES = {"ref": "target"}
"""The former and the current name of the argument that identifies an element."""


def browser_navigate(url: str) -> None:
    """Navigate to a URL and read the page: its text, then its numbered links, buttons and
    fields."""


def browser_navigate_back() -> None:
    """Go back to the previous page and read it."""


def browser_snapshot(page: int = 1) -> None:
    """Read the current page: its text and its numbered elements. Long pages have several parts;
    page is the part's number."""


def browser_click(target: str, element: str = "") -> None:
    """Click an element. target: its number in the latest snapshot; element: what it is, in
    words."""


def browser_type(target: str, text: str, element: str = "", submit: bool = False) -> None:
    """Type text into a field. target: its number in the latest snapshot; submit: press Enter
    after."""


def browser_select_option(target: str, values: list[str], element: str = "") -> None:
    """Select an option in a dropdown. target: its number in the latest snapshot; values: the
    label of the option."""


_PLAYWRIGHT_TOOLS: tuple[Callable[..., None], ...] = (
    browser_navigate,
    browser_navigate_back,
    browser_snapshot,
    browser_click,
    browser_type,
    browser_select_option,
)
_PLAYWRIGHT_NAMES = {
    "browse_open": "browser_navigate",
    "browse_back": "browser_navigate_back",
    "browse_read": "browser_snapshot",
    "browse_click": "browser_click",
    "browse_type": "browser_type",
}
"""The browser's own tool names, which its replies mention, and the server's names for them."""
_NAME = re.compile(rf"\b({'|'.join(_PLAYWRIGHT_NAMES)})\b")


class PlaywrightNames(ToolSource):
    """The tools of an open browser under the names of the Playwright MCP server."""

    def __init__(self, browser: ToolSource) -> None:
        self._browser = browser
        self._schemas = [tool_schema(function) for function in _PLAYWRIGHT_TOOLS]
        self._checkers = _checkers(_PLAYWRIGHT_TOOLS)

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the tools that most browsing needs."""
        return self._schemas

    @property
    def keeps_state(self) -> bool:
        """True, since the open page depends on all earlier calls."""
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator[ToolSession]:
        """Opens a browser context for one rollout."""
        async with self._browser.session(task) as session:
            run = partial(_call_browse_tool, session)
            yield _CheckedSession(self._checkers, run, _NEW_NAMES)


async def _call_browse_tool(
    session: ToolSession, name: str, arguments: dict[str, Any]
) -> ToolResult:
    """Runs the browse tool for a Playwright tool's call; its result has Playwright's names."""
    browse_name, browse_arguments = _browse_call(name, arguments)
    result = await session.call(browse_name, browse_arguments)
    content = _NAME.sub(lambda match: _PLAYWRIGHT_NAMES[match[0]], result.content)
    return ToolResult(content=content, is_error=result.is_error)


def _browse_call(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the browse tool and its arguments for a Playwright tool. Raises ArgumentError."""
    match name:
        case "browser_navigate":
            return "browse_open", arguments
        case "browser_navigate_back":
            return "browse_back", {}
        case "browser_snapshot":
            return "browse_read", arguments
        case "browser_click":
            return "browse_click", {"ref": _element_number(arguments["target"])}
        case "browser_type":
            more = {key: arguments[key] for key in ("text", "submit") if key in arguments}
            return "browse_type", {"ref": _element_number(arguments["target"]), **more}
        case _:
            if len(arguments["values"]) != 1:
                raise ArgumentError("wrong arguments: values: give one option")
            option = arguments["values"][0]
            return "browse_type", {"ref": _element_number(arguments["target"]), "text": option}


def _element_number(target: str) -> int:
    """Returns the number in a target such as "3", "[3]" or "e3". Raises ArgumentError."""
    match = re.fullmatch(r"\[?(?:ref=)?e?(\d+)\]?", target.strip())
    if match is None:
        raise ArgumentError(f"wrong arguments: target: {target!r} is not a number of the snapshot")
    return int(match[1])
