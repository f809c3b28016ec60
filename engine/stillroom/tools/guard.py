"""A process that ends tool servers when the process that started them was killed.

A server ends by itself when its input closes, unless it hangs; a killed process can't see to it.
"""

import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Self, cast

import anyio
import anyio.abc
import psutil
from anyio.abc import ByteSendStream

from stillroom.tools.user.worker import kill_family

END_TIMEOUT_S = 5.0
MARK = "STILLROOM_SESSION"
"""The environment variable by which a server's processes are known after it has died."""


class Guard:
    """Watches over processes; use as an async context manager."""

    def __init__(self) -> None:
        self._process: anyio.abc.Process

    async def __aenter__(self) -> Self:
        # In a session of its own: it must outlive what ends the rest of our process group.
        self._process = await anyio.open_process(
            [sys.executable, "-P", "-m", "stillroom.tools.guard"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._stdin.aclose()
            with anyio.move_on_after(END_TIMEOUT_S):
                await self._process.wait()
            await self._process.aclose()

    async def watch(self, pid: int, mark: str) -> None:
        """Takes in a process that leads a group, and was started with a mark."""
        await self._tell(f"+ {pid} {mark}")

    async def forget(self, pid: int, mark: str) -> None:
        """Lets go of a process that has ended; its number may be another one's soon."""
        await self._tell(f"- {pid} {mark}")

    @property
    def _stdin(self) -> ByteSendStream:
        return cast("ByteSendStream", self._process.stdin)

    async def _tell(self, word: str) -> None:
        # Without it everything works; only a kill of ours may leave a hung server behind.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await self._stdin.send(word.encode() + b"\n")


def kill_marked(marks: Collection[str]) -> None:
    """Kills the processes that were started, by whomever, with one of the marks."""
    for process in psutil.process_iter():
        # It has ended, or is another user's.
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) in marks:
                process.kill()


def main() -> None:
    """Reads which processes to watch, and kills them with their families once nobody writes."""
    watched = dict[str, int]()
    for line in sys.stdin:
        sign, pid, mark = line.split()
        if sign == "+":
            watched[mark] = int(pid)
        else:
            watched.pop(mark, None)
    for pid in watched.values():
        kill_family(pid)
    if watched:
        # Some may have ended with our pipe, before their families could be seen.
        kill_marked(watched.keys())


if __name__ == "__main__":
    main()
