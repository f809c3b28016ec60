"""Runs a program beside an export: llama.cpp's converter, or a server of the written files."""

import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stillroom.errors import RunError
from stillroom.processes import end_process
from stillroom.secrecy.environments import bare_environment

_STOP_S = 10.0


@contextmanager
def running_program(
    command: Sequence[str],
    *,
    log: Path,
    failure: Callable[[Sequence[str], Path, str], RunError],
    cwd: Path | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """Runs a program without the user's keys, whose output goes to `log`; ends it with the block.

    Raises the error that `failure` makes of the command, the log and what happened, if the program
    cannot be started.
    """
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=cwd,
                env=bare_environment(),
            )
        except OSError as error:
            raise failure(command, log, f"could not be started: {error}") from error
        try:
            yield process
        finally:
            end_process(process, grace_s=_STOP_S)
