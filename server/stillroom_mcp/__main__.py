"""The program `stillroom`: a plain `serve` starts the early server, all else the command line."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_FLAG = "--workspace"


def main() -> None:
    """Runs the command line; a plain `serve` starts without loading it."""
    folder = _plain_serve_folder(sys.argv[1:])
    if folder is None:
        from stillroom_mcp.cli import main as run_command_line

        run_command_line()
        return
    from stillroom_mcp.early_server import EarlyServer

    EarlyServer(folder).run("stdio")


def _plain_serve_folder(given: Sequence[str]) -> Path | None:
    """Returns the folder of `serve`, with no option but `--workspace`; None for anything else.

    Faulty options are left to the command line, which says what to do.
    """
    match list(given):
        case ["serve"]:
            named = os.environ.get("STILLROOM_WORKSPACE") or "."
        case ["serve", option] if option.startswith(f"{_FLAG}="):
            named = option.removeprefix(f"{_FLAG}=")
        case ["serve", option, name] if option == _FLAG:
            named = name
        case _:
            return None
    return Path(named) if named and Path(named).is_dir() else None


if __name__ == "__main__":
    main()
