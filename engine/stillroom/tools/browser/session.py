"""One rollout's use of the browser: its own cookies and pages, and a deadline for every call."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import anyio
from playwright.async_api import BrowserContext, Locator, Page
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeoutError

from stillroom.tools.browser.addresses import AddressBlockedError, AddressPolicy
from stillroom.tools.browser.chromium import CLOSE_TIMEOUT_S, Chromium
from stillroom.tools.browser.page import (
    REF_ATTRIBUTE,
    Document,
    Element,
    make_document,
    take_snapshot,
)
from stillroom.tools.browser.proxy import BrowseProxy, ProxyAccess, authority_of
from stillroom.tools.browser.text import TextReader
from stillroom.tools.source import ToolResult, error_result

MAX_PAGES = 5
# How long a loaded page may continue to fetch data before it is read anyway.
_SETTLE_MS = 1500.0
# A click may open another page, which the browser announces a little later.
_POPUP_S = 0.15
# How long an element may take to become visible and stable.
_ACTION_MS = 5000.0

_STATE_LOST = (
    "Its pages, cookies and typed text are lost. The browser has been restarted: begin with "
    "browse_open"
)
_CRASHED = "the browser or its page crashed during this call"
_PROXY_STATUSES = frozenset({403, 502, 504})
_NETWORK_ERRORS = {
    "ERR_ABORTED": "it is a download, or the page stopped loading; nothing was downloaded",
    "ERR_TUNNEL_CONNECTION_FAILED": "no connection to its server",
    "ERR_NAME_NOT_RESOLVED": "its host name has no address",
    "ERR_CERT_": "its certificate is not valid",
    "ERR_TOO_MANY_REDIRECTS": "it redirects endlessly",
    "ERR_UNSAFE_PORT": "browsers block its port",
}
_TEXT_KINDS = frozenset(
    {"text", "search", "email", "url", "tel", "password", "number", "date", "time", "month",
     "week", "datetime-local", "color", "range"}
)  # fmt: skip


class SharedBrowser(Protocol):
    """The settings, proxy and browser that all sessions share. BrowseTools implements this."""

    policy: AddressPolicy
    proxy: BrowseProxy
    reader: TextReader
    slots: anyio.Semaphore
    max_chars: int
    nav_timeout_s: float
    call_timeout_s: float

    async def chromium(self) -> Chromium:
        """Returns the running browser, started again if it has ended."""
        ...

    async def discard(self, chromium: Chromium) -> None:
        """Stops a browser that no longer responds."""
        ...


class BrowseSession:
    """Runs the browser tools for one rollout, one call at a time."""

    def __init__(self, shared: SharedBrowser) -> None:
        self._shared = shared
        self._lock = anyio.Lock()
        self._has_slot = False
        self._open: _OpenContext | None = None
        self._actions: dict[str, Callable[..., Awaitable[str]]] = {
            "browse_open": self._open_url,
            "browse_click": self._click,
            "browse_type": self._type,
            "browse_back": self._back,
            "browse_read": self._read,
        }

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool within the deadline of a call. The arguments must be validated already.

        A session's first call waits while too many other sessions have pages open.

        Raises:
            EngineError: the browser has ended and cannot be started again.
        """
        async with self._lock:
            if not self._has_slot:
                await self._shared.slots.acquire()
                self._has_slot = True
            return await self._call(name, arguments)

    async def aclose(self) -> None:
        """Closes the session's pages, so that another session may open pages."""
        with anyio.CancelScope(shield=True):
            await self._close_context()
            if self._has_slot:
                self._has_slot = False
                self._shared.slots.release()

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool.

        If the browser is lost, the result is an error, and the next call opens new pages.
        """
        if self._open is not None and not self._open.chromium.is_alive:
            await self._close_context()
            return error_result(f"the browser crashed since the last call. {_STATE_LOST}")
        try:
            with anyio.fail_after(self._shared.call_timeout_s):
                return ToolResult(content=await self._actions[name](**arguments), is_error=False)
        except (_ActionError, AddressBlockedError) as error:
            return error_result(str(error))
        except TimeoutError:
            problem = f"{name} timed out after {self._shared.call_timeout_s:g} s"
        except _BrowserLostError:
            problem = _CRASHED
        except PlaywrightError as error:
            if self._open is not None and await self._open.is_usable():
                return error_result(f"the browser could not do this: {_first_line(error)}")
            problem = _CRASHED
        await self._close_context()
        return error_result(f"{problem}. {_STATE_LOST}")

    async def _open_url(self, url: str) -> str:
        self._shared.policy.check_url(url)
        opened = await self._get_context()
        page = opened.pages[-1] if opened.pages else await opened.context.new_page()
        opened.access.failures.clear()
        try:
            await page.goto(url, wait_until="domcontentloaded", timeout=self._nav_ms)
        except PlaywrightError as error:
            # A browser that hangs reports a timeout as well, so check whether it still responds.
            if not await opened.is_usable():
                raise _BrowserLostError from error
            if isinstance(error, PlaywrightTimeoutError):
                raise _ActionError(f"the page timed out after {self._nav_s:g} s") from error
            raise _ActionError(f"the page cannot be opened: {opened.reason_for(error)}") from error
        return await self._show(opened)

    async def _click(self, ref: int) -> str:
        opened = self._require_open()
        locator = opened.locate(ref)
        await _act(locator.click(trial=True, timeout=_ACTION_MS), ref)
        await self._act_and_wait(opened, locator.click(timeout=self._nav_ms))
        return await self._show(opened)

    async def _type(self, ref: int, text: str, submit: bool = False) -> str:
        opened = self._require_open()
        locator, kind = opened.locate(ref), opened.element(ref).kind
        if kind == "select":
            await _act(locator.select_option(label=text, timeout=_ACTION_MS), ref)
        elif kind in _TEXT_KINDS:
            await _act(locator.fill(text, timeout=_ACTION_MS), ref)
        else:
            raise _ActionError(f"[{ref}] is a {kind}, not a text field")
        if submit:
            await self._act_and_wait(opened, locator.press("Enter", timeout=self._nav_ms))
        return await self._show(opened)

    async def _back(self) -> str:
        opened = self._require_open()
        page = opened.current
        before = page.url
        opened.access.failures.clear()
        try:
            await page.go_back(wait_until="domcontentloaded", timeout=self._nav_ms)
        except PlaywrightTimeoutError as error:
            raise _ActionError("loading the previous page timed out") from error
        if page.url == before and len(opened.pages) > 1:
            # A link opened this tab, so "back" leads to the tab with the link.
            await page.close()
        elif page.url in (before, "about:blank"):
            await page.go_forward(timeout=_ACTION_MS)
            raise _ActionError("there is no previous page")
        return await self._show(opened)

    async def _read(self, page: int = 1) -> str:
        opened = self._require_open()
        if page == 1 or opened.document is None:
            await self._read_page(opened)
        document = opened.document
        if document is None or not 1 <= page <= document.num_parts:
            num_parts = document.num_parts if document else 1
            raise _ActionError(f"there is no part {page}; this page has {num_parts}")
        return document.render_part(page)

    async def _act_and_wait(self, opened: "_OpenContext", action: Awaitable[Any]) -> None:
        """Performs a click or key press, and waits for the page that it may open."""
        opened.access.failures.clear()
        try:
            await action
        except PlaywrightTimeoutError as error:
            raise _ActionError(
                f"the action was done, but the next page did not load within {self._nav_s:g} s; "
                "browse_read shows the current page"
            ) from error

    async def _show(self, opened: "_OpenContext") -> str:
        """Returns the current page as text for the model, once the page has settled."""
        await anyio.sleep(_POPUP_S)
        for state in ("load", "networkidle"):
            # A page that never stops fetching is read as it is.
            with suppress(PlaywrightTimeoutError):
                await opened.current.wait_for_load_state(state, timeout=_SETTLE_MS)
        await opened.close_oldest_pages()
        return (await self._read_page(opened)).render_part(1)

    async def _read_page(self, opened: "_OpenContext") -> Document:
        """Reads the current page; its first part and its elements are what the model is shown."""
        page = opened.current
        snapshot = await take_snapshot(page)
        reason = opened.access.failures.get(authority_of(snapshot.url))
        if snapshot.url.startswith("chrome-error:"):
            raise _ActionError(f"the page cannot be opened: {opened.last_failure()}")
        if reason and snapshot.status in _PROXY_STATUSES:
            raise _ActionError(f"the page cannot be opened: {reason}")
        main_text = await self._shared.reader.extract_text(snapshot.html, url=snapshot.url)
        opened.shown_page, opened.elements = page, snapshot.elements
        opened.document = make_document(snapshot, main_text, max_chars=self._shared.max_chars)
        return opened.document

    async def _get_context(self) -> "_OpenContext":
        """Returns the session's browser context, opened if necessary."""
        if self._open is None:
            chromium = await self._shared.chromium()
            self._open = await _open_context(chromium, self._shared.proxy)
        return self._open

    def _require_open(self) -> "_OpenContext":
        """Returns the open context. Raises _ActionError if no page is open."""
        if self._open is None or not self._open.pages:
            raise _ActionError("no page is open yet: begin with browse_open")
        return self._open

    async def _close_context(self) -> None:
        """Closes the context, and ends the browser if it does not respond."""
        opened, self._open = self._open, None
        if opened is None:
            return
        with anyio.CancelScope(shield=True):
            if not await opened.aclose():
                await self._shared.discard(opened.chromium)

    @property
    def _nav_s(self) -> float:
        return self._shared.nav_timeout_s

    @property
    def _nav_ms(self) -> float:
        return self._shared.nav_timeout_s * 1000


class _ActionError(Exception):
    """A requested action is not possible; the text is shown to the model."""


class _BrowserLostError(Exception):
    """The browser no longer responds to this session."""


class _OpenContext:
    """A session's browser context, its proxy credential, and the page it showed last."""

    def __init__(
        self,
        chromium: Chromium,
        context: BrowserContext,
        access: ProxyAccess,
        *,
        stack: ExitStack,
    ) -> None:
        self.chromium, self.context, self.access = chromium, context, access
        self._stack = stack
        self._has_crashed = False
        self.elements: list[Element] = []
        self.document: Document | None = None
        self.shown_page: Page | None = None
        """The page to which `elements` belong; None before the first one is shown."""
        context.on("page", self._watch_for_crash)

    @property
    def pages(self) -> list[Page]:
        """The open pages, the oldest first; there are several once a link opens a new one."""
        return [page for page in self.context.pages if not page.is_closed()]

    @property
    def current(self) -> Page:
        """The current page, which is the one that was opened last."""
        pages = self.pages
        if not pages:
            raise _ActionError("the page closed itself: start again with browse_open")
        return pages[-1]

    def element(self, ref: int) -> Element:
        """Returns the element that is listed under a number."""
        if not 1 <= ref <= len(self.elements):
            raise _ActionError(f"there is no element [{ref}]; browse_read lists the elements")
        return self.elements[ref - 1]

    def locate(self, ref: int) -> Locator:
        """Returns Playwright's locator of the element that is listed under a number."""
        self.element(ref)
        if self.shown_page is not self.current:
            raise _ActionError("another page is open now; browse_read shows it")
        return self.current.locator(f'[{REF_ATTRIBUTE}="{ref}"]').first

    async def close_oldest_pages(self) -> None:
        """Closes the oldest pages if more than `MAX_PAGES` are open."""
        for page in self.pages[:-MAX_PAGES]:
            await page.close()

    async def is_usable(self) -> bool:
        """Returns whether the browser still responds to this context."""
        if self._has_crashed:
            return False
        try:
            with anyio.fail_after(CLOSE_TIMEOUT_S):
                await self.context.cookies("http://localhost")
        except (PlaywrightError, TimeoutError):
            return False
        return self.chromium.is_alive

    def reason_for(self, error: PlaywrightError) -> str:
        """Returns the reason why a page did not open, as text for the model."""
        if self.access.failures:
            return self.last_failure()
        texts = (text for code, text in _NETWORK_ERRORS.items() if code in error.message)
        if "Download is starting" in error.message:
            return _NETWORK_ERRORS["ERR_ABORTED"]
        return next(texts, _first_line(error))

    def last_failure(self) -> str:
        """Returns the latest reason why the proxy refused a request."""
        return next(reversed(self.access.failures.values()), "its server did not respond")

    async def aclose(self) -> bool:
        """Closes the context and its pages; returns False if the browser did not respond."""
        self._stack.close()
        with anyio.move_on_after(CLOSE_TIMEOUT_S) as scope, suppress(PlaywrightError):
            await self.context.close()
        return not scope.cancelled_caught

    def _watch_for_crash(self, page: Page) -> None:
        page.on("crash", self._note_crash)

    def _note_crash(self, page: Page) -> None:
        del page
        self._has_crashed = True


async def _open_context(chromium: Chromium, proxy: BrowseProxy) -> _OpenContext:
    """Opens a browser context with its own proxy credential. Raises TimeoutError."""
    with ExitStack() as stack:
        access = stack.enter_context(proxy.open_access())
        # Shielded: a cancelled call would leave a context that nobody closes.
        context: BrowserContext | None = None
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            context = await chromium.new_context(access, proxy.url)
        if context is None:
            raise TimeoutError
        context.set_default_timeout(_ACTION_MS)
        return _OpenContext(chromium, context, access, stack=stack.pop_all())


async def _act(action: Awaitable[Any], ref: int) -> None:
    """Performs an action on an element. Raises _ActionError if the element cannot be used."""
    try:
        await action
    except PlaywrightTimeoutError as error:
        raise _ActionError(
            f"[{ref}] cannot be used: it was removed, is covered, or lacks this option; "
            "browse_read shows the current page"
        ) from error


def _first_line(error: PlaywrightError) -> str:
    return next(iter(error.message.splitlines()), "no reason given")[:200]
