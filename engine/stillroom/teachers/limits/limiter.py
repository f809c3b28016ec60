"""Calls that wait until a controller lets them go."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

import anyio

from stillroom.teachers.limits.allowance import Allowance
from stillroom.teachers.limits.controller import LimitController
from stillroom.teachers.limits.words import LimitKind, LimitSettings, LimitUnit, Sent


class Limiter:
    """Lets calls go in the order in which they asked. One for each endpoint, key and model."""

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._controller = LimitController(settings)
        self._clock = clock
        self._queue: deque[_Turn] = deque()

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
        now = self._clock()
        if not self._queue and self._controller.ready_at(now, tokens) <= now:
            return self._controller.send(now, tokens)
        turn = _Turn(tokens)
        self._queue.append(turn)
        try:
            while turn.sent is None:
                await self._wait(turn)
        except BaseException:
            if turn.sent is not None:
                self.failed(turn.sent)
            else:
                self._queue.remove(turn)
                self._let_go()
            raise
        return turn.sent

    def accepted(self, sent: Sent) -> None:
        """Tells that the endpoint answered."""
        self._controller.accepted(sent, self._clock())
        self._let_go()

    def refused(self, sent: Sent, kind: LimitKind) -> None:
        """Tells that the endpoint found it too much."""
        self._controller.refused(sent, self._clock(), kind)
        self._let_go()

    def failed(self, sent: Sent) -> None:
        """Tells that the call came to nothing for another reason."""
        self._controller.failed(sent)
        self._let_go()

    def told(self, sent: Sent, allowances: Mapping[LimitUnit, Allowance]) -> None:
        """Tells what the endpoint's answer to a call says is left of its limits."""
        for unit, allowance in allowances.items():
            self._controller.told(sent, self._clock(), unit, allowance)

    async def _wait(self, turn: "_Turn") -> None:
        """Waits until there is news for a call; the first in the queue watches the clock."""
        wait_s = math.inf
        if turn is self._queue[0]:
            wait_s = self._controller.ready_at(self._clock(), turn.tokens) - self._clock()
        if wait_s < math.inf:
            with anyio.move_on_after(wait_s):
                await turn.woken.wait()
            self._let_go()
        else:
            await turn.woken.wait()
        turn.woken = anyio.Event()

    def _let_go(self) -> None:
        """Lets the first calls of the queue go as far as they may; the next one looks again."""
        while self._queue:
            first = self._queue[0]
            first.woken.set()
            if self._controller.ready_at(self._clock(), first.tokens) > self._clock():
                return
            first.sent = self._controller.send(self._clock(), first.tokens)
            self._queue.popleft()


class _Turn:
    """A call that waits."""

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self.sent: Sent | None = None
        self.woken = anyio.Event()
