"""Starts and stops a Chromium together with the Playwright driver that controls it."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import psutil
from playwright.async_api import Browser, BrowserContext, FloatRect, Playwright, async_playwright
from playwright.async_api import Error as PlaywrightError

from stillroom.errors import InputError
from stillroom.processes import kill
from stillroom.secrecy.environments import bare_environment
from stillroom.tools.browser.proxy import ProxyAccess

_LAUNCH_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0

# Chromium gets only these variables, so that no page can read an API key of the user.
_KEPT_VARIABLES = frozenset({"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "FONTCONFIG_PATH", "TZ"})

_SCREENSHOT_WIDTH, _SCREENSHOT_HEIGHT = 1200, 3200

_BLINK_SETTINGS = (
    "primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4,"
    "imagesEnabled=false"
)
# The proxy must be the only way out: Chromium resolves no name itself and sends nothing by UDP.
_ARGUMENTS = (
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--disable-quic",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--dns-prefetch-disable",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-client-side-phishing-detection",
    "--no-pings",
    "--disable-gpu",
    "--js-flags=--max-old-space-size=512",
    # Images are off, as the model reads only text. The last of several --blink-settings wins, so
    # this repeats Playwright's own values.
    f"--blink-settings={_BLINK_SETTINGS}",
)


@dataclass(frozen=True, slots=True)
class ChromiumOptions:
    """The options with which Chromium is started."""

    proxy_url: str
    executable: Path | None = None
    """The browser to start; None for the one that `installed_chromium` returns."""
    sandbox: bool | None = None
    """Whether Chromium's sandbox is on; None means yes, except for root, for whom it does not
    work."""


class Chromium:
    """A running browser, which `aclose` stops with all its processes."""

    def __init__(
        self, playwright: Playwright, browser: Browser, folder: Path, drivers: set[psutil.Process]
    ) -> None:
        self._playwright, self._browser = playwright, browser
        self._folder, self._drivers = folder, drivers
        # Listed now: once the driver has ended, its former children cannot be found.
        self._processes = _process_trees(drivers)

    @classmethod
    async def launch(cls, options: ChromiumOptions) -> Self:
        """Starts a browser. Raises InputError if none is installed or it does not start."""
        folder = Path(tempfile.mkdtemp(prefix="stillroom-browse-"))
        before = _child_drivers()
        playwright: Playwright | None = None
        browser: Browser | None = None
        # Shielded: a cancelled launch would leave processes that nobody ends.
        with anyio.CancelScope(shield=True):
            try:
                with anyio.fail_after(_LAUNCH_TIMEOUT_S):
                    playwright = await async_playwright().start()
                    browser = await _launch(playwright, options, folder)
            except BaseException as error:
                drivers = _child_drivers() - before
                await _stop(playwright, None, _process_trees(drivers) | drivers, folder)
                if isinstance(error, PlaywrightError | TimeoutError):
                    raise _start_error(error) from error
                raise
        assert playwright is not None and browser is not None  # noqa: S101, PT018
        return cls(playwright, browser, folder, _child_drivers() - before)

    @property
    def is_alive(self) -> bool:
        """Whether the browser can still be used; False once it has crashed or been killed."""
        return self._browser.is_connected()

    async def new_context(self, access: ProxyAccess, proxy_url: str) -> BrowserContext:
        """Opens a browser context for one session, with its own cookies, storage and pages."""
        return await self._browser.new_context(
            accept_downloads=False,
            locale="en-US",
            permissions=[],
            proxy={"server": proxy_url, "username": access.username, "password": access.password},
            service_workers="block",
            viewport={"width": 1280, "height": 1600},
        )

    async def screenshot(self, page_file: Path) -> bytes:
        """Returns a screenshot of the top of a local HTML page, as a PNG at 2x resolution."""
        context = await self._browser.new_context(
            java_script_enabled=False,
            device_scale_factor=2,
            viewport={"width": _SCREENSHOT_WIDTH, "height": 900},
        )
        page = await context.new_page()
        await page.goto(page_file.as_uri())
        height = (await page.locator("body").bounding_box() or {"height": 900})["height"]
        clip = {
            "x": 0,
            "y": 0,
            "width": _SCREENSHOT_WIDTH,
            "height": min(height, _SCREENSHOT_HEIGHT),
        }
        return await page.screenshot(full_page=True, clip=FloatRect(**clip))

    async def aclose(self, *, is_hung: bool = False) -> None:
        """Stops the browser and its driver, and kills them if they do not exit.

        A browser that hangs is killed immediately.
        """
        with anyio.CancelScope(shield=True):
            processes = self._processes | _process_trees(self._drivers) | self._drivers
            browser = None if is_hung else self._browser
            await _stop(self._playwright, browser, processes, self._folder)


async def _launch(playwright: Playwright, options: ChromiumOptions, folder: Path) -> Browser:
    """Starts Chromium with its own home folder."""
    executable = options.executable or installed_chromium(Path(playwright.chromium.executable_path))
    environment = {k: v for k, v in bare_environment().items() if k in _KEPT_VARIABLES}
    sandbox = os.geteuid() != 0 if options.sandbox is None else options.sandbox
    return await playwright.chromium.launch(
        executable_path=executable,
        headless=True,
        chromium_sandbox=sandbox,
        args=list(_ARGUMENTS),
        # Keeps Chromium's pop-up blocker on, which Playwright would turn off.
        ignore_default_args=["--disable-popup-blocking"],
        # It sends no credential: the proxy refuses requests outside of a session's context.
        proxy={"server": options.proxy_url},
        env={**environment, "HOME": str(folder), "TMPDIR": str(folder)},
        handle_sigint=False,
        handle_sigterm=False,
        handle_sighup=False,
    )


def _start_error(error: Exception) -> InputError:
    reason = next(iter(str(error).splitlines()), "") or "it timed out"
    fix = "run `playwright install --with-deps chromium`, which also installs what Chromium needs"
    if "sandbox" in str(error).lower():
        fix = "allow user namespaces, which Chromium's sandbox needs (its message is in the log)"
    return InputError(f"Chromium for the tool `browse` failed to start: {reason}", fix)


async def _stop(
    playwright: Playwright | None,
    browser: Browser | None,
    processes: Iterable[psutil.Process],
    folder: Path,
) -> None:
    """Stops a browser and its driver, kills their remaining processes, removes the folder."""
    processes = list(processes)
    drivers = [process for process in processes if _is_driver(process)]
    if browser is not None:
        with anyio.move_on_after(CLOSE_TIMEOUT_S), suppress(PlaywrightError):
            await browser.close()
    # Killed before the driver is stopped, which would wait long for a browser that hangs.
    for process in processes:
        if process not in drivers:
            kill(process)
    if playwright is not None:
        with anyio.move_on_after(CLOSE_TIMEOUT_S), suppress(PlaywrightError):
            await playwright.stop()
    for driver in drivers:
        kill(driver)
    with anyio.move_on_after(CLOSE_TIMEOUT_S):
        while any(map(_is_running, processes)):  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
    await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))


def _child_drivers() -> set[psutil.Process]:
    """Returns the Playwright drivers among this process's children."""
    return {child for child in psutil.Process().children() if _is_driver(child)}


def _is_driver(process: psutil.Process) -> bool:
    try:
        return "run-driver" in process.cmdline()
    except psutil.Error:
        return False


def _process_trees(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Returns all descendants of the processes."""
    children: set[psutil.Process] = set()
    for process in processes:
        # psutil raises if the process has ended, even if another one has its pid by now.
        with suppress(psutil.Error):
            children.update(process.children(recursive=True))
    return children


def _is_running(process: psutil.Process) -> bool:
    try:
        # An ended process may stay listed as a zombie until its new parent has waited for it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


_SHELLS = ("chromium-headless-shell", "chrome-headless-shell")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC_PATH = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def installed_chromium(playwright_path: Path) -> Path:
    """Returns the Chromium to start: a headless shell if there is one, else a whole browser.

    A page in a headless shell takes much less processor time than in a whole browser, as it draws
    no window. Playwright's own comes before the system's of the same kind.

    playwright_path: the path where Playwright installs its whole browser, which may not exist.
    Raises InputError if there is none.
    """
    candidates = chain(
        _headless_shells(playwright_path),
        map(_program_behind_script, _in_path(_SHELLS)),
        [playwright_path],
        _in_path(_BROWSERS),
        [_MAC_PATH],
    )
    if (program := next(filter(Path.is_file, candidates), None)) is not None:
        return program
    raise InputError(
        "no Chromium is installed for the tool `browse`",
        "run `playwright install chromium` in the environment that runs stillroom, or install "
        "Chromium or Chrome",
    )


def _headless_shells(playwright_path: Path) -> list[Path]:
    """Returns Playwright's headless shells, which are in folders next to its browser's."""
    for folder in playwright_path.parents:
        kind, _, revision = folder.name.partition("-")
        if kind == "chromium" and revision:
            sibling = folder.with_name(f"chromium_headless_shell-{revision}")
            # Older versions of the shell have the second name.
            return [*sibling.glob("*/chrome-headless-shell"), *sibling.glob("*/headless_shell")]
    return []


def _in_path(names: Iterable[str]) -> Iterable[Path]:
    return map(Path, filter(None, map(shutil.which, names)))


def _program_behind_script(path: Path) -> Path:
    """Returns the program that Debian's wrapper script starts, which outlives a killed wrapper."""
    program = path.parents[1] / "lib" / "chromium" / path.name
    return program if program.is_file() else path
