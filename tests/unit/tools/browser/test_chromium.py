"""Of several Chromiums a headless shell is started, and Playwright's own before the system's."""

from pathlib import Path

import pytest

from stillroom.errors import InputError
from stillroom.tools.browser import chromium
from stillroom.tools.browser.chromium import installed_chromium


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this system's programs, with none so far."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(chromium, "_MAC_PATH", tmp_path / "none")
    return folder


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_headless_shell_comes_before_a_whole_browser(tmp_path: Path, system: Path) -> None:
    playwrights = tmp_path / "ms-playwright/chromium-1255/chrome-linux64/chrome"
    with pytest.raises(InputError, match="no Chromium"):
        installed_chromium(playwrights)
    for better in (system / "google-chrome", playwrights, system / "chromium-headless-shell"):
        program(better)
        assert installed_chromium(playwrights) == better
    # What has this name in Debian's PATH is a script that leaves the browser behind when it ends.
    better = program(tmp_path / "lib/chromium/chromium-headless-shell")
    assert installed_chromium(playwrights) == better


@pytest.mark.parametrize("name", ["chrome-linux64/chrome", "chrome-mac/Chromium.app/C/M/Chromium"])
@pytest.mark.parametrize("shell", ["chrome-linux/headless_shell", "x64/chrome-headless-shell"])
def test_playwrights_shell_of_the_same_revision_is_found(
    tmp_path: Path, system: Path, name: str, shell: str
) -> None:
    program(system / "chromium-headless-shell")
    playwrights = program(tmp_path / "ms-playwright/chromium-1255" / name)
    program(tmp_path / "ms-playwright/chromium_headless_shell-1200" / shell)
    ours = program(tmp_path / "ms-playwright/chromium_headless_shell-1255" / shell)

    assert installed_chromium(playwrights) == ours
