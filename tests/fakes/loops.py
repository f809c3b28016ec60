"""Async test bodies, run to their end or failed in time."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio


def run_async(function: Callable[..., Awaitable[Any]], *args: Any, within_s: float = 120) -> Any:
    """Runs an async function in an event loop of its own and returns what it returns."""

    async def bounded() -> Any:
        with anyio.fail_after(within_s):
            return await function(*args)

    return anyio.run(bounded)
