"""What a browser's page asks for, and what goes wrong in it."""

from playwright.sync_api import BrowserContext, Page


def watched_page(context: BrowserContext) -> tuple[Page, list[str], list[str]]:
    """A new page, the addresses that it asks for, and what it says on its console or raises."""
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    return page, asked, wrong
