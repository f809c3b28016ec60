"""Writes dist/stillroom-VERSION.mcpb, the bundle that desktop hosts install with a click.

Such a host starts the server through uv, which fetches the release of that version.
Usage: .venv/bin/python scripts/package/bundle.py [FOLDER]
"""

import json
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from stillroom import __version__
from stillroom.api import OPERATIONS

ROOT = Path(__file__).parents[2]
_DATE = (2026, 1, 1, 0, 0, 0)


def manifest() -> dict[str, Any]:
    """Returns the bundle's manifest, made from pyproject.toml and the table of operations."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    start = ["run", "--directory", "${__dirname}", "stillroom", "serve"]
    return {
        "manifest_version": "0.4",
        "name": project["name"],
        "display_name": "Stillroom",
        "version": __version__,
        "description": project["description"],
        "author": {"name": "Stillroom"},
        "license": project["license"],
        "keywords": project["keywords"],
        "server": {
            "type": "uv",
            "entry_point": "server.py",
            "mcp_config": {
                "command": "uv",
                "args": [*start, "--workspace", "${user_config.project}"],
            },
        },
        "tools": [{"name": o.name, "description": o.description} for o in OPERATIONS],
        "user_config": {
            "project": {
                "type": "directory",
                "title": "Project folder",
                "description": "Everything is written inside this folder. Keys belong into its "
                ".env file.",
                "required": True,
            }
        },
        "compatibility": {
            "platforms": ["darwin", "linux"],
            "runtimes": {"python": project["requires-python"]},
        },
    }


def files() -> dict[str, str]:
    """Returns the bundle's files by their names."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "requires-python"
    ]
    return {
        "manifest.json": json.dumps(manifest(), indent=2, ensure_ascii=False) + "\n",
        "pyproject.toml": (
            f'[project]\nname = "stillroom-bundle"\nversion = "{__version__}"\n'
            f'requires-python = "{requires}"\ndependencies = ["stillroom=={__version__}"]\n'
        ),
        "server.py": "from stillroom_mcp.cli import main\n\nmain()\n",
        "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
    }


def write_bundle(folder: Path) -> Path:
    """Writes the bundle, with the same bytes for the same sources, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stillroom-{__version__}.mcpb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in files().items():
            bundle.writestr(zipfile.ZipInfo(name, _DATE), text)
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{write_bundle(Path(*sys.argv[1:2] or ['dist']))}\n")
