"""A clock that jumps from one event to the next."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Stands in for the time module in endpoint.py."""

    def __init__(self) -> None:
        self.now, self._events, self._numbers = 0.0, [], count()

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call, args))

    def run(self) -> None:
        while self._events:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)
