"""The parent's side of one worker: its process, the calls that it was sent, and their deadlines.

It is an asyncio protocol, since anyio's streams spend more time between two lines than a quick call
takes. Waking a process for each call takes as long, so a worker whose calls are quick is sent the
next ones before it has answered.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import anyio
import msgspec

from stillroom.errors import ToolFileError
from stillroom.processes import kill_family
from stillroom.secrecy.environments import tool_environment
from stillroom.tools.user.worker import Answer, Broken, CallReward, CallTool, Ready, UserFiles

MAX_LINE_BYTES = 64 << 20
QUICK_S = 0.005
SLOW_S = 0.05
MAX_CALLS_SENT = 8
"""The most quick calls that a worker may have been sent without having answered them."""
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_NUM_QUICK_TO_TRUST = 8
_NUM_QUICK_AFTER_SLOW = 1000

_STDOUT = 1
# -P keeps the user's folder off the path, where their json.py would shadow the library's.
_COMMAND = (sys.executable, "-P", "-m", "stillroom.tools.user.worker")
_REPLY = msgspec.json.Decoder(Ready | Broken | Answer)


class WorkerDiedError(Exception):
    """The worker's process ended in the middle of a call."""


class QuickFunctions:
    """The names of the user's functions that answer at once, judged by their latest answers.

    After one slow call, or one without an answer, a function counts as slow for many calls.
    """

    def __init__(self) -> None:
        self._num_quick: dict[str, int] = {}
        """The number of quick answers in a row, by function; negative after a slow one."""

    def __contains__(self, name: str) -> bool:
        return self._num_quick.get(name, 0) >= _NUM_QUICK_TO_TRUST

    def note(self, name: str, seconds: float) -> None:
        """Records the seconds that a call took; inf for a call without an answer."""
        num_quick = self._num_quick.get(name, 0)
        if seconds < QUICK_S:
            self._num_quick[name] = num_quick + 1
        else:
            self._num_quick[name] = min(
                num_quick, 0 if seconds < SLOW_S else -_NUM_QUICK_AFTER_SLOW
            )


class WorkerCall:
    """A call that waits for a worker, and then for its answer.

    It must be created while the event loop runs.
    """

    __slots__ = ("data", "is_quick", "name", "reply", "since", "timeout_s", "worker")

    def __init__(self, call: CallTool | CallReward | None, timeout_s: float) -> None:
        """`call` is None for the first line, which a worker writes without being called."""
        loop = asyncio.get_running_loop()
        self.data = b"" if call is None else msgspec.json.encode(call) + b"\n"
        self.name = "" if call is None else call.name
        self.is_quick = False
        """Whether calls behind this one will hardly have to wait for it."""
        self.timeout_s = timeout_s
        """The time that the worker may take, counted from when it can begin the call."""
        self.since = loop.time()
        self.reply: asyncio.Future[Ready | Broken | Answer] = loop.create_future()
        """The answer; if it is a TimeoutError or WorkerDiedError, the worker must be killed."""
        self.worker: WorkerProcess | None = None
        """The worker that was sent the call; None before, and once it has answered and is free."""


class WorkerProcess(asyncio.SubprocessProtocol):
    """One child process, the call that it runs, and the calls sent behind that one."""

    def __init__(self) -> None:
        self.ready = Ready(tools=[], rewards=[])
        self.on_free: Callable[[], None] = lambda: None
        """Called each time the worker has answered a call."""
        self.on_end: Callable[[WorkerProcess, list[WorkerCall]], None] = lambda _worker, _calls: (
            None
        )
        """Called when the worker must be killed, and at its end with the calls it has not begun.

        Before the end the list of calls is empty.
        """
        self.begun_at = 0.0
        """The time, by the loop's clock, when the worker could begin its latest call."""
        self._loop = asyncio.get_running_loop()
        self._calls: deque[WorkerCall] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._line_parts: list[bytes] = []
        self._num_line_bytes = 0
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._takes_calls = True
        self._is_garbled = False
        """Whether its output can no longer be matched with its calls."""
        self._exited = anyio.Event()
        self._ended = anyio.Event()
        """Set once all output of the process has been read."""

    @property
    def num_calls(self) -> int:
        """The number of calls that the worker was sent and has not answered."""
        return len(self._calls)

    def can_take(self, call: WorkerCall) -> bool:
        """Returns whether the worker could begin a call at once, or after a few quick calls."""
        calls = self._calls
        if not calls or not self._takes_calls:
            return self._takes_calls
        return call.is_quick and calls[-1].is_quick and len(calls) < MAX_CALLS_SENT

    def is_running(self, call: WorkerCall) -> bool:
        """Returns whether the worker has begun this call and not answered it."""
        return bool(self._calls) and self._calls[0] is call

    def send(self, call: WorkerCall) -> None:
        """Sends a call to the process. `can_take` must have returned True for it."""
        call.worker = self
        self._calls.append(call)
        if len(self._calls) == 1:
            self._begin(call)
        if self._stdin is not None:
            self._stdin.write(call.data)

    async def kill(self) -> None:
        """Kills the process and everything it started, and reads the answers it wrote before."""
        self._takes_calls = False
        self._stop_deadline()
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
        """Takes over the pipes; asyncio calls this, as it does the three methods below."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Handles output of the process: answers, one a line, and parts of lines."""
        *line_ends, rest = data.split(b"\n")
        for line_end in line_ends:
            self._answer(b"".join((*self._line_parts, line_end)))
            self._line_parts, self._num_line_bytes = [], 0
        if rest:
            self._line_parts.append(rest)
            self._num_line_bytes += len(rest)
        if self._num_line_bytes > MAX_LINE_BYTES:
            self._garbled(f"its answer is longer than {MAX_LINE_BYTES} bytes")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Notes that no more answers will come, or that no more calls can be sent."""
        self._takes_calls = False
        if fd == _STDOUT:
            self._end()

    def process_exited(self) -> None:
        """Notes that the process has ended; its last answers may still have to be read."""
        self._exited.set()
        if not self._calls:
            self._condemn(WorkerDiedError("its process ended"))

    def _begin(self, call: WorkerCall) -> None:
        self.begun_at = self._loop.time()
        self._deadline = self._loop.call_later(call.timeout_s, self._condemn, TimeoutError())

    def _answer(self, line: bytes) -> None:
        if self._is_garbled:
            return
        try:
            reply = _REPLY.decode(line)
        except msgspec.DecodeError as error:
            self._garbled(f"its answer can't be read: {error}")
            return
        if not self._calls:
            self._garbled("it answered without being asked")
            return
        call = self._calls.popleft()
        self._stop_deadline()
        if self._calls:
            self._begin(self._calls[0])
        if not call.reply.done():
            call.reply.set_result(reply)
        if self._takes_calls:
            call.worker = None
            self.on_free()

    def _garbled(self, problem: str) -> None:
        self._is_garbled = True
        self._condemn(WorkerDiedError(problem))

    def _condemn(self, error: Exception) -> None:
        """Fails the call that the worker runs, and has the worker killed."""
        self._takes_calls = False
        self._stop_deadline()
        if self._calls and not self._calls[0].reply.done():
            self._calls[0].reply.set_exception(error)
        self.on_end(self, [])

    def _end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        code = self._transport.get_returncode() if self._transport else None
        detail = "its process ended" if code is None else f"its process ended with code {code}"
        self._condemn(WorkerDiedError(detail))
        not_begun = list(self._calls)[1:]
        self._calls.clear()
        self.on_end(self, not_begun)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


async def start_worker(files: UserFiles) -> WorkerProcess:
    """Starts a child process in the files' folder and waits until it has loaded them.

    Raises ToolFileError if the process ends or hangs meanwhile, or if a file can't be used.
    """
    worker, start = WorkerProcess(), WorkerCall(None, _START_TIMEOUT_S)
    worker.send(start)
    paths = [file.path for file in (files.tools, files.rewards) if file is not None]
    try:
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: worker,
            *_COMMAND,
            cwd=paths[0].parent if paths else None,
            env=tool_environment(),
            stderr=None,
            start_new_session=True,
        )
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        stdin.write(msgspec.json.encode(files) + b"\n")
        first_line = await start.reply
        if isinstance(first_line, Broken):
            raise ToolFileError(first_line.problem, first_line.fix)
    except (TimeoutError, WorkerDiedError) as error:
        await worker.kill()
        raise ToolFileError(
            f"the process for {' and '.join(map(str, paths))} did not start: {error or 'it hung'}",
            "run the file with python: importing it must end quickly and without an error",
        ) from error
    except BaseException:
        with anyio.CancelScope(shield=True):
            await worker.kill()
        raise
    worker.ready = cast("Ready", first_line)
    return worker
