"""One warm child process of the pool that runs a user's tools.py and rewards.py.

It is asyncio's protocol, not anyio's streams: what those do between one line and the next costs
more than the call itself.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import anyio
import msgspec

from stillroom.errors import ToolFileError
from stillroom.settings import tool_environment
from stillroom.tools.user_worker import Answer, Broken, CallReward, CallTool, Ready, kill_family

START_TIMEOUT_S = 60.0
MAX_LINE_BYTES = 64 << 20

_REPLY = msgspec.json.Decoder(Ready | Broken | Answer)


class WorkerDiedError(Exception):
    """The worker's process ended in the middle of a call."""


class Job:
    """A call that waits for a worker, and then for its answer. Made where the loop runs."""

    __slots__ = ("data", "reply", "since", "timeout_s", "worker")

    def __init__(self, call: CallTool | CallReward | None, timeout_s: float) -> None:
        """`call`: None for what a worker says by itself, once it is up."""
        loop = asyncio.get_running_loop()
        self.data = b"" if call is None else msgspec.json.encode(call) + b"\n"
        self.timeout_s = timeout_s
        """How long the worker may take, counted from when it is asked."""
        self.since = loop.time()
        self.reply: asyncio.Future[Ready | Broken | Answer] = loop.create_future()
        """Its exception is a TimeoutError or WorkerDiedError; the worker is of no use then."""
        self.worker: Worker | None = None
        """Who was asked and has not answered."""


class Worker(asyncio.SubprocessProtocol):
    """One child process, and the one call that it runs."""

    def __init__(self) -> None:
        self.ready = Ready(tools=[], rewards=[])
        self.on_free: Callable[[Worker], None] = lambda _worker: None
        """Hears each time that it has answered."""
        self.asked_at = 0.0
        """When it got its latest call, in the loop's time."""
        self._loop = asyncio.get_running_loop()
        self._job: Job | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._transport: asyncio.SubprocessTransport | None = None
        self._calls: asyncio.WriteTransport | None = None
        self._has_ended = False
        self._exited = anyio.Event()

    def ask(self, job: Job) -> None:
        """Sends it a call; it must have none."""
        self._job, job.worker = job, self
        self.asked_at = self._loop.time()
        self._deadline = self._loop.call_later(job.timeout_s, self._fail, TimeoutError())
        if self._has_ended:
            self._end()
        elif self._calls is not None:
            self._calls.write(job.data)

    async def kill(self) -> None:
        """Ends the process and everything it started."""
        self._rest()
        transport = self._transport
        if transport is None:
            return
        if transport.get_returncode() is None:
            kill_family(transport.get_pid())
        else:
            with suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
        await self._exited.wait()
        transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio, as are the others."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._calls = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Takes in a part of an answer, which is one line: none is sent before it is asked for."""
        self._parts.append(data)
        self._num_bytes += len(data)
        if data.endswith(b"\n"):
            self._answer(b"".join(self._parts))
            self._parts, self._num_bytes = [], 0
        elif self._num_bytes > MAX_LINE_BYTES:
            self._fail(WorkerDiedError(f"its answer is longer than {MAX_LINE_BYTES} bytes"))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Learns that the process has ended, or can't be talked to any more."""
        self._has_ended = True
        self._end()

    def process_exited(self) -> None:
        """Learns that nothing is left of the process itself."""
        self._exited.set()

    def _answer(self, line: bytes) -> None:
        job = self._job
        if job is None:
            # What else would come would be taken for the answer to the next call.
            self._has_ended = True
            return
        try:
            reply = _REPLY.decode(line)
        except msgspec.DecodeError as error:
            self._fail(WorkerDiedError(f"its answer can't be read: {error}"))
            return
        self._rest()
        job.worker = None
        if not job.reply.done():
            job.reply.set_result(reply)
        self.on_free(self)

    def _end(self) -> None:
        code = self._transport.get_returncode() if self._transport else None
        detail = "its process ended" if code is None else f"its process ended with code {code}"
        self._fail(WorkerDiedError(detail))

    def _fail(self, error: Exception) -> None:
        """Tells the caller, who sees to it that the process is killed."""
        job = self._job
        self._rest()
        if job is not None and not job.reply.done():
            job.reply.set_exception(error)

    def _rest(self) -> None:
        self._job = None
        if self._deadline is not None:
            self._deadline.cancel()


async def start_worker(command: list[str], folder: Path) -> Worker:
    """Starts a child process and waits until the user's files are loaded in it.

    Raises ToolFileError where that ends the process, hangs, or a file can't be used.
    """
    worker, hello = Worker(), Job(None, START_TIMEOUT_S)
    worker.ask(hello)
    try:
        await asyncio.get_running_loop().subprocess_exec(
            lambda: worker,
            *command,
            cwd=folder,
            env=tool_environment(),
            stderr=None,
            start_new_session=True,
        )
        first = await hello.reply
        if isinstance(first, Broken):
            raise ToolFileError(first.problem, first.fix)
    except (TimeoutError, WorkerDiedError) as error:
        await worker.kill()
        raise ToolFileError(
            f"the process for {command[-1]} did not start: {error or 'it hung'}",
            "run the file with python: importing it must end quickly and without an error",
        ) from error
    except BaseException:
        with anyio.CancelScope(shield=True):
            await worker.kill()
        raise
    worker.ready = cast("Ready", first)
    return worker
