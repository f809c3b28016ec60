"""Serves a server over standard input and output without a thread for each line.

The library reads each line and writes each answer in a thread of its own, which takes longer than a
small call. Pipes and sockets, which are what hosts start servers with, need none.
"""

import contextlib
import os
import select
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server

_READ_BYTES = 1 << 16
# A pipe that can be written takes so many bytes at once without blocking.
_AT_ONCE = getattr(select, "PIPE_BUF", 512)


async def run_stdio(server: MCPServer[Any]) -> None:
    """Runs a server over standard input and output until its client closes the input."""
    low = server._lowlevel_server  # pyright: ignore[reportPrivateUsage]
    with _claimed() as pipes:
        if pipes is None:
            await server.run_stdio_async()
            return
        lines, answers = pipes
        # They have the few methods of the files that the library opens itself.
        async with stdio_server(cast("Any", lines), cast("Any", answers)) as (reading, writing):
            await low.run(reading, writing, low.create_initialization_options())


@contextmanager
def _claimed() -> "Generator[tuple[_Lines, _Answers] | None]":
    """Takes standard input and output over; yields None if they cannot be waited for.

    Meanwhile descriptor 0 reads nothing and descriptor 1 is standard error, so that a stray print
    or a child process cannot break an answer.
    """
    if not (_can_be_waited_for(0) and _can_be_waited_for(1)):
        yield None
        return
    sys.stdout.flush()
    reading, writing, empty = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    try:
        yield _Lines(reading), _Answers(writing)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        os.close(reading)
        os.close(writing)


def _can_be_waited_for(descriptor: int) -> bool:
    """Returns whether a descriptor is a pipe or a socket; a file is always ready."""
    if sys.platform == "win32":
        return False
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class _Lines:
    """The lines of a pipe, decoded."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest, self._ready = descriptor, bytearray(), list[bytes]()
        self._has_ended = False

    def __aiter__(self) -> "_Lines":
        return self

    async def __anext__(self) -> str:
        while not self._ready:
            if self._has_ended:
                raise StopAsyncIteration
            await anyio.wait_readable(self._descriptor)
            self._take(os.read(self._descriptor, _READ_BYTES))
        return self._ready.pop().decode("utf-8", errors="replace")

    def _take(self, data: bytes) -> None:
        if not data:
            self._has_ended = True
            last = [bytes(self._rest)] if self._rest else []
            self._ready, self._rest = last, bytearray()
            return
        end = data.rfind(b"\n") + 1
        if end:
            whole = bytes(self._rest) + data[: end - 1]
            self._ready = whole.split(b"\n")[::-1]
            self._rest = bytearray()
        self._rest += data[end:]


class _Answers:
    """Writes whole texts to a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def write(self, text: str) -> None:
        """Writes a text. Raises OSError if nobody reads any more."""
        data = memoryview(text.encode())
        while data:
            if not select.select([], [self._descriptor], [], 0)[1]:
                await anyio.wait_writable(self._descriptor)
            data = data[os.write(self._descriptor, data[:_AT_ONCE]) :]

    async def flush(self) -> None:
        """Does nothing: what is written has gone out."""
