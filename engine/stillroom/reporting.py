"""Progress, cancellation and background tasks of a running stage."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from stillroom.errors import RunCancelledError

_CANCEL_POLL_S = 0.2


class Reporter(Protocol):
    """Receives the progress, metrics, notes and alarms of a running stage."""

    def progress(
        self, done: int, total: int, *, unit: str, phase: str, eta_s: float | None = None
    ) -> None:
        """Reports that `done` of `total` units of the phase are finished.

        eta_s: the seconds that are left; None: estimated from the phase's rate so far.
        """
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records measured values of one step."""
        ...

    def note(self, text: str) -> None:
        """Records a text for the user."""
        ...

    def alarms(self, current: Sequence[str]) -> None:
        """Replaces the reported alarms with `current`: texts with a problem and its remedy."""
        ...

    def is_cancelled(self) -> bool:
        """Returns whether the run has been asked to stop."""
        ...


def stop_if_cancelled(reporter: Reporter) -> None:
    """Raises RunCancelledError if the run has been asked to stop."""
    if reporter.is_cancelled():
        raise RunCancelledError


async def cancel_when_asked(reporter: Reporter, scope: anyio.CancelScope) -> None:
    """Waits until the run is asked to stop, then cancels the scope."""
    # A signal handler sets the flag, so there is no event to wait for.
    while not reporter.is_cancelled():  # noqa: ASYNC110
        await anyio.sleep(_CANCEL_POLL_S)
    scope.cancel()


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
