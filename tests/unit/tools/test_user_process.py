"""How the pool talks with a worker: the protocol by itself, then cases with a real process."""

from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from fakes.loops import run_async
from fakes.user_files import write_tools
from stillroom.tools.user_pool import UserPool
from stillroom.tools.user_process import Job, Worker, WorkerDiedError
from stillroom.tools.user_worker import Answer

STDOUT = 1
TOOLS = '''
    import asyncio, os

    @tool
    def pid() -> int:
        """Tell the process."""
        return os.getpid()

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


def asked(timeout_s: float = 60.0) -> tuple[Worker, Job]:
    """A worker with a call that it has not answered."""
    worker, job = Worker(), Job(None, timeout_s)
    worker.ask(job)
    return worker, job


def test_an_answer_may_come_in_any_parts() -> None:
    async def main() -> None:
        for size in (1, 7, 1000):
            worker, job = asked()
            line = line_of("ü\n" * 20)
            for start in range(0, len(line), size):
                assert not job.reply.done()
                worker.pipe_data_received(STDOUT, line[start : start + size])
            assert await job.reply == Answer(content="ü\n" * 20)
            assert job.worker is None

    run_async(main)


def test_a_worker_is_free_once_it_has_answered_and_may_be_asked_at_once() -> None:
    async def main() -> None:
        worker, first = asked()
        second = Job(None, 60.0)
        worker.on_free = lambda free: free.ask(second)
        worker.pipe_data_received(STDOUT, line_of("one"))
        worker.on_free = lambda _worker: None
        worker.pipe_data_received(STDOUT, line_of("two"))

        assert await first.reply == Answer(content="one")
        assert await second.reply == Answer(content="two")

    run_async(main)


def test_a_cancelled_call_that_is_answered_all_the_same_leaves_the_worker_in_use() -> None:
    async def main() -> None:
        worker, job = asked()
        freed: list[Worker] = []
        worker.on_free = freed.append
        job.reply.cancel()
        worker.pipe_data_received(STDOUT, line_of("late"))

        assert freed == [worker]
        assert job.worker is None

    run_async(main)


@pytest.mark.parametrize("line", [b"{}\n", b'{"type":"answer"', line_of("one") + line_of("two")])
def test_what_is_no_answer_is_the_end_of_the_worker(line: bytes) -> None:
    async def main() -> None:
        worker, job = asked()
        worker.pipe_data_received(STDOUT, line)
        worker.pipe_connection_lost(STDOUT, None)

        with pytest.raises(WorkerDiedError):
            await job.reply
        assert job.worker is worker

    run_async(main)


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    async def main() -> None:
        worker, job = asked()
        worker.pipe_data_received(STDOUT, line_of("one"))
        worker.pipe_data_received(STDOUT, line_of("forged"))
        assert await job.reply == Answer(content="one")

        after = Job(None, 60.0)
        worker.ask(after)
        with pytest.raises(WorkerDiedError):
            await after.reply

    run_async(main)


def test_an_answer_after_the_deadline_counts_no_more() -> None:
    async def main() -> None:
        worker, job = asked(timeout_s=0.0)
        with anyio.fail_after(5), pytest.raises(TimeoutError):
            await job.reply
        worker.on_free = lambda _worker: pytest.fail("its caller is about to kill it")
        worker.pipe_data_received(STDOUT, line_of("late"))

        assert job.worker is worker

    run_async(main)


def test_a_call_cancelled_in_the_queue_costs_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        pool = UserPool(tools_file=write_tools(tmp_path, TOOLS), rewards_file=None, max_workers=1)

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
        tools = write_tools(tmp_path, TOOLS)
        async with UserPool(tools_file=tools, rewards_file=None) as pool:
            names = ["split", *["pid"] * 20]
            split, *pids = [(await pool.call(name, {}, metadata={})).content for name in names]

        assert split == "original"
        assert len(set(pids)) == 1

    run_async(main)
