"""A second MCP client, the official inspector's command line, against the server."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stillroom.api import CreateProject, create_project
from stillroom.settings import Workspace

PACKAGES = ("node@22", "@modelcontextprotocol/inspector@2.12.0")

pytestmark = pytest.mark.network


@pytest.fixture(scope="session")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the inspector and the Node it needs; both come from npm."""
    npm = shutil.which("npm")
    assert npm, "npm is needed to fetch the inspector"
    folder = tmp_path_factory.mktemp("inspector")
    command = [npm, "install", "--silent", "--prefix", str(folder), *PACKAGES]
    subprocess.run(command, check=True, timeout=600, cwd=folder)
    return folder


def inspect(inspector: Path, workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    bin_folder = inspector / "node_modules" / "node" / "bin"
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "MCP_CATALOG_PATH": str(inspector / "catalog.json"),
    }
    server = [sys.executable, "-P", "-m", "stillroom_mcp", "serve", "--workspace", str(workspace)]
    return subprocess.run(
        [str(inspector / "node_modules/.bin/mcp-inspector"), "--cli", *server, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=workspace,
    )


def call(inspector: Path, workspace: Path, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    finished = inspect(
        inspector, workspace, "--format", "json", "--method", "tools/call",
        "--tool-name", tool, "--tool-args-json", json.dumps(arguments),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    return answer.get("structuredContent") or answer["result"]["structuredContent"]


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_tools_list_is_clean_in_strict_mode(inspector: Path, tmp_path: Path, era: str) -> None:
    finished = inspect(
        inspector, tmp_path, "--protocol-era", era, "--format", "json", "--method", "tools/list",
        "--strict",
    )  # fmt: skip
    assert finished.returncode == 0
    assert "Warning" not in finished.stderr
    assert "Error" not in finished.stderr


def test_it_completes_an_evaluation_of_the_demo(inspector: Path, tmp_path: Path) -> None:
    create_project(Workspace(tmp_path), CreateProject())
    run = call(
        inspector,
        tmp_path,
        "evaluate_model",
        {
            "model": "demo/student",
            "data": "heldout.jsonl",
            "n": 20,
            "tools": "tools.py",
            "rewards": "rewards.py",
            "max_turns": 5,
            "max_tokens": 48,
        },
    )
    ended = call(inspector, tmp_path, "get_run", {"run_id": run["run_id"], "wait_s": 110})
    assert ended["status"] == "succeeded", ended["error"]
    assert ended["result"]["accuracy"]["n"] == 20
