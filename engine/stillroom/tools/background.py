"""Where tool sessions live: tasks and processes that outlive the call which started them."""

from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from stillroom.tools.guard import Guard


class Background:
    """A task group and a guard over processes; use as an async context manager.

    An error of the body comes out as itself, not in a group.
    """

    def __init__(self) -> None:
        self.group: TaskGroup
        self.guard = Guard()

    async def __aenter__(self) -> Self:
        await self.guard.__aenter__()
        self.group = anyio.create_task_group()
        await self.group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self.group.cancel_scope.cancel()
        try:
            return await self.group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            if error is not None and list(errors.exceptions) == [error]:
                return False
            raise
        finally:
            await self.guard.__aexit__(kind, error, trace)
