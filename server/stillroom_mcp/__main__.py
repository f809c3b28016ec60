"""The entry point of `stillroom`: a plain `serve` runs the early server, all else the CLI."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_WORKSPACE_FLAG = "--workspace"


def main() -> None:
    """Runs the CLI, except for a plain `serve`, which starts faster without it."""
    folder = _plain_serve_folder(sys.argv[1:])
    if folder is None:
        from stillroom_mcp.cli import main as run_command_line

        run_command_line()
        return
    from stillroom_mcp.early_server import EarlyServer

    EarlyServer(folder).run("stdio")


def _plain_serve_folder(arguments: Sequence[str]) -> Path | None:
    """Returns the workspace of a `serve` that has no option but `--workspace`; otherwise None.

    Invalid options are left to the CLI, which reports them.
    """
    match list(arguments):
        case ["serve"]:
            folder = os.environ.get("STILLROOM_WORKSPACE") or "."
        case ["serve", option] if option.startswith(f"{_WORKSPACE_FLAG}="):
            folder = option.removeprefix(f"{_WORKSPACE_FLAG}=")
        case ["serve", option, name] if option == _WORKSPACE_FLAG:
            folder = name
        case _:
            return None
    return Path(folder) if folder and Path(folder).is_dir() else None


if __name__ == "__main__":
    main()
