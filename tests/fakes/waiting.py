"""Bounded waiting: for what another process does, and for async bodies of tests."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
    """Returns once the condition holds; fails the test if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain"
        time.sleep(0.02)


def run_async(function: Callable[..., Awaitable[Any]], *args: Any, within_s: float = 100) -> Any:
    """Runs an async function in an event loop of its own and returns what it returns."""

    async def bounded() -> Any:
        with anyio.fail_after(within_s):
            return await function(*args)

    return anyio.run(bounded)
