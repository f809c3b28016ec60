"""A pool of child processes for a user's tools.py and rewards.py, as large as the calls need.

The path of a call: `UserPool.call` (or `reward`) makes a WorkerCall with its timeout, and `_assign`
sends that to a worker. The WorkerProcess (worker_process.py) starts the deadline when the worker
can begin the call; a worker that misses a deadline is killed here and replaced.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast

import anyio
import anyio.lowlevel
from anyio import AsyncContextManagerMixin

from stillroom.data.tool_names import NamedTools, has_tool_names
from stillroom.errors import CallFailedError, FailureClass, ToolFileError
from stillroom.reporting import background_tasks
from stillroom.secrecy.keys import tool_variables
from stillroom.tools.source import ToolResult, ToolSource, ToolTask, error_result
from stillroom.tools.user.file import UserFile, read_user_file
from stillroom.tools.user.worker import (
    Answer,
    CallReward,
    CallTool,
    Ready,
    RewardDescription,
    UserFiles,
)
from stillroom.tools.user.worker_process import (
    QuickFunctions,
    WorkerCall,
    WorkerDiedError,
    WorkerProcess,
    start_worker,
)
from stillroom.types import Message, ToolSchema

# A call that waits longer than this for a free worker gets a new one.
PATIENCE_S = 0.05
# Calls that wait behind quick ones mean a busy machine, which one more process would only slow.
_PATIENCE_IF_QUICK_S = 1.0
_NUM_PROCESSORS = os.cpu_count() or 1


class UserPool(ToolSource, AsyncContextManagerMixin):
    """Runs the user's functions in child processes. Use as an async context manager.

    A worker runs one call at a time, so the user's code needs no locks. Slow calls make the pool
    grow up to `max_workers`. A worker that misses a deadline is killed and replaced, and calls that
    it had been sent but had not begun go to another worker.
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
        self._workers: set[WorkerProcess] = set()
        self._num_workers = 0
        self._waiting: deque[WorkerCall] = deque()
        self._condemned: list[WorkerProcess] = []
        self._quick_functions = QuickFunctions()
        self._has_work = anyio.Event()
        self._ready = Ready(tools=[], rewards=[])
        self._timeouts_by_tool: dict[str, float | None] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        worker = await self._start_worker()
        self._ready = worker.ready
        self._timeouts_by_tool = {
            tool.schema["function"]["name"]: tool.timeout_s for tool in self._ready.tools
        }
        self._take_in(worker)
        try:
            async with background_tasks() as tasks:
                tasks.start_soon(self._keep_workers)
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
        """False, since any process may serve a call, so no tool can rely on the call before."""
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
        """Notes for the user on what the files were given that they did not import."""
        return self._ready.notes

    async def call(
        self, name: str, arguments: dict[str, Any], *, metadata: dict[str, Any]
    ) -> ToolResult:
        """Runs one tool; its errors, and a missed deadline, are error results for the model."""
        timeout_s = self._timeouts_by_tool[name] or self._timeouts[0]
        call = CallTool(name=name, arguments=arguments, metadata=metadata, timeout_s=timeout_s)
        try:
            answer = await self._run(call, timeout_s)
        except TimeoutError:
            return error_result(f"{name} did not answer within {timeout_s:g} s")
        except WorkerDiedError as error:
            return error_result(f"{name} crashed ({error})")
        if answer.error is not None:
            return error_result(answer.error)
        return ToolResult(content=answer.content, is_error=False)

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
            answer = await self._run(call, timeout_s)
        except TimeoutError as error:
            message = f"reward {name} did not answer within {timeout_s:g} s"
            raise CallFailedError(FailureClass.REWARD_TIMEOUT, message) from error
        except WorkerDiedError as error:
            message = f"reward {name} crashed ({error})"
            raise CallFailedError(FailureClass.REWARD, message) from error
        if answer.error is not None:
            raise CallFailedError(FailureClass.REWARD, f"reward {name}: {answer.error}")
        return answer.reward

    async def _run(self, request: CallTool | CallReward, timeout_s: float) -> Answer:
        """Returns the answer to a call. Raises TimeoutError or WorkerDiedError."""
        call = WorkerCall(request, timeout_s)
        self._waiting.append(call)
        self._assign()
        if self._waiting:
            self._has_work.set()
        try:
            answer = cast("Answer", await call.reply)
        except BaseException as error:
            is_failed = isinstance(error, TimeoutError | WorkerDiedError)
            if is_failed:
                self._quick_functions.note(call.name, math.inf)
            worker = call.worker
            if worker is not None and (is_failed or worker.is_running(call)):
                # Its answer may still be on the way, so it can serve no other call.
                await self._discard(worker)
            elif call in self._waiting:
                self._waiting.remove(call)
            raise
        self._quick_functions.note(call.name, answer.seconds)
        return answer

    def _assign(self) -> None:
        """Sends waiting calls, in the order in which they came, while a worker can take one."""
        while call := self._next_waiting():
            call.is_quick = call.name in self._quick_functions
            able = [worker for worker in self._workers if worker.can_take(call)]
            if not able:
                return
            self._waiting.popleft()
            min(able, key=_num_calls).send(call)

    def _next_waiting(self) -> WorkerCall | None:
        while self._waiting:
            if not self._waiting[0].reply.done():
                return self._waiting[0]
            # It was cancelled, and its task has not run yet to remove it.
            self._waiting.popleft()
        return None

    def _take_back(self, worker: WorkerProcess, not_begun: list[WorkerCall]) -> None:
        """Puts the calls that a worker has not begun back into the queue, and has it killed."""
        for call in reversed(not_begun):
            call.worker = None
            self._waiting.appendleft(call)
        self._assign()
        self._condemned.append(worker)
        self._has_work.set()

    async def _keep_workers(self) -> None:
        """Kills condemned workers, and starts a worker whenever a call has waited too long."""
        while True:
            await self._has_work.wait()
            self._has_work = anyio.Event()
            while self._waiting or self._condemned:
                if self._condemned:
                    await self._discard(self._condemned.pop())
                    continue
                if self._num_workers and not self._is_patience_over():
                    await anyio.sleep(PATIENCE_S / 2)
                    # First read the answers that came while the loop was busy.
                    await anyio.lowlevel.checkpoint()
                    continue
                try:
                    worker = await self._start_worker()
                except ToolFileError as error:
                    if call := self._next_waiting():
                        self._waiting.popleft()
                        call.reply.set_exception(error)
                    continue
                self._take_in(worker)

    def _is_patience_over(self) -> bool:
        """Returns whether the first call in line has waited long and another worker would help.

        If there is one worker for each processor already, another one helps only if all of them
        have been busy for long, which means that they wait for something else than a processor.
        """
        call = self._waiting[0]
        patience_s = _PATIENCE_IF_QUICK_S if call.is_quick else PATIENCE_S
        long_ago = asyncio.get_running_loop().time() - patience_s
        if self._num_workers >= self._max_workers or call.since > long_ago:
            return False
        is_stuck = all(worker.begun_at <= long_ago for worker in self._workers)
        return self._num_workers < _NUM_PROCESSORS or is_stuck

    async def _start_worker(self) -> WorkerProcess:
        # Counted before it is up, so that waiting calls do not start more than allowed.
        self._num_workers += 1
        try:
            worker = await start_worker(self._files)
        except BaseException:
            self._num_workers -= 1
            raise
        return worker

    def _take_in(self, worker: WorkerProcess) -> None:
        worker.on_free, worker.on_end = self._assign, self._take_back
        self._workers.add(worker)
        self._assign()

    async def _discard(self, worker: WorkerProcess) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._num_workers -= 1
        with anyio.CancelScope(shield=True):
            await worker.kill()


def _num_calls(worker: WorkerProcess) -> int:
    return worker.num_calls


class _UserSession:
    """The user's tools for one rollout, whose metadata they receive."""

    def __init__(self, pool: UserPool, metadata: dict[str, Any]) -> None:
        self._pool, self._metadata = pool, metadata

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return await self._pool.call(name, arguments, metadata=self._metadata)


TOOLS_FILE = "tools.py"


def schemas_in(file: UserFile) -> NamedTools:
    """Returns the schemas of a tools.py by name, loaded in a process of its own that then ends.

    It is called where no event loop runs. Raises ToolFileError if the file cannot be loaded.
    """

    async def load() -> list[ToolSchema]:
        async with UserPool(tools_file=file, rewards_file=None) as pool:
            return list(pool.schemas)

    return {schema["function"]["name"]: schema for schema in anyio.run(load)}


def tools_named_in(rows: Path, *folders: Path) -> NamedTools | None:
    """Returns the tools for the rows of a file: of the first tools.py next to it, or in a folder.

    None if its rows name no tools, or there is no tools.py.
    """
    if not rows.is_file() or not has_tool_names(rows):
        return None
    places = [folder / TOOLS_FILE for folder in (rows.parent, *folders)]
    found = next((place for place in places if place.is_file()), None)
    return None if found is None else schemas_in(read_user_file(found))
