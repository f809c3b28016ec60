"""A guard process that kills tool servers when the process that started them is killed.

When the process that started a server is killed, the server's input closes. Most servers then exit
by themselves, but a hung server does not, and its parent can no longer kill it. So a small process
in another process group does.
"""

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Self, cast

import anyio
import anyio.abc
from anyio import AsyncContextManagerMixin
from anyio.abc import ByteSendStream, TaskGroup

from stillroom.processes import kill_family, kill_marked
from stillroom.reporting import background_tasks
from stillroom.secrecy.environments import bare_environment

_END_TIMEOUT_S = 5.0


class Guard(AsyncContextManagerMixin):
    """The guard process and the list of what it watches. Use as an async context manager."""

    def __init__(self) -> None:
        self._process: anyio.abc.Process

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        # In its own session, so that a signal to our process group does not end it.
        self._process = await anyio.open_process(
            [sys.executable, "-P", "-m", "stillroom.tools.guard"],
            env=bare_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                await self._stdin.aclose()
                with anyio.move_on_after(_END_TIMEOUT_S):
                    await self._process.wait()
                await self._process.aclose()

    async def watch(self, pid: int, mark: str) -> None:
        """Registers a process to kill; it leads a process group and its environment has `mark`."""
        await self._send(f"+ {pid} {mark}")

    async def unwatch(self, pid: int, mark: str) -> None:
        """Unregisters a process that has exited, since its pid may be reused."""
        await self._send(f"- {pid} {mark}")

    @property
    def _stdin(self) -> ByteSendStream:
        return cast("ByteSendStream", self._process.stdin)

    async def _send(self, line: str) -> None:
        # Without the guard everything still works, but a hung server may outlive this process.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await self._stdin.send(line.encode() + b"\n")


class Background(AsyncContextManagerMixin):
    """A task group and a guard, for servers that outlive the call that started them.

    Use as an async context manager. The tasks are cancelled at its end.
    """

    def __init__(self) -> None:
        self.group: TaskGroup
        self.guard = Guard()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.guard, background_tasks() as self.group:
            yield self


def main() -> None:
    """Reads which processes to watch from standard input; at its end, kills their process trees.

    Standard input ends when the process that started the servers exits or is killed.
    """
    pids = dict[str, int]()
    for line in sys.stdin:
        sign, pid, mark = line.split()
        if sign == "+":
            pids[mark] = int(pid)
        else:
            pids.pop(mark, None)
    for pid in pids.values():
        kill_family(pid)
    if pids:
        # Some leaders may have ended just before, so that their families could not be listed.
        kill_marked(pids.keys())


if __name__ == "__main__":
    main()
