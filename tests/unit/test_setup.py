"""The set-up asks whether a browser and an ssh server are there, and hears the truth."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "fakes" / "browser.py"
SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"


def test_where_no_browser_is_the_check_of_the_set_up_fails(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)}

    requested = subprocess.run(
        [sys.executable, CHECK],
        check=False,
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert requested.returncode != 0
    assert "no Chromium" in requested.stderr
    assert "tests/fakes/browser.py" in SETUP.read_text(encoding="utf-8")


@pytest.mark.parametrize(("has_systemd", "installs"), [(False, True), (True, False)])
def test_an_ssh_server_is_installed_only_where_none_would_be_started(
    tmp_path: Path, has_systemd: bool, installs: bool
) -> None:
    text = SETUP.read_text(encoding="utf-8")
    parts = text[text.index("has_sshd()") : text.index("make_venv\nif")]
    there = tmp_path / "systemd"
    if has_systemd:
        there.mkdir()
    program = (
        parts.replace("/run/systemd/system", str(there))
        .replace(":/sbin", "")
        .replace("/usr", "/none")
    )
    program = f'say() {{ echo "$@"; }}\napt_install() {{ echo installs "$@"; }}\n{program}'

    done = subprocess.run(
        ["/bin/sh", "-c", f"{program}\ninstall_sshd"],
        check=True,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ("installs openssh-server" in done.stdout) == installs
    assert "apt-get install openssh-server" in done.stdout
