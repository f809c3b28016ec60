"""A task group for background work that ends with the block that started it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """Opens a task group whose tasks are cancelled when the block ends.

    An error of the block is raised as it is. A plain task group would wrap it in an
    ExceptionGroup, and callers that catch it by its type would miss it.
    """
    block_error: Exception | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except Exception as error:
            block_error = error
        finally:
            group.cancel_scope.cancel()
    if block_error is not None:
        raise block_error
