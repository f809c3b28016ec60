"""Bounded waiting for something another process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
    """Returns once the condition holds; fails the test if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain"
        time.sleep(0.02)
