"""A pool of child processes for a user's tools.py and rewards.py, as large as the calls need.

The path of a call: `UserPool.call` (or `reward`) waits for a free worker, and `Worker.run` sends
the call to its process and enforces the deadline. A worker that misses it is killed and replaced.
"""

import math
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self, cast

import anyio
import anyio.lowlevel
import msgspec
from anyio import AsyncContextManagerMixin
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from stillroom import bounds
from stillroom.data.tool_names import NamedTools, has_tool_names
from stillroom.errors import CallFailedError, FailureClass, ToolFileError
from stillroom.processes import kill_family
from stillroom.reporting import background_tasks
from stillroom.secrecy.environments import tool_environment
from stillroom.secrecy.keys import tool_variables
from stillroom.tools.source import ToolResult, ToolSource, ToolTask, error_result
from stillroom.tools.user.file import UserFile, read_user_file
from stillroom.tools.user.worker import (
    CallResult,
    CallReward,
    CallTool,
    LoadFailed,
    Ready,
    RewardDescription,
    UserFiles,
)
from stillroom.types import Message, ToolSchema

_ADD_WORKER_AFTER_S = 0.05
"""The seconds that a call waits for a free worker before another worker is started."""
MAX_LINE_BYTES = bounds.TOOL_LINE.limit
_NUM_PROCESSORS = os.cpu_count() or 1
_START_TIMEOUT_S = float(bounds.TOOL_START.limit)
_END_TIMEOUT_S = 5.0
_POLL_S = 0.005
# -P keeps the user's folder off the path, where their json.py would shadow the library's.
_COMMAND = (sys.executable, "-P", "-m", "stillroom.tools.user.worker")
_REPLY = msgspec.json.Decoder(Ready | LoadFailed | CallResult)
_DISCONNECTED = (
    anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError,
    OSError,
)  # fmt: skip


class WorkerDiedError(Exception):
    """The worker's process exited during a call, or its result is invalid."""


class Worker:
    """One child process with the user's functions, which runs one call at a time."""

    def __init__(self) -> None:
        self._process: Process
        self._stdin: ByteSendStream
        self._stdout: BufferedByteReceiveStream
        self._num_calls = 0
        self.ready = Ready(tools=[], rewards=[])
        self.last_started_at = 0.0
        """The event loop's time at which the worker started its latest call."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    async def start(self, files: UserFiles) -> None:
        """Starts the process in the files' folder and waits until it has loaded them.

        Raises ToolFileError if the process exits or hangs, or if a file can't be loaded.
        """
        paths = [file.path for file in (files.tools, files.rewards) if file is not None]
        # Shielded: a cancellation here would leave the process running.
        with anyio.CancelScope(shield=True):
            self._process = await anyio.open_process(
                _COMMAND,
                stdout=subprocess.PIPE,
                stderr=None,
                cwd=paths[0].parent if paths else None,
                env=tool_environment(),
                start_new_session=True,
            )
        self._stdin = cast("ByteSendStream", self._process.stdin)
        self._stdout = BufferedByteReceiveStream(cast("ByteReceiveStream", self._process.stdout))
        try:
            reply = await self._exchange(files, _START_TIMEOUT_S)
            if isinstance(reply, LoadFailed):
                raise ToolFileError(reply.problem, reply.fix)
        except (TimeoutError, WorkerDiedError) as error:
            await self.kill()
            names, reason = " and ".join(map(str, paths)), error or "it did not respond in time"
            raise ToolFileError(
                f"the process for {names} failed to start: {reason}",
                "run the file with python: importing it must finish quickly and without an error",
            ) from error
        except BaseException:
            await self.kill()
            raise
        self.ready = cast("Ready", reply)

    async def run(self, call: CallTool | CallReward, timeout_s: float) -> CallResult:
        """Returns the result of a call. After an error the worker can't be used any more.

        Raises TimeoutError or WorkerDiedError.
        """
        self._num_calls += 1
        call = msgspec.structs.replace(call, number=self._num_calls)
        reply = await self._exchange(call, timeout_s)
        if not isinstance(reply, CallResult) or reply.number != self._num_calls:
            raise WorkerDiedError("its process sent something other than the result of this call")
        return reply

    async def _exchange(
        self, message: UserFiles | CallTool | CallReward, timeout_s: float
    ) -> Ready | LoadFailed | CallResult:
        """Sends a message and returns the reply. Raises TimeoutError or WorkerDiedError."""
        self.last_started_at = anyio.current_time()
        with anyio.fail_after(timeout_s):
            try:
                await self._stdin.send(msgspec.json.encode(message) + b"\n")
                return _REPLY.decode(await self._stdout.receive_until(b"\n", MAX_LINE_BYTES))
            except anyio.DelimiterNotFound as error:
                problem = f"its answer is longer than {MAX_LINE_BYTES} bytes"
                raise WorkerDiedError(problem) from error
            except msgspec.DecodeError as error:
                raise WorkerDiedError(f"its answer can't be read: {error}") from error
            except _DISCONNECTED as error:
                await self._wait_for_exit()
                problem = f"its process exited with code {self._process.returncode}"
                raise WorkerDiedError(problem) from error

    async def kill(self) -> None:
        """Kills the process tree."""
        with anyio.CancelScope(shield=True):
            if self.has_ended:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            else:
                kill_family(self._process.pid)
            # Not process.wait(): it may wait for the pipes, which another process could hold open.
            with anyio.move_on_after(_END_TIMEOUT_S):
                await self._wait_for_exit()
                await self._process.aclose()

    async def _wait_for_exit(self) -> None:
        while not self.has_ended:  # noqa: ASYNC110 - a process sets no event
            await anyio.sleep(_POLL_S)


class UserPool(ToolSource, AsyncContextManagerMixin):
    """Runs the user's functions in child processes. Use as an async context manager.

    A worker runs one call at a time, so the user's code needs no locks. Slow calls make the pool
    grow up to `max_workers`. A worker that misses a deadline is killed and replaced.
    """

    def __init__(
        self,
        *,
        tools_file: UserFile | None,
        rewards_file: UserFile | None,
        tool_timeout_s: float = 60.0,
        reward_timeout_s: float = 60.0,
        max_workers: int = 16,
    ) -> None:
        self._files = UserFiles(
            tools=tools_file,
            rewards=rewards_file,
            parent=os.getpid(),
            secrets=sorted(tool_variables()),
        )
        self._timeouts = (tool_timeout_s, reward_timeout_s)
        self._max_workers = max_workers
        self._workers: set[Worker] = set()
        self._num_workers = 0
        """The number of workers, including those that are being started."""
        self._waiting: deque[float] = deque()
        """The times at which the calls that wait for a worker began to wait."""
        self._has_waiting = anyio.Event()
        # The two ends of one stream: a worker is sent once it is free, and a call receives it.
        self._to_calls: MemoryObjectSendStream[Worker | ToolFileError]
        self._free: MemoryObjectReceiveStream[Worker | ToolFileError]
        """The free workers; an error if one could not be started."""
        self._ready = Ready(tools=[], rewards=[])
        self._timeouts_by_tool: dict[str, float | None] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._to_calls, self._free = anyio.create_memory_object_stream(math.inf)
        with self._to_calls, self._free:
            worker = await self._start_worker()
            self._ready = worker.ready
            self._timeouts_by_tool = {
                tool.schema["function"]["name"]: tool.timeout_s for tool in self._ready.tools
            }
            self._to_calls.send_nowait(worker)
            try:
                async with background_tasks() as tasks:
                    tasks.start_soon(self._add_workers)
                    yield self
            finally:
                for worker in list(self._workers):
                    await self._discard(worker)

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the tools of tools.py, in the order of the file."""
        return [tool.schema for tool in self._ready.tools]

    @property
    def keeps_state(self) -> bool:
        """False, since any process may serve a call, so no tool can rely on earlier calls."""
        return False

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["_UserSession"]:
        """Opens the tools of one rollout."""
        yield _UserSession(self, task.metadata)

    @property
    def rewards(self) -> list[RewardDescription]:
        """The rewards of rewards.py, in the order of the file."""
        return self._ready.rewards

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the names provided to the files, and on missing modules."""
        return self._ready.notes

    async def call(
        self, name: str, arguments: dict[str, Any], *, metadata: dict[str, Any]
    ) -> ToolResult:
        """Runs one tool; its errors, and a missed deadline, are error results for the model."""
        timeout_s = self._timeouts_by_tool[name] or self._timeouts[0]
        call = CallTool(name=name, arguments=arguments, metadata=metadata, timeout_s=timeout_s)
        try:
            result = await self._run(call, timeout_s)
        except TimeoutError:
            return error_result(f"{name} timed out after {timeout_s:g} s")
        except WorkerDiedError as error:
            return error_result(f"{name} crashed ({error})")
        if result.error is not None:
            return error_result(result.error)
        return ToolResult(content=result.content, is_error=False, is_none=result.is_none)

    async def reward(
        self,
        name: str,
        messages: list[Message],
        *,
        metadata: dict[str, Any],
        variables: dict[str, Any],
    ) -> float:
        """Returns one reward of a finished conversation.

        Raises:
            CallFailedError: the reward raised, crashed, or missed its deadline.
        """
        description = next(reward for reward in self._ready.rewards if reward.name == name)
        timeout_s = description.timeout_s or self._timeouts[1]
        call = CallReward(
            name=name,
            messages=messages,
            metadata=metadata,
            variables=variables,
            timeout_s=timeout_s,
        )
        try:
            result = await self._run(call, timeout_s)
        except TimeoutError as error:
            message = f"reward {name} timed out after {timeout_s:g} s"
            raise CallFailedError(FailureClass.REWARD_TIMEOUT, message) from error
        except WorkerDiedError as error:
            message = f"reward {name} crashed ({error})"
            raise CallFailedError(FailureClass.REWARD, message) from error
        if result.error is not None:
            raise CallFailedError(FailureClass.REWARD, f"reward {name}: {result.error}")
        return result.reward

    async def _run(self, call: CallTool | CallReward, timeout_s: float) -> CallResult:
        """Returns the result of a call. Raises TimeoutError or WorkerDiedError."""
        worker = await self._wait_for_worker()
        try:
            result = await worker.run(call, timeout_s)
        except BaseException:
            # The worker's result may still arrive, so it can serve no other call.
            await self._discard(worker)
            raise
        self._to_calls.send_nowait(worker)
        return result

    async def _wait_for_worker(self) -> Worker:
        """Returns a free worker, once there is one. Raises ToolFileError if one fails to start."""
        while True:
            try:
                worker = self._free.receive_nowait()
            except anyio.WouldBlock:
                self._waiting.append(since := anyio.current_time())
                self._has_waiting.set()
                try:
                    worker = await self._free.receive()
                finally:
                    self._waiting.remove(since)
            if isinstance(worker, ToolFileError):
                raise worker
            if not worker.has_ended:
                return worker
            await self._discard(worker)

    async def _add_workers(self) -> None:
        """Starts a worker whenever a call has waited too long for one."""
        while True:
            await self._has_waiting.wait()
            self._has_waiting = anyio.Event()
            while self._waiting:
                if self._num_workers:
                    await anyio.sleep(_ADD_WORKER_AFTER_S / 2)
                    # First read the results that arrived while the loop was busy.
                    await anyio.lowlevel.checkpoint()
                    if not self._should_add_worker():
                        continue
                try:
                    self._to_calls.send_nowait(await self._start_worker())
                except ToolFileError as error:
                    self._to_calls.send_nowait(error)

    def _should_add_worker(self) -> bool:
        """Returns whether a call has waited too long and another worker would help.

        With one worker per processor already, another one helps only if all of them have been busy
        for long, which means that they are not CPU-bound.
        """
        latest_start = anyio.current_time() - _ADD_WORKER_AFTER_S
        if (
            self._num_workers >= self._max_workers
            or min(self._waiting, default=math.inf) > latest_start
        ):
            return False
        are_all_busy = all(worker.last_started_at <= latest_start for worker in self._workers)
        return self._num_workers < _NUM_PROCESSORS or are_all_busy

    async def _start_worker(self) -> Worker:
        """Starts a worker. Raises ToolFileError."""
        # Counted before it runs, so that waiting calls do not start more than allowed.
        self._num_workers += 1
        worker = Worker()
        try:
            await worker.start(self._files)
        except BaseException:
            self._num_workers -= 1
            raise
        self._workers.add(worker)
        return worker

    async def _discard(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._num_workers -= 1
        await worker.kill()


class _UserSession:
    """The user's tools for one rollout, which receive its metadata."""

    def __init__(self, pool: UserPool, metadata: dict[str, Any]) -> None:
        self._pool, self._metadata = pool, metadata

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return await self._pool.call(name, arguments, metadata=self._metadata)


TOOLS_FILE = "tools.py"


def schemas_in(file: UserFile) -> NamedTools:
    """Returns the tool schemas of a tools.py by name; a temporary process loads the file.

    Call it outside of an event loop. Raises ToolFileError if the file cannot be loaded.
    """

    async def load() -> list[ToolSchema]:
        async with UserPool(tools_file=file, rewards_file=None) as pool:
            return list(pool.schemas)

    return {schema["function"]["name"]: schema for schema in anyio.run(load)}


def tools_named_in(rows: Path, *folders: Path) -> NamedTools | None:
    """Returns the tools for a file's rows, from the first tools.py next to it or in `folders`.

    None if its rows name no tools, or there is no tools.py.
    """
    if not rows.is_file() or not has_tool_names(rows):
        return None
    candidates = [folder / TOOLS_FILE for folder in (rows.parent, *folders)]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    return None if file is None else schemas_in(read_user_file(file))
