"""Finding a Chromium: Playwright's own, or one the system has."""

import shutil
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

ARGUMENTS = ("--no-sandbox", "--disable-quic", "--disable-background-networking")
_SYSTEM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def launch_chromium(playwright: Playwright) -> Browser:
    """Returns a browser; without Playwright's own it is the system's Chromium."""
    chromium = playwright.chromium
    if Path(chromium.executable_path).is_file():
        return chromium.launch(args=list(ARGUMENTS))
    found = next(filter(None, map(shutil.which, _SYSTEM_NAMES)), None)
    assert found, "no Chromium: run `playwright install chromium`, or apt-get install chromium"
    return chromium.launch(executable_path=found, args=list(ARGUMENTS))


def main() -> None:
    """Fails unless a browser can be started; the set-up asks this way whether one is there."""
    with sync_playwright() as playwright:
        launch_chromium(playwright).close()


if __name__ == "__main__":
    main()
