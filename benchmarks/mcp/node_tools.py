"""Node >= 22 and packages of npm in the user's cache folder, outside the tree."""

import os
import shutil
import subprocess
from pathlib import Path

OLDEST = 22
FIX = "run `make conformance` once: it fetches Node 22 and the suites from npm"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stillroom" / "npm"


def node_folder(*, is_fetching: bool) -> Path | None:
    """Returns the folder of a Node that is new enough: the system's, else one from npm."""
    own = cache_folder() / "node@22" / "node_modules" / "node" / "bin"
    for node in (shutil.which("node"), str(own / "node")):
        if node is not None and Path(node).exists():
            version = subprocess.run(
                [node, "--version"], capture_output=True, text=True, check=True
            )
            if int(version.stdout.lstrip("v").split(".")[0]) >= OLDEST:
                return Path(node).parent
    return node_folder(is_fetching=False) if is_fetching and _fetched("node@22") else None


def program(package: str, name: str, *, is_fetching: bool) -> Path | None:
    """Returns a program of a package (`name@version`), which is fetched if that is allowed."""
    path = cache_folder() / package.replace("/", "+") / "node_modules" / ".bin" / name
    if path.exists() or (is_fetching and _fetched(package)):
        return path
    return None


def _fetched(package: str) -> bool:
    folder = cache_folder() / package.replace("/", "+")
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(folder),
        package,
    ]
    subprocess.run(command, check=True, cwd=folder, timeout=600)
    return True


def environment(node: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{node}{os.pathsep}{os.environ['PATH']}"}
