"""The real Playwright MCP server, installed from npm, about a website on this machine."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fakes.rooms import stay
from fakes.waiting import run_async

pytestmark = [pytest.mark.network, pytest.mark.browser]

NODE = 22


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the server installed, and a Node that is new enough first on the path."""
    npm = shutil.which("npm")
    assert npm, "no npm"
    install = [npm, "install", "--no-save", "--prefix", str(tmp_path), "@playwright/mcp@latest"]
    if _node_version() < NODE:
        install.append(f"node@{NODE}")
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    monkeypatch.setenv("PATH", f"{tmp_path / 'node_modules' / '.bin'}:{os.environ['PATH']}")
    return tmp_path


def _node_version() -> int:
    node = shutil.which("node")
    assert node, "no Node"
    reported = subprocess.run(
        [node, "--version"], check=True, capture_output=True, text=True, timeout=20
    )
    return int(reported.stdout.lstrip("v").partition(".")[0])


def open_room(url: str, _: str) -> tuple[str, dict[str, Any]]:
    return "browser_navigate", {"url": url}


def read(_: str, reply: str) -> tuple[str, dict[str, Any]]:
    assert "### Error" not in reply, reply
    return "browser_snapshot", {}


def type_word(_: str, reply: str) -> tuple[str, dict[str, Any]]:
    found = re.search(r'textbox "Word" \[(?:active\] \[)?ref=(\w+)', reply)
    assert found, reply
    arguments = {"element": "Word", "target": found[1], "text": "kettle", "submit": True}
    return "browser_type", arguments


@pytest.mark.parametrize("port", ["", " --port {port}"], ids=["a server each", "one server"])
def test_many_rollouts_browse_at_once_and_see_nothing_of_each_other(
    port: str, folder: Path
) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "no Chromium: apt-get install chromium"
    server = (
        "npx @playwright/mcp --isolated --headless --no-sandbox "
        f"--executable-path {chromium} --output-dir {folder / 'out'}{port}"
    )
    steps = [open_room, read, type_word, read]

    ended = run_async(lambda: stay(folder, steps, mcp_servers=[server]), within_s=280)

    ended.check()
