"""Warm child processes for a user's tools.py and rewards.py: as many as the calls need."""

import asyncio
import math
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import anyio
import anyio.abc
import anyio.lowlevel

from stillroom.errors import CallFailedError, FailureClass, ToolFileError
from stillroom.tools.base import ToolResult, ToolTask, error_result
from stillroom.tools.user.process import Job, Worker, WorkerDiedError, start_worker
from stillroom.tools.user.quick_calls import QuickCalls
from stillroom.tools.user.worker import Answer, CallReward, CallTool, Ready, RewardDescription
from stillroom.types import Message, ToolSchema

# A call that waits longer than this for a free worker gets a new one.
PATIENCE_S = 0.05
# The same behind calls that are quick: there the machine is busy, and one more makes it busier.
_PATIENCE_IF_QUICK_S = 1.0
_NUM_PROCESSORS = os.cpu_count() or 1


class UserPool:
    """Runs the user's functions in child processes. Use as an async context manager.

    One call at a time runs in a worker, so the user's code needs no locks; slow calls make the
    pool grow up to `max_workers`. A worker that exceeds a deadline is killed and replaced; quick
    calls that were sent behind the one that it ran are done by another.
    """

    def __init__(
        self,
        *,
        tools_file: Path | None,
        rewards_file: Path | None,
        tool_timeout_s: float = 60.0,
        reward_timeout_s: float = 60.0,
        max_workers: int = 16,
    ) -> None:
        # The worker starts in their folder, where a relative path would lead elsewhere.
        tools_file = tools_file and tools_file.absolute()
        rewards_file = rewards_file and rewards_file.absolute()
        self._command = _worker_command(tools_file, rewards_file)
        self._folder = (tools_file or rewards_file or Path.cwd()).parent
        self._timeouts = (tool_timeout_s, reward_timeout_s)
        self._max_workers = max_workers
        self._workers: set[Worker] = set()
        self._num_workers = 0
        self._waiting: deque[Job] = deque()
        self._condemned: list[Worker] = []
        self._quick = QuickCalls()
        self._is_wanted = anyio.Event()
        self._growth: anyio.abc.TaskGroup | None = None
        self._ready = Ready(tools=[], rewards=[])
        self._own_timeouts: dict[str, float | None] = {}

    async def __aenter__(self) -> Self:
        worker = await self._start_worker()
        self._ready = worker.ready
        self._own_timeouts = {t.schema["function"]["name"]: t.timeout_s for t in self._ready.tools}
        self._take_in(worker)
        self._growth = await anyio.create_task_group().__aenter__()
        self._growth.start_soon(self._grow)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._growth is not None:
            self._growth.cancel_scope.cancel()
            await self._growth.__aexit__(None, None, None)
        for worker in list(self._workers):
            await self._discard(worker)

    @property
    def schemas(self) -> list[ToolSchema]:
        """The tools of tools.py, in the order they stand in the file."""
        return [tool.schema for tool in self._ready.tools]

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns all of them: they do not depend on the task."""
        return self.schemas

    @property
    def keeps_state(self) -> bool:
        """False: which process serves a call is left open, so no tool can count on the last."""
        return False

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["UserSession"]:
        """Gives the tools of one rollout."""
        yield UserSession(self, task.metadata)

    @property
    def rewards(self) -> list[RewardDescription]:
        """The rewards of rewards.py, in the order they stand in the file."""
        return self._ready.rewards

    async def call(
        self, name: str, arguments: dict[str, Any], *, metadata: dict[str, Any]
    ) -> ToolResult:
        """Runs one tool; its own errors and a passed deadline are results the model reads."""
        timeout_s = self._own_timeouts[name] or self._timeouts[0]
        call = CallTool(name=name, arguments=arguments, metadata=metadata)
        try:
            answer = await self._ask(call, timeout_s)
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
            CallFailedError: the reward raised, crashed, or passed its deadline.
        """
        own = next(reward.timeout_s for reward in self._ready.rewards if reward.name == name)
        timeout_s = own or self._timeouts[1]
        call = CallReward(name=name, messages=messages, metadata=metadata, variables=variables)
        try:
            answer = await self._ask(call, timeout_s)
        except TimeoutError as error:
            message = f"reward {name} did not answer within {timeout_s:g} s"
            raise CallFailedError(FailureClass.REWARD_TIMEOUT, message) from error
        except WorkerDiedError as error:
            message = f"reward {name} crashed ({error})"
            raise CallFailedError(FailureClass.REWARD, message) from error
        if answer.error is not None:
            raise CallFailedError(FailureClass.REWARD, f"reward {name}: {answer.error}")
        return answer.reward

    async def _ask(self, call: CallTool | CallReward, timeout_s: float) -> Answer:
        job = Job(call, timeout_s)
        self._waiting.append(job)
        self._assign()
        if self._waiting:
            self._is_wanted.set()
        try:
            answer = cast("Answer", await job.reply)
        except BaseException as error:
            is_failed = isinstance(error, TimeoutError | WorkerDiedError)
            if is_failed:
                self._quick.note(job.name, math.inf)
            worker = job.worker
            if worker is not None and (is_failed or worker.is_running(job)):
                # Its answer may still be on the way, so it can serve no other call.
                await self._discard(worker)
            elif job in self._waiting:
                self._waiting.remove(job)
            raise
        self._quick.note(job.name, answer.seconds)
        return answer

    def _assign(self) -> None:
        """Gives out calls in the order in which they came, as far as workers can take them."""
        while job := self._next_waiting():
            job.is_quick = job.name in self._quick
            able = [worker for worker in self._workers if worker.can_take(job)]
            if not able:
                return
            self._waiting.popleft()
            min(able, key=_num_calls).ask(job)

    def _next_waiting(self) -> Job | None:
        while self._waiting:
            if not self._waiting[0].reply.done():
                return self._waiting[0]
            # Cancelled, and its task has not come round to take it out.
            self._waiting.popleft()
        return None

    def _take_back(self, worker: Worker, not_begun: list[Job]) -> None:
        """Gives what a worker has not begun to others, and sees to it that it is killed."""
        for job in reversed(not_begun):
            job.worker = None
            self._waiting.appendleft(job)
        self._assign()
        self._condemned.append(worker)
        self._is_wanted.set()

    async def _grow(self) -> None:
        """Kills workers that are of no use; starts one whenever a call has waited too long."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted = anyio.Event()
            while self._waiting or self._condemned:
                if self._condemned:
                    await self._discard(self._condemned.pop())
                    continue
                if self._num_workers and not self._is_patience_over():
                    await anyio.sleep(PATIENCE_S / 2)
                    # Answers that came while the loop was busy are read before it is judged.
                    await anyio.lowlevel.checkpoint()
                    continue
                try:
                    worker = await self._start_worker()
                except ToolFileError as error:
                    if job := self._next_waiting():
                        self._waiting.popleft()
                        job.reply.set_exception(error)
                    continue
                self._take_in(worker)

    def _is_patience_over(self) -> bool:
        """Whether the first in line has waited long, and another process would help it.

        Beyond one for each processor it helps only where all are waiting for something themselves.
        """
        first = self._waiting[0]
        patience_s = _PATIENCE_IF_QUICK_S if first.is_quick else PATIENCE_S
        long_ago = asyncio.get_running_loop().time() - patience_s
        if self._num_workers >= self._max_workers or first.since > long_ago:
            return False
        is_stuck = all(worker.begun_at <= long_ago for worker in self._workers)
        return self._num_workers < _NUM_PROCESSORS or is_stuck

    async def _start_worker(self) -> Worker:
        # Counted before it is up, so that waiting calls do not start more than allowed.
        self._num_workers += 1
        try:
            worker = await start_worker(self._command, self._folder)
        except BaseException:
            self._num_workers -= 1
            raise
        return worker

    def _take_in(self, worker: Worker) -> None:
        worker.on_free, worker.on_end = self._assign, self._take_back
        self._workers.add(worker)
        self._assign()

    async def _discard(self, worker: Worker) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._num_workers -= 1
        with anyio.CancelScope(shield=True):
            await worker.kill()


def _num_calls(worker: Worker) -> int:
    return worker.num_calls


class UserSession:
    """The user's tools as one rollout sees them."""

    def __init__(self, pool: UserPool, metadata: dict[str, Any]) -> None:
        self._pool, self._metadata = pool, metadata

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool."""
        return await self._pool.call(name, arguments, metadata=self._metadata)


def _worker_command(tools_file: Path | None, rewards_file: Path | None) -> list[str]:
    # -P: the folder it starts in must not shadow our modules.
    command = [sys.executable, "-P", "-m", "stillroom.tools.user.worker"]
    if tools_file is not None:
        command += ["--tools", str(tools_file)]
    if rewards_file is not None:
        command += ["--rewards", str(rewards_file)]
    return command
