"""Background tasks: they end with their block, and errors come out as what they are."""

import anyio
import anyio.lowlevel
import pytest

from fakes.waiting import run_async
from stillroom.reporting import background_tasks


def test_tasks_are_cancelled_when_the_block_ends() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        async with background_tasks() as tasks:
            tasks.start_soon(work)
            await anyio.lowlevel.checkpoint()

    run_async(main)
    assert ended == ["cancelled"]


def test_an_error_of_the_block_is_raised_as_itself() -> None:
    async def main() -> None:
        async with background_tasks() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise LookupError("from the block")

    with pytest.raises(LookupError, match="from the block"):
        run_async(main)


def test_an_error_of_a_task_ends_the_block() -> None:
    async def fail() -> None:
        raise LookupError("from a task")

    async def main() -> None:
        async with background_tasks() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as raised:
        run_async(main)
    assert raised.group_contains(LookupError, match="from a task")
