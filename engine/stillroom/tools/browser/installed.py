"""Which Chromium to start, of those that are installed."""

import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from stillroom.errors import InputError

_SHELLS = ("chromium-headless-shell", "chrome-headless-shell")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC_PATH = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def installed_chromium(playwrights: Path) -> Path:
    """Returns the Chromium to start: a headless shell if there is one, else a whole browser.

    A page in a headless shell takes much less processor time than in a whole browser, as nothing is
    drawn for a window. Of each kind, Playwright's own comes before the system's.

    playwrights: the whole browser that Playwright would have installed, whether it is there or not.
    Raises InputError if there is none.
    """
    known = chain(
        _playwrights_shells(playwrights),
        map(_behind_script, _in_path(_SHELLS)),
        [playwrights],
        _in_path(_BROWSERS),
        [_MAC_PATH],
    )
    if (found := next(filter(Path.is_file, known), None)) is not None:
        return found
    raise InputError(
        "there is no Chromium for the tool `browse`",
        "run `playwright install chromium` in the environment that runs stillroom, or install "
        "Chromium or Chrome",
    )


def _playwrights_shells(playwrights: Path) -> list[Path]:
    """Returns Playwright's headless shell, which lies in a folder beside that of its browser."""
    for folder in playwrights.parents:
        kind, _, revision = folder.name.partition("-")
        if kind == "chromium" and revision:
            beside = folder.with_name(f"chromium_headless_shell-{revision}")
            # Its older versions have the second name.
            return [*beside.glob("*/chrome-headless-shell"), *beside.glob("*/headless_shell")]
    return []


def _in_path(names: Iterable[str]) -> Iterable[Path]:
    return map(Path, filter(None, map(shutil.which, names)))


def _behind_script(path: Path) -> Path:
    """Returns the program that Debian's script of this name starts and does not end with itself."""
    program = path.parents[1] / "lib" / "chromium" / path.name
    return program if program.is_file() else path
