"""What a run may spend: the worst case of a call is set aside before it is sent."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import anyio
import msgspec

from stillroom.types import Usage


class BudgetSpentError(Exception):
    """The next call might cost more than is left, and no call that is out can give any back."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Tokens and US dollars."""

    tokens: int = 0
    usd: float = 0.0

    @classmethod
    def of(cls, usage: Usage, usd: float | None) -> "Cost":
        """Returns what was billed; a price that is unknown counts as nothing."""
        return cls(usage.prompt_tokens + usage.completion_tokens, usd or 0.0)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.tokens + other.tokens, self.usd + other.usd)


NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Calls that were sent and have no answer yet."""

    calls: int = 0
    worst: Cost = NOTHING
    """What they cost at most."""

    def __add__(self, other: "Outstanding") -> "Outstanding":
        return Outstanding(self.calls + other.calls, self.worst + other.worst)


_HEADROOM = 1.25
"""So much more than is out is announced, so that it is announced seldom."""
_LOWERED_AFTER = 32
"""So many calls in a row, and as many as were announced, found less than half of that out."""


_NO_LIMIT = nullcontext[None]()


@dataclass(slots=True)
class Budget:
    """Limits on all calls of a run together. Amounts that were spent earlier count."""

    usd: float = math.inf
    tokens: float = math.inf
    minutes: float = math.inf
    spent: Cost = NOTHING
    unconfirmed: Cost = NOTHING
    """Of the spent: worst cases of calls that broke off, which may have been billed, and of answers
    that did not say what they took."""
    clock: Callable[[], float] = time.monotonic
    on_unconfirmed: Callable[[Cost], None] = lambda _cost: None
    """Hears of each amount that may have been billed, to put it on record."""
    on_outstanding: Callable[[Outstanding], None] = lambda _most: None
    """Hears, before a call is sent, of the most that is out from now on until it hears again: what
    may have been billed where nothing more is heard of this process."""
    reserved: Cost = NOTHING
    num_reserved: int = 0
    _out: Cost = NOTHING
    """Of what is reserved: calls that were sent."""
    _num_out: int = 0
    _announced: Outstanding = Outstanding()
    _num_far_below: int = 0
    _freed: anyio.Event | None = None
    """For those who wait for something to come back, where somebody does."""
    _started: float | None = None

    async def reserve(self, worst: Cost) -> None:
        """Sets the worst case aside, or waits until enough has come back.

        Raises BudgetSpentError if it never will.
        """
        if self._started is None:
            self._started = self.clock()
        while (limit := self._exceeded(worst)) is not None:
            if not self.num_reserved or limit == "max_minutes":
                raise BudgetSpentError(limit)
            self._freed = self._freed or anyio.Event()
            with self.within_time():
                await self._freed.wait()
        self.reserved = self.reserved + worst
        self.num_reserved += 1

    def within_time(self) -> AbstractContextManager[None]:
        """Breaks off a wait, which costs nothing, when the minutes are over.

        Raises BudgetSpentError then.
        """
        return _NO_LIMIT if self.minutes == math.inf else self._until_time_is_over()

    @contextmanager
    def _until_time_is_over(self) -> Generator[None]:
        with anyio.move_on_after(self._seconds_left()) as scope:
            yield
        if scope.cancelled_caught:
            raise BudgetSpentError("max_minutes")

    def _seconds_left(self) -> float:
        passed_s = 0.0 if self._started is None else self.clock() - self._started
        return self.minutes * 60 - passed_s

    def send(self, worst: Cost) -> None:
        """Takes down that the call which this was set aside for is sent to who bills it."""
        calls, tokens, usd = self._num_out + 1, self._out.tokens + worst.tokens, worst.usd
        usd += self._out.usd
        announced = self._announced
        if calls > announced.calls or tokens > announced.worst.tokens or usd > announced.worst.usd:
            self._tell(calls, tokens, usd)
        elif 2 * calls < announced.calls or 2 * tokens < announced.worst.tokens:
            self._num_far_below += 1
            if self._num_far_below >= max(_LOWERED_AFTER, announced.calls):
                self._tell(calls, tokens, usd)
        else:
            self._num_far_below = 0
        self._num_out, self._out = calls, Cost(tokens, usd)

    def _tell(self, calls: int, tokens: int, usd: float) -> None:
        """Tells somewhat more than is out, but not more than can be spent."""
        most_usd = min(usd * _HEADROOM, max(usd, self.usd - self.spent.usd))
        most_tokens = min(tokens * _HEADROOM, max(tokens, self.tokens - self.spent.tokens))
        announced = Outstanding(
            math.ceil(calls * _HEADROOM), Cost(math.ceil(most_tokens), most_usd)
        )
        self.on_outstanding(announced)
        self._announced, self._num_far_below = announced, 0

    def give_back(self, worst: Cost) -> None:
        """Frees what was set aside for a call; without `settle` for one that was not sent."""
        self.num_reserved -= 1
        # From whole tokens and no rounding left over, so that nothing adds up over a long run.
        usd = self.reserved.usd - worst.usd if self.num_reserved else 0.0
        self.reserved = Cost(self.reserved.tokens - worst.tokens, usd)
        if self._freed is not None:
            # All who wait look again; those who come later wait for the next.
            self._freed.set()
            self._freed = None

    def settle(
        self, worst: Cost, actual: Cost, *, unconfirmed: Cost = NOTHING, was_sent: bool = True
    ) -> None:
        """Puts what a call did cost in the place of what was set aside for it.

        `unconfirmed` is what it may have cost beside that.
        """
        if unconfirmed != NOTHING:
            self.unconfirmed = self.unconfirmed + unconfirmed
            self.on_unconfirmed(unconfirmed)
            actual = actual + unconfirmed
        self.spent = self.spent + actual
        if was_sent:
            self._num_out -= 1
            usd = self._out.usd - worst.usd if self._num_out else 0.0
            self._out = Cost(self._out.tokens - worst.tokens, usd)
        self.give_back(worst)

    def settle_unconfirmed(self, worst: Cost) -> None:
        """Counts the worst case of a call that broke off after it was sent."""
        self.settle(worst, NOTHING, unconfirmed=worst)

    def _exceeded(self, worst: Cost) -> str | None:
        if self.spent.usd + self.reserved.usd + worst.usd > self.usd:
            return "budget_usd"
        if self.spent.tokens + self.reserved.tokens + worst.tokens > self.tokens:
            return "max_total_tokens"
        if self.minutes < math.inf and self._seconds_left() <= 0:
            return "max_minutes"
        return None
