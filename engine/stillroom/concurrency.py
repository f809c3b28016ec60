"""A task group for background work that ends with the block that started it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """Opens a task group whose tasks are cancelled when the block ends.

    An error in the block is raised unchanged. A plain task group would wrap it in an
    ExceptionGroup, which callers that catch the error by its type would miss.
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
