"""The Chromium of the tests, which is the one that the tool `browse` would start."""

from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

from stillroom.tools.browser.chromium import installed_chromium

ARGUMENTS = ("--no-sandbox", "--disable-quic", "--disable-background-networking")


def launch_chromium(playwright: Playwright) -> Browser:
    """Returns a browser: Playwright's own or the system's, a headless shell if there is one."""
    chromium = playwright.chromium
    found = installed_chromium(Path(chromium.executable_path))
    return chromium.launch(executable_path=found, args=list(ARGUMENTS))


def main() -> None:
    """Fails unless a browser can be started; the set-up asks this way whether one is there."""
    with sync_playwright() as playwright:
        launch_chromium(playwright).close()


if __name__ == "__main__":
    main()
