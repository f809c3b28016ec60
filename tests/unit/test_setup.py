"""The set-up asks whether a browser is there, and hears the truth."""

import os
import subprocess
import sys
from pathlib import Path

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
    )

    assert requested.returncode != 0
    assert "no Chromium" in requested.stderr
    assert "tests/fakes/browser.py" in SETUP.read_text(encoding="utf-8")
