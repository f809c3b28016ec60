"""Keeps a run within its budget by reserving the worst-case cost of each call before it is sent."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import anyio
import msgspec

from stillroom.teachers.pricing import Price
from stillroom.types import SampledTurn, Usage

_HEADROOM = 1.25
"""The amount passed to `on_outstanding`, as a multiple of the amount in flight.

The margin keeps these calls rare, because each one is recorded in the journal.
"""
_LOWER_AFTER = 32
"""The announced amount is lowered after this many consecutive calls, or as many as were announced
if that is more, with less than half of it in flight."""
_NO_LIMIT = nullcontext[None]()


class BudgetSpentError(Exception):
    """The next call might exceed the budget, even if all calls in flight cost nothing."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Cost(msgspec.Struct, frozen=True, gc=False):
    """An amount of tokens and US dollars."""

    tokens: int = 0
    """The number of prompt and completion tokens."""
    usd: float = 0.0
    """The price in US dollars."""

    @classmethod
    def of(cls, usage: Usage, usd: float | None) -> "Cost":
        """Returns the cost of a call with this usage; an unknown price (None) counts as 0."""
        return cls(usage.prompt_tokens + usage.completion_tokens, usd or 0.0)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.tokens + other.tokens, self.usd + other.usd)


NO_COST = Cost()


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Calls that were sent and have no response yet."""

    calls: int = 0
    """The number of calls."""
    worst: Cost = NO_COST
    """The most that the calls can cost together."""

    def __add__(self, other: "Outstanding") -> "Outstanding":
        return Outstanding(self.calls + other.calls, self.worst + other.worst)


@dataclass(slots=True)
class Budget:
    """The limits on all calls of a run together, and the amounts spent and reserved so far.

    Each call goes through `reserve`, `record_sent` and `settle` in this order; `release` frees the
    reservation of a call that is not sent after all.
    """

    usd: float = math.inf
    """The maximum amount in US dollars that may be spent."""
    tokens: float = math.inf
    """The maximum number of tokens that may be used."""
    minutes: float = math.inf
    """The maximum number of minutes in which calls may be made, from the first reservation on."""
    spent: Cost = NO_COST
    """The cost of all finished calls, including those of earlier processes of the run."""
    unconfirmed: Cost = NO_COST
    """The part of `spent` that may not have been billed: the worst-case cost of interrupted calls,
    and of responses that did not state their usage."""
    other_usd: Callable[[], float] = lambda: 0.0
    """Returns other costs in US dollars that count towards the budget, e.g. the run's machine."""
    clock: Callable[[], float] = time.monotonic
    on_unconfirmed: Callable[[Cost], None] = lambda _cost: None
    """The callback that records each amount that may have been billed."""
    on_outstanding: Callable[[Outstanding], None] = lambda _announced: None
    """The callback that records an upper bound on the amount in flight, valid until it runs again.

    It runs before a call is sent. If this process dies, the recorded amount may have been billed.
    """
    reserved: Cost = NO_COST
    """The worst-case cost of all calls that are reserved and not yet settled, sent or not."""
    num_reserved: int = 0
    """The number of calls that are reserved and not yet settled."""
    _in_flight: Cost = NO_COST
    """The part of `reserved` that belongs to calls that were sent."""
    _num_in_flight: int = 0
    """The number of calls that were sent and are not yet settled."""
    _announced: Outstanding = Outstanding()
    """The amount last passed to `on_outstanding`."""
    _num_far_below: int = 0
    """The number of consecutive calls sent with less than half of the announced amount in
    flight."""
    _freed: anyio.Event | None = None
    """The event that is set when a reservation is freed; None if no call waits for it."""
    _started: float | None = None
    """The time of the first reservation according to `clock`; None before it."""

    async def reserve(self, worst: Cost) -> None:
        """Reserves the worst-case cost of a call, and waits until enough of the budget is free.

        Raises BudgetSpentError if there will never be enough.
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
        """Returns a context manager that cancels its body once `minutes` have passed.

        It then raises BudgetSpentError. Use it only around a wait, which costs nothing to cancel.
        """
        return _NO_LIMIT if self.minutes == math.inf else self._until_deadline()

    @contextmanager
    def _until_deadline(self) -> Generator[None]:
        """Cancels the block once `minutes` have passed, and then raises BudgetSpentError."""
        with anyio.move_on_after(self._seconds_left()) as scope:
            yield
        if scope.cancelled_caught:
            raise BudgetSpentError("max_minutes")

    def _seconds_left(self) -> float:
        passed_s = 0.0 if self._started is None else self.clock() - self._started
        return self.minutes * 60 - passed_s

    def record_sent(self, worst: Cost) -> None:
        """Records that the call for which `worst` was reserved is about to be sent."""
        calls, tokens = self._num_in_flight + 1, self._in_flight.tokens + worst.tokens
        usd = self._in_flight.usd + worst.usd
        announced = self._announced
        if calls > announced.calls or tokens > announced.worst.tokens or usd > announced.worst.usd:
            self._announce(calls, tokens, usd)
        elif 2 * calls < announced.calls or 2 * tokens < announced.worst.tokens:
            self._num_far_below += 1
            if self._num_far_below >= max(_LOWER_AFTER, announced.calls):
                self._announce(calls, tokens, usd)
        else:
            self._num_far_below = 0
        self._num_in_flight, self._in_flight = calls, Cost(tokens, usd)

    def _announce(self, calls: int, tokens: int, usd: float) -> None:
        """Passes the amount in flight, plus a margin within the budget, to `on_outstanding`."""
        most_usd = min(usd * _HEADROOM, max(usd, self.usd - self.spent.usd))
        most_tokens = min(tokens * _HEADROOM, max(tokens, self.tokens - self.spent.tokens))
        announced = Outstanding(
            math.ceil(calls * _HEADROOM), Cost(math.ceil(most_tokens), most_usd)
        )
        self.on_outstanding(announced)
        self._announced, self._num_far_below = announced, 0

    def announce_idle(self) -> None:
        """Announces that nothing is in flight, if that is so and was not announced before."""
        if not self._num_in_flight and self._announced.calls:
            self._announce(0, 0, 0.0)

    def release(self, worst: Cost) -> None:
        """Frees a call's reservation. Call it directly only for a call that was not sent."""
        self.num_reserved -= 1
        # Starting again from exactly 0 keeps rounding errors from adding up over a long run.
        usd = self.reserved.usd - worst.usd if self.num_reserved else 0.0
        self.reserved = Cost(self.reserved.tokens - worst.tokens, usd)
        if self._freed is not None:
            # All waiting calls check the budget again. Calls that wait later need a new event.
            self._freed.set()
            self._freed = None

    def settle(
        self, worst: Cost, actual: Cost, *, unconfirmed: Cost = NO_COST, was_sent: bool = True
    ) -> None:
        """Replaces a call's reservation with its actual cost.

        `unconfirmed` is a possible additional cost. `was_sent` is False if `record_sent` was not
        called before.
        """
        if unconfirmed != NO_COST:
            self.unconfirmed = self.unconfirmed + unconfirmed
            self.on_unconfirmed(unconfirmed)
            actual = actual + unconfirmed
        self.spent = self.spent + actual
        if was_sent:
            self._num_in_flight -= 1
            usd = self._in_flight.usd - worst.usd if self._num_in_flight else 0.0
            self._in_flight = Cost(self._in_flight.tokens - worst.tokens, usd)
        self.release(worst)

    def settle_unconfirmed(self, worst: Cost) -> None:
        """Counts the worst case as spent, for a call that was interrupted after it was sent."""
        self.settle(worst, NO_COST, unconfirmed=worst)

    def _exceeded(self, worst: Cost) -> str | None:
        """Returns the name of the limit that a call could exceed; None if it fits the budget."""
        usd = self.spent.usd + self.reserved.usd + worst.usd
        if self.usd < math.inf and usd + self.other_usd() > self.usd:
            return "budget_usd"
        if self.spent.tokens + self.reserved.tokens + worst.tokens > self.tokens:
            return "max_total_tokens"
        if self.minutes < math.inf and self._seconds_left() <= 0:
            return "max_minutes"
        return None


@dataclass(slots=True)
class Overrun:
    """The largest amounts by which responses exceeded the worst case computed for their
    requests."""

    prompt_tokens: int = 0
    """The maximum number of prompt tokens beyond the number of bytes in the request."""
    completion_tokens: int = 0
    """The maximum number of completion tokens beyond the request's `max_tokens`."""
    usd: float = 0.0
    """The maximum amount in US dollars by which a call cost more than the price of its tokens."""

    def record(
        self, turn: SampledTurn, num_bytes: int, max_tokens: int, price: Price | None
    ) -> None:
        """Records the usage of a response, so that later calls also reserve its overrun.

        `num_bytes` and `max_tokens` are the size and the completion limit of its request.
        """
        usage = turn.usage
        self.prompt_tokens = max(self.prompt_tokens, usage.prompt_tokens - num_bytes)
        self.completion_tokens = max(self.completion_tokens, usage.completion_tokens - max_tokens)
        if price is not None and turn.cost_usd is not None and usage.completion_tokens:
            self.usd = max(self.usd, turn.cost_usd - price.of(usage))
