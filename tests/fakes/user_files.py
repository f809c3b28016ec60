"""A user's Python files and the processes that run them."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import anyio
import psutil

from fakes.waiting import wait_until

IMPORTS = "from stillroom.tools import RewardArgs, ToolArgs, reward, tool\n"


def write_tools(folder: Path, code: str, *, name: str = "tools.py") -> Path:
    """Writes a file that begins with the imports every user file needs."""
    path = folder / name
    path.write_text(IMPORTS + dedent(code), encoding="utf-8")
    return path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def suspend(pid: int) -> None:
    """Stops a process as a hang would, and returns once it has stopped, which takes a while."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def child_pids() -> set[int]:
    """The processes that this one has started, and theirs.

    Those that stand in for `python -m` are left out: other tests start them at any time.
    """
    pids = set[int]()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(part.endswith("/warm_python.py") for part in child.cmdline()):
                continue
            pids |= {child.pid, *(one.pid for one in child.children(recursive=True))}
    return pids


async def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when what another process does is done; the test's own deadline bounds the wait."""
    while not condition():  # noqa: ASYNC110 - another process sets no event
        await anyio.sleep(0.01)


async def wait_for_end(pid: int) -> None:
    """Returns when a process has ended."""
    await wait_for(lambda: not is_alive(pid))
