"""Calls that wait until a controller lets them go."""

from collections import deque
from collections.abc import Callable, Mapping

import anyio

from stillroom.teachers.allowance import Allowance
from stillroom.teachers.limit_types import LimitKind, LimitSettings, LimitUnit, Sent
from stillroom.teachers.limits import LimitController


class Limiter:
    """Lets calls go in the order in which they asked. One for each endpoint, key and model."""

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._controller = LimitController(settings)
        self._clock = clock
        self._queue: deque[anyio.Event] = deque()
        self._is_first_woken = anyio.Event()

    @property
    def window(self) -> int:
        """How many calls may be on their way now."""
        return int(self._controller.window)

    @property
    def pace(self) -> float | None:
        """How much is let go in a second, in `unit`; None where nothing limits that so far."""
        return self._controller.pace

    @property
    def unit(self) -> LimitUnit:
        """What the pace counts."""
        return self._controller.unit

    async def acquire(self, tokens: float = 0.0) -> Sent:
        """Waits for this call's turn; each call must end in accepted, refused or failed.

        `tokens` is about what it counts where tokens are limited; right up to a factor is enough.
        """
        if not self._queue and self._controller.ready_at(self._clock(), tokens) <= self._clock():
            return self._controller.send(self._clock(), tokens)
        is_first = anyio.Event()
        if not self._queue:
            is_first.set()
        self._queue.append(is_first)
        try:
            await is_first.wait()
            await self._wait_until_ready(tokens)
            return self._controller.send(self._clock(), tokens)
        finally:
            self._queue.remove(is_first)
            if self._queue:
                self._queue[0].set()

    def accepted(self, sent: Sent) -> None:
        """Tells that the endpoint answered."""
        self._controller.accepted(sent, self._clock())
        self._is_first_woken.set()

    def refused(self, sent: Sent, kind: LimitKind) -> None:
        """Tells that the endpoint found it too much."""
        self._controller.refused(sent, self._clock(), kind)
        self._is_first_woken.set()

    def failed(self, sent: Sent) -> None:
        """Tells that the call came to nothing for another reason."""
        self._controller.failed(sent)
        self._is_first_woken.set()

    def told(self, sent: Sent, allowances: Mapping[LimitUnit, Allowance]) -> None:
        """Tells what the endpoint's answer to a call says is left of its limits."""
        for unit, allowance in allowances.items():
            self._controller.told(sent, self._clock(), unit, allowance)

    async def _wait_until_ready(self, tokens: float) -> None:
        while (ready_at := self._controller.ready_at(self._clock(), tokens)) > self._clock():
            self._is_first_woken = anyio.Event()
            with anyio.move_on_after(ready_at - self._clock()):
                await self._is_first_woken.wait()
