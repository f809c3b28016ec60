"""Makes calls wait until the controller allows them to be sent."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

import anyio

from stillroom.teachers.limits.allowance import Allowance
from stillroom.teachers.limits.controller import LimitController
from stillroom.teachers.limits.limit_types import LimitKind, LimitSettings, LimitUnit, Sent


class Limiter:
    """Admits calls in the order in which they asked.

    Each combination of endpoint, key and model needs its own limiter.
    """

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._controller = LimitController(settings)
        self._clock = clock
        self._queue: deque[_Turn] = deque()

    @property
    def window(self) -> int:
        """The number of calls that may be in flight now."""
        return int(self._controller.window)

    @property
    def pace(self) -> float | None:
        """The requests or tokens (see `unit`) admitted per second; None if no limit is known."""
        return self._controller.pace

    @property
    def unit(self) -> LimitUnit:
        """The unit of `pace`."""
        return self._controller.unit

    async def acquire(self, tokens: float = 0.0) -> Sent:
        """Waits until this call may be sent, and returns its record for the outcome.

        The caller must then report the outcome with `accepted`, `refused` or `failed`. `tokens` is
        an estimate of the call's tokens, which may be wrong by a constant factor.
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
        """Reports that the endpoint accepted the call."""
        self._controller.accepted(sent, self._clock())
        self._let_go()

    def refused(self, sent: Sent, kind: LimitKind) -> None:
        """Reports that a limit of the endpoint refused the call."""
        self._controller.refused(sent, self._clock(), kind)
        self._let_go()

    def failed(self, sent: Sent) -> None:
        """Reports that the call failed for a reason other than a limit."""
        self._controller.failed(sent)
        self._let_go()

    def follow_headers(self, sent: Sent, allowances: Mapping[LimitUnit, Allowance]) -> None:
        """Reports what remains of the endpoint's limits, from the headers of a call's response."""
        for unit, allowance in allowances.items():
            self._controller.follow_headers(sent, self._clock(), unit, allowance)

    async def _wait(self, turn: "_Turn") -> None:
        """Waits until a call is woken; the first one in the queue also wakes when it may go."""
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
        """Admits calls from the front of the queue, and wakes the first one that must still wait.

        That call then computes anew how long it must wait.
        """
        while self._queue:
            first = self._queue[0]
            first.woken.set()
            if self._controller.ready_at(self._clock(), first.tokens) > self._clock():
                return
            first.sent = self._controller.send(self._clock(), first.tokens)
            self._queue.popleft()


class _Turn:
    """A call that waits in the queue."""

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self.sent: Sent | None = None
        self.woken = anyio.Event()
