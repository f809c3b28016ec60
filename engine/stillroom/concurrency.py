"""Two patterns around anyio's task groups that several packages need."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from stillroom.reporting import Reporter

_CANCEL_POLL_S = 0.2


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


async def cancel_with_run(reporter: Reporter, scope: anyio.CancelScope) -> None:
    """Cancels `scope` as soon as the run has been asked to stop; otherwise it never returns."""
    # A signal handler sets the flag, so there is no event to wait for.
    while not reporter.is_cancelled():  # noqa: ASYNC110
        await anyio.sleep(_CANCEL_POLL_S)
    scope.cancel()
