"""One warm child process of the pool that runs a user's tools.py and rewards.py.

It is asyncio's protocol, not anyio's streams: what those do between one line and the next costs
more than the call itself. So does waking a process for each call: where calls are quick it has the
next ones before it has answered.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import anyio
import msgspec

from stillroom.errors import ToolFileError
from stillroom.settings import tool_environment
from stillroom.tools.user.quick_calls import AHEAD
from stillroom.tools.user.worker import Answer, Broken, CallReward, CallTool, Ready, kill_family

START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 64 << 20

_STDOUT = 1
_REPLY = msgspec.json.Decoder(Ready | Broken | Answer)


class WorkerDiedError(Exception):
    """The worker's process ended in the middle of a call."""


class Job:
    """A call that waits for a worker, and then for its answer. Made where the loop runs."""

    __slots__ = ("data", "is_quick", "name", "reply", "since", "timeout_s", "worker")

    def __init__(self, call: CallTool | CallReward | None, timeout_s: float) -> None:
        """`call`: None for what a worker says by itself, once it is up."""
        loop = asyncio.get_running_loop()
        self.data = b"" if call is None else msgspec.json.encode(call) + b"\n"
        self.name = "" if call is None else call.name
        self.is_quick = False
        """Whether the calls behind it will hardly have to wait for it."""
        self.timeout_s = timeout_s
        """How long the worker may take, counted from when it can begin."""
        self.since = loop.time()
        self.reply: asyncio.Future[Ready | Broken | Answer] = loop.create_future()
        """Its exception is a TimeoutError or WorkerDiedError; the worker is of no use then."""
        self.worker: Worker | None = None
        """Who was asked, until it has answered and may be asked again."""


class Worker(asyncio.SubprocessProtocol):
    """One child process, the one call that it runs, and those behind it."""

    def __init__(self) -> None:
        self.ready = Ready(tools=[], rewards=[])
        self.on_free: Callable[[], None] = lambda: None
        """Hears each time that it has answered."""
        self.on_end: Callable[[Worker, list[Job]], None] = lambda _worker, _not_begun: None
        """Hears that it must be killed, and, once all is read, which calls it has not begun."""
        self.begun_at = 0.0
        """When it could begin its latest call, in the loop's time."""
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._transport: asyncio.SubprocessTransport | None = None
        self._calls: asyncio.WriteTransport | None = None
        self._takes_calls = True
        self._is_garbled = False
        """Whether what it says can't be told any more from answers to its calls."""
        self._exited = anyio.Event()
        self._ended = anyio.Event()
        """When all that it has said was read."""

    @property
    def num_calls(self) -> int:
        """How many it has not answered."""
        return len(self._jobs)

    def can_take(self, job: Job) -> bool:
        """Returns whether a call would begin at once, or almost."""
        jobs = self._jobs
        if not jobs or not self._takes_calls:
            return self._takes_calls
        return job.is_quick and jobs[-1].is_quick and len(jobs) < AHEAD

    def is_running(self, job: Job) -> bool:
        """Returns whether it has begun with a call and not answered it."""
        return bool(self._jobs) and self._jobs[0] is job

    def ask(self, job: Job) -> None:
        """Sends it a call, which it can take."""
        job.worker = self
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin(job)
        if self._calls is not None:
            self._calls.write(job.data)

    async def kill(self) -> None:
        """Ends the process and everything it started, and reads what it has still answered."""
        self._takes_calls = False
        self._stop_watch()
        transport = self._transport
        if transport is None:
            return
        if transport.get_returncode() is None:
            kill_family(transport.get_pid())
        else:
            with suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
        await self._exited.wait()
        with anyio.move_on_after(_END_TIMEOUT_S):
            await self._ended.wait()
        transport.close()
        self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio, as are the others."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._calls = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Takes in parts of answers, each of them a line."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._answer(b"".join((*self._parts, end)))
            self._parts, self._num_bytes = [], 0
        if rest:
            self._parts.append(rest)
            self._num_bytes += len(rest)
        if self._num_bytes > MAX_LINE_BYTES:
            self._garbled(f"its answer is longer than {MAX_LINE_BYTES} bytes")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Learns that there will be no more answers, or that no more calls can be sent."""
        self._takes_calls = False
        if fd == _STDOUT:
            self._end()

    def process_exited(self) -> None:
        """Learns that the process has ended; what it has answered may still have to be read."""
        self._exited.set()
        if not self._jobs:
            self._condemn(WorkerDiedError("its process ended"))

    def _begin(self, job: Job) -> None:
        self.begun_at = self._loop.time()
        self._deadline = self._loop.call_later(job.timeout_s, self._condemn, TimeoutError())

    def _answer(self, line: bytes) -> None:
        if self._is_garbled:
            return
        try:
            reply = _REPLY.decode(line)
        except msgspec.DecodeError as error:
            self._garbled(f"its answer can't be read: {error}")
            return
        if not self._jobs:
            self._garbled("it answered without being asked")
            return
        job = self._jobs.popleft()
        self._stop_watch()
        if self._jobs:
            self._begin(self._jobs[0])
        if not job.reply.done():
            job.reply.set_result(reply)
        if self._takes_calls:
            job.worker = None
            self.on_free()

    def _garbled(self, problem: str) -> None:
        self._is_garbled = True
        self._condemn(WorkerDiedError(problem))

    def _condemn(self, error: Exception) -> None:
        """Tells the caller of what it runs, and that it must be killed."""
        self._takes_calls = False
        self._stop_watch()
        if self._jobs and not self._jobs[0].reply.done():
            self._jobs[0].reply.set_exception(error)
        self.on_end(self, [])

    def _end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        code = self._transport.get_returncode() if self._transport else None
        detail = "its process ended" if code is None else f"its process ended with code {code}"
        self._condemn(WorkerDiedError(detail))
        not_begun = list(self._jobs)[1:]
        self._jobs.clear()
        self.on_end(self, not_begun)

    def _stop_watch(self) -> None:
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
