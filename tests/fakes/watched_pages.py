"""What a browser's page asks for, and what goes wrong in it."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Frame, Page


def watched_page(context: BrowserContext) -> tuple[Page, list[str], list[str]]:
    """A new page, the addresses that it asks for, and what it says on its console or raises."""
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    return page, asked, wrong


def accessibility_faults(page: Page, view: Page | Frame | None = None) -> str:
    """What axe finds wrong with a page, or a frame of it, with the colours of either theme."""
    faults = ""
    for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(view or page, options={"resultTypes": ["violations"], **options})
        faults += found.generate_snapshot()
    return faults
