"""The program's entry: the server that hosts start, or else the whole command line."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_FLAG = "--workspace"


def main() -> None:
    """Runs the command line; a plain `serve` is begun without loading it."""
    folder = _plainly_served(sys.argv[1:])
    if folder is None:
        from stillroom_mcp.cli import main as run_command_line

        run_command_line()
        return
    import anyio

    from stillroom_mcp.starting.early_server import EarlyServer
    from stillroom_mcp.starting.pipes import run_stdio

    anyio.run(run_stdio, EarlyServer(folder))


def _plainly_served(given: Sequence[str]) -> Path | None:
    """Returns the folder of `serve`, with no option but `--workspace`; None for anything else.

    What is faulty is left to the command line, which says what to do.
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
