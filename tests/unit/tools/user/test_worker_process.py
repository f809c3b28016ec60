"""How the pool talks with a worker: the protocol by itself, then cases with a real process."""

import math
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom.tools.user.file import read_user_file
from stillroom.tools.user.pool import UserPool
from stillroom.tools.user.worker import Answer
from stillroom.tools.user.worker_process import (
    MAX_CALLS_SENT,
    QUICK_S,
    SLOW_S,
    QuickFunctions,
    WorkerCall,
    WorkerDiedError,
    WorkerProcess,
)

STDIN, STDOUT = 0, 1
TOOLS = '''
    import asyncio, os, time

    @tool
    def pid() -> int:
        """Tell the process."""
        return os.getpid()

    @tool
    def end(which: int) -> str:
        """End the process at one of the calls."""
        return str(which) if which != 30 else os._exit(3)

    @tool
    def hang(which: int) -> str:
        """Never answer one of the calls."""
        if which == 30:
            time.sleep(600)
        return str(which)

    @tool
    async def wait(seconds: float) -> str:
        """Wait as async code does."""
        await asyncio.sleep(seconds)
        return "waited"

    @tool
    def split() -> str:
        """Fork this very process and let both answer."""
        return "copy" if os.fork() == 0 else "original"
    '''


def line_of(content: str) -> bytes:
    return msgspec.json.encode(Answer(content=content)) + b"\n"


def call_of(*, is_quick: bool = False, timeout_s: float = 60.0) -> WorkerCall:
    call = WorkerCall(None, timeout_s)
    call.is_quick = is_quick
    return call


def worker_with_calls(
    timeout_s: float = 60.0, *, behind: int = 0
) -> tuple[WorkerProcess, list[WorkerCall]]:
    """A worker with a call that it runs, and quick ones behind it."""
    worker = WorkerProcess()
    calls = [call_of(is_quick=True, timeout_s=timeout_s) for _ in range(1 + behind)]
    for call in calls:
        assert worker.can_take(call)
        worker.send(call)
    return worker, calls


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_answers_may_come_in_any_parts_and_are_those_to_the_calls_in_turn(size: int) -> None:
    async def main() -> None:
        worker, calls = worker_with_calls(behind=2)
        texts = ["ü\n" * 20, "", "two"]
        lines = b"".join(map(line_of, texts))
        for start in range(0, len(lines), size):
            assert not calls[-1].reply.done()
            worker.pipe_data_received(STDOUT, lines[start : start + size])

        assert [await call.reply for call in calls] == [Answer(content=text) for text in texts]
        assert [call.worker for call in calls] == [None] * 3

    run_async(main)


def test_only_quick_calls_stand_behind_quick_ones_and_not_too_many() -> None:
    async def main() -> None:
        quick, slow = call_of(is_quick=True), call_of()
        worker = WorkerProcess()
        assert worker.can_take(slow)
        worker.send(slow)
        assert not worker.can_take(quick)
        worker.pipe_data_received(STDOUT, line_of("done"))

        taken = 0
        while worker.can_take(call_of(is_quick=True)):
            worker.send(call_of(is_quick=True))
            taken += 1
            assert not worker.can_take(slow)
        assert taken == MAX_CALLS_SENT

    run_async(main)


def test_a_worker_that_has_answered_may_be_asked_at_once() -> None:
    async def main() -> None:
        worker, [first] = worker_with_calls()
        second = call_of()
        worker.on_free = lambda: worker.send(second)
        worker.pipe_data_received(STDOUT, line_of("one"))
        worker.on_free = lambda: None
        worker.pipe_data_received(STDOUT, line_of("two"))

        assert await first.reply == Answer(content="one")
        assert await second.reply == Answer(content="two")

    run_async(main)


def test_a_cancelled_call_that_is_answered_all_the_same_leaves_the_worker_in_use() -> None:
    async def main() -> None:
        worker, [call] = worker_with_calls()
        call.reply.cancel()
        worker.pipe_data_received(STDOUT, line_of("late"))

        assert worker.can_take(call_of())
        assert call.worker is None

    run_async(main)


@pytest.mark.parametrize("line", [b"{}\n", b'{"type":"answer"', b"\n", b"\xff\n"])
def test_what_is_no_answer_is_the_end_of_the_worker(line: bytes) -> None:
    async def main() -> None:
        worker, [call] = worker_with_calls()
        worker.pipe_data_received(STDOUT, line)
        worker.pipe_connection_lost(STDOUT, None)

        with pytest.raises(WorkerDiedError):
            await call.reply
        assert call.worker is worker
        assert not worker.can_take(call_of())

    run_async(main)


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    async def main() -> None:
        worker, [call] = worker_with_calls()
        worker.pipe_data_received(STDOUT, line_of("one") + line_of("forged"))
        assert await call.reply == Answer(content="one")

        assert not worker.can_take(call_of())

    run_async(main)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_a_worker_has_not_begun_is_given_back_once_its_answers_are_read(
    is_cancelled: bool,
) -> None:
    async def main() -> None:
        worker, [answered, ran, *behind] = worker_with_calls(behind=3)
        given_back: list[WorkerCall] = []
        worker.on_end = lambda _worker, not_begun: given_back.extend(not_begun)
        # That nobody takes its calls any more is known before its last answer is read.
        worker.pipe_connection_lost(STDIN, None)
        worker.process_exited()
        worker.pipe_data_received(STDOUT, line_of("one"))
        assert worker.is_running(ran)
        assert not worker.is_running(behind[0])
        if is_cancelled:
            ran.reply.cancel()
        worker.pipe_connection_lost(STDOUT, None)

        assert given_back == behind
        assert await answered.reply == Answer(content="one")
        assert ran.reply.done()
        assert not any(call.reply.done() for call in behind)

    run_async(main)


def test_a_worker_that_ends_between_calls_is_not_asked_for_the_next() -> None:
    async def main() -> None:
        worker, [call] = worker_with_calls()
        worker.pipe_data_received(STDOUT, line_of("its last"))
        assert await call.reply == Answer(content="its last")
        ends: list[WorkerProcess] = []
        worker.on_end = lambda ended, _not_begun: ends.append(ended)
        worker.process_exited()

        assert not worker.can_take(call_of())
        assert ends == [worker]

    run_async(main)


def test_an_answer_after_the_deadline_counts_no_more_but_those_behind_it_do() -> None:
    async def main() -> None:
        worker, [late, behind, last] = worker_with_calls(timeout_s=0.0, behind=2)
        given_back: list[WorkerCall] = []
        worker.on_end = lambda _worker, not_begun: given_back.extend(not_begun)
        with anyio.fail_after(60), pytest.raises(TimeoutError):
            await late.reply
        worker.on_free = lambda: pytest.fail("its caller is about to kill it")
        worker.pipe_data_received(STDOUT, line_of("late") + line_of("done"))

        assert late.worker is worker
        assert await behind.reply == Answer(content="done")
        assert not worker.can_take(call_of())
        assert not last.reply.done()

    run_async(main)


def test_the_time_of_a_call_begins_when_the_one_before_it_is_answered() -> None:
    async def main() -> None:
        worker, [first, second] = worker_with_calls(timeout_s=0.3, behind=1)
        with anyio.fail_after(60), pytest.raises(TimeoutError):
            await first.reply
        assert not second.reply.done()

        worker, [first, second] = worker_with_calls(timeout_s=0.3, behind=1)
        worker.pipe_data_received(STDOUT, line_of("one"))
        with anyio.fail_after(60), pytest.raises(TimeoutError):
            await second.reply

    run_async(main)


def test_a_call_cancelled_in_the_queue_costs_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        pool = UserPool(
            tools_file=read_user_file(write_tools(tmp_path, TOOLS)),
            rewards_file=None,
            max_workers=1,
        )

        async def pid() -> str:
            return (await pool.call("pid", {}, metadata={})).content

        async def occupy() -> None:
            await pool.call("wait", {"seconds": 0.2}, metadata={})

        async with pool:
            first = await pid()
            async with anyio.create_task_group() as group:
                group.start_soon(occupy)
                await anyio.lowlevel.checkpoint()
                with anyio.move_on_after(0.01) as scope:
                    await pid()
                assert scope.cancelled_caught
            assert await pid() == first

    run_async(main)


def test_a_copy_that_a_tool_forks_off_answers_no_call(tmp_path: Path) -> None:
    async def main() -> None:
        tools = read_user_file(write_tools(tmp_path, TOOLS))
        async with UserPool(tools_file=tools, rewards_file=None) as pool:
            names = ["split", *["pid"] * 20]
            split, *pids = [(await pool.call(name, {}, metadata={})).content for name in names]

        assert split == "original"
        assert len(set(pids)) == 1

    run_async(main)


@pytest.mark.parametrize(("name", "text"), [("end", "crashed"), ("hang", "did not answer")])
def test_quick_calls_at_once_have_one_answer_each_though_one_ends_its_process(
    tmp_path: Path, name: str, text: str
) -> None:
    seen: dict[int, str] = {}

    async def main() -> None:
        tools = read_user_file(write_tools(tmp_path, TOOLS))
        async with UserPool(tools_file=tools, rewards_file=None, tool_timeout_s=0.5) as pool:

            async def ask(which: int) -> None:
                seen[which] = (await pool.call(name, {"which": which}, metadata={})).content

            for which in range(20):
                await ask(which)
            async with anyio.create_task_group() as group:
                for which in range(20, 60):
                    group.start_soon(ask, which)

    run_async(main)
    assert text in seen.pop(30)
    assert seen == {which: str(which) for which in range(60) if which != 30}


def test_a_function_is_quick_only_while_it_is() -> None:
    quick = QuickFunctions()
    assert "f" not in quick

    def note(seconds: float, times: int) -> bool:
        for _ in range(times):
            quick.note("f", seconds)
        return "f" in quick

    assert note(0.0, 20)
    assert "g" not in quick
    assert not note(QUICK_S, 1)
    assert note(0.0, 20)
    for seconds in (SLOW_S, math.inf):
        assert not note(seconds, 1)
        assert not note(0.0, 500)
        assert note(0.0, 1000)
