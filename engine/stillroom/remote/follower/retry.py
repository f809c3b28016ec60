"""When something that broke is tried again."""

import random
from collections.abc import Callable

_FIRST_S, _SOON_S, _MOST_S = 1.0, 5.0, 30.0
_NUM_SOON = 60
"""A network that comes back within minutes is noticed within seconds."""
_LIVED_S = 10.0


class Backoff:
    """Waits that grow from 1 s to 5 s, and after minutes to 30 s; none after what held at first."""

    def __init__(
        self, *, most_s: float = _MOST_S, draw: Callable[[], float] = random.random
    ) -> None:
        self._most_s, self._draw = most_s, draw
        self._num_tries = 0
        self._held_s = 0.0

    def held(self, seconds: float) -> None:
        """Notes how long the connection has held by now."""
        self._held_s = max(self._held_s, seconds)

    def next_s(self) -> float:
        """Returns how long to wait before the next try."""
        if self._held_s >= _LIVED_S:
            self._num_tries = 0
            self._held_s = 0.0
            return 0.0
        self._num_tries += 1
        most_s = _SOON_S if self._num_tries <= _NUM_SOON else _MOST_S
        wait_s = min(self._most_s, most_s, _FIRST_S * 2 ** (self._num_tries - 1))
        return wait_s * (0.5 + 0.5 * self._draw())
