"""How a stdio server's process is ended."""

import io
import os
import subprocess
import sys
from typing import Any, cast

import anyio
import anyio.abc

from fakes.waiting import run_async
from stillroom.processes import end_process
from stillroom.tools.mcp.server_process import ServerOutput, _stop


class _EndedServer:
    """A server's process that has ended; the system has given its number to another process."""

    returncode = 0

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = anyio.wrap_file(io.BytesIO())

    async def aclose(self) -> None:
        """Has nothing to close."""


def test_a_process_that_got_the_number_of_an_ended_server_lives_on() -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    async def main() -> None:
        server = cast("anyio.abc.Process", cast("Any", _EndedServer(other.pid)))
        await _stop(server, ServerOutput(), "a mark of no process", grace_s=0)

    try:
        run_async(main)
        assert os.getpgid(other.pid) == other.pid
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(20) == 0
    finally:
        end_process(other)
