"""Makes calls wait until the controller allows them to be sent."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio

from stillroom.teachers.limits.allowance import Allowance, AllowancePace
from stillroom.teachers.limits.concurrency_search import ConcurrencySearch
from stillroom.teachers.limits.limit_types import LimitKind, LimitSettings, LimitUnit, SentRequest
from stillroom.teachers.limits.rate_search import RateSearch

_CATCH_UP_S = 0.01
"""A request that is sent up to this much later than allowed does not delay the next ones."""
_MIN_TRIP_VARIATION = 0.1
"""Round trips vary if their mean deviation is more than this share of their mean."""
_SPACING_FACTOR = 3.0
"""Under a concurrency limit, requests are sent at most this many times as fast as responses arrive.

Sent all at once, they would empty the bucket of any additional rate limit.
"""
_MAX_HELD_S = 60.0
"""This many seconds after the last request, the pace no longer holds the next one back.

Without a request, no response could ever show that the limit has changed.
"""
_UNIT_BY_KIND = {LimitKind.REQUESTS: LimitUnit.REQUESTS, LimitKind.TOKENS: LimitUnit.TOKENS}


class Limiter:
    """Admits calls in the order in which they arrived.

    Each combination of endpoint, key and model needs its own limiter.
    """

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._controller = LimitController(settings)
        self._clock = clock
        self._queue: deque[_WaitingCall] = deque()

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

    async def acquire(self, tokens: float = 0.0) -> SentRequest:
        """Waits until this call may be sent, and returns its record for the outcome.

        The caller must then report the outcome with a method such as `record_accepted`. `tokens` is
        an estimate of the call's tokens, which may be wrong by a constant factor.
        """
        now = self._clock()
        if not self._queue and self._controller.ready_at(now, tokens) <= now:
            return self._controller.record_sent(now, tokens)
        call = _WaitingCall(tokens)
        self._queue.append(call)
        try:
            while call.sent is None:
                await self._wait(call)
        except BaseException:
            if call.sent is not None:
                self.record_failed(call.sent)
            else:
                self._queue.remove(call)
                self._admit_waiting()
            raise
        return call.sent

    def record_accepted(self, sent: SentRequest) -> None:
        """Reports that the endpoint accepted the call."""
        self._controller.record_accepted(sent, self._clock())
        self._admit_waiting()

    def record_refused(self, sent: SentRequest, kind: LimitKind) -> None:
        """Reports that a limit of the endpoint refused the call."""
        self._controller.record_refused(sent, self._clock(), kind)
        self._admit_waiting()

    def record_failed(self, sent: SentRequest) -> None:
        """Reports that the call failed for a reason other than a limit."""
        self._controller.record_failed(sent)
        self._admit_waiting()

    def record_allowances(
        self, sent: SentRequest, allowances: Mapping[LimitUnit, Allowance]
    ) -> None:
        """Reports what remains of the endpoint's limits, according to a response's headers."""
        for unit, allowance in allowances.items():
            self._controller.record_allowance(sent, self._clock(), unit, allowance)

    async def _wait(self, call: "_WaitingCall") -> None:
        """Waits until a call is woken, or may be sent if it is the first in the queue."""
        wait_s = math.inf
        if call is self._queue[0]:
            wait_s = self._controller.ready_at(self._clock(), call.tokens) - self._clock()
        if wait_s < math.inf:
            with anyio.move_on_after(wait_s):
                await call.woken.wait()
            self._admit_waiting()
        else:
            await call.woken.wait()
        call.woken = anyio.Event()

    def _admit_waiting(self) -> None:
        """Admits calls from the front of the queue, and wakes the first one that must still wait.

        That call then computes again how long it must wait.
        """
        while self._queue:
            first = self._queue[0]
            first.woken.set()
            if self._controller.ready_at(self._clock(), first.tokens) > self._clock():
                return
            first.sent = self._controller.record_sent(self._clock(), first.tokens)
            self._queue.popleft()


class _WaitingCall:
    """A call that waits in the queue."""

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self.sent: SentRequest | None = None
        self.woken = anyio.Event()


@dataclass(slots=True)
class _Pacer:
    """Spaces requests so that the amount sent per second does not exceed the pace."""

    free_at: float = -math.inf
    """The time until which the requests sent so far use up the pace.

    The next request may be sent `amount / pace` seconds after it.
    """
    is_reached: bool = False
    """Whether requests have been sent as fast as the pace allows since this was last reset."""

    def ready_at(self, amount: float, pace: float) -> float:
        return self.free_at + amount / pace

    def record_sent(self, now: float, amount: float, pace: float) -> None:
        ready_at = self.free_at + amount / pace
        self.is_reached |= now - ready_at < max(_CATCH_UP_S, amount / pace)
        self.free_at = max(ready_at, now - _CATCH_UP_S)


class LimitController:
    """Decides when the next request may be sent. All times are seconds of one monotonic clock."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self.in_flight = 0
        self.window = float(min(settings.initial_in_flight, settings.max_in_flight))
        """The number of requests that may be in flight, rounded down."""
        self._num_sent = 0
        self._tokens_sent = 0.0
        self._episode_end = 0
        """The number of the last request sent before the last cut; refusals up to it give no new
        information."""
        self._trip_s = self._refusal_trip_s = 0.0
        """The average round trips, in seconds, of accepted and of refused requests."""
        self._trip_deviation_s = 0.0
        """The average deviation of a round trip from `_trip_s`, in seconds."""
        self._rate = RateSearch(settings)
        self._concurrency = ConcurrencySearch(settings)
        self._pacer = _Pacer()
        self._last_at = -math.inf
        """The time of the last request; later requests are spaced from it."""
        self._header_limits = {unit: AllowancePace() for unit in LimitUnit}
        self._header_pacers = {unit: _Pacer() for unit in LimitUnit}

    @property
    def pace(self) -> float | None:
        """The requests or tokens (see `unit`) to send per second; None if no limit is known."""
        return self._rate.pace

    @property
    def unit(self) -> LimitUnit:
        """The unit of `pace`."""
        return self._rate.unit

    def ready_at(self, now: float, tokens: float = 0.0) -> float:
        """Returns the time at which a request may be sent; inf while the window is full."""
        if self.in_flight >= int(self.window):
            return math.inf
        ready_at = now
        if self.pace is not None:
            ready_at = self._pacer.ready_at(_amount(self.unit, tokens), self.pace)
        elif self._concurrency.has_limit:
            ready_at = self._last_at + self._spacing_s()
        for unit, header_limit in self._header_limits.items():
            if header_limit.pace is not None:
                paced_at = self._header_pacers[unit].ready_at(
                    _amount(unit, tokens), header_limit.pace
                )
                ready_at = max(ready_at, paced_at)
        return max(now, min(ready_at, self._last_at + _MAX_HELD_S))

    def record_sent(self, now: float, tokens: float = 0.0) -> SentRequest:
        """Records a request that is sent now, and returns its record."""
        self.in_flight += 1
        self._num_sent += 1
        if self.pace is not None:
            self._pacer.record_sent(now, _amount(self.unit, tokens), self.pace)
        for unit, header_limit in self._header_limits.items():
            if header_limit.pace is not None:
                self._header_pacers[unit].record_sent(now, _amount(unit, tokens), header_limit.pace)
        sent = SentRequest(
            number=self._num_sent,
            at=now,
            in_flight=self.in_flight,
            fills_window=self.in_flight >= int(self.window),
            tokens=tokens,
            tokens_before=self._tokens_sent,
        )
        self._tokens_sent += tokens
        spacing_s = self._spacing_s() if self._concurrency.has_limit else 0.0
        self._last_at = max(now - _CATCH_UP_S, self._last_at + spacing_s)
        return sent

    def record_accepted(self, sent: SentRequest, now: float) -> None:
        """Updates the limits after the response of an accepted request."""
        self.in_flight -= 1
        self._trip_s = _smoothed(self._trip_s, now - sent.at)
        difference_s = abs(now - sent.at - self._trip_s)
        self._trip_deviation_s += (difference_s - self._trip_deviation_s) * 0.1
        self._rate.record_accepted(sent, now)
        self._concurrency.record_accepted(sent)
        if self._concurrency.has_limit:
            self.window = self._concurrency.next_window(self.window, now)
        elif sent.in_flight * 2 > self.window:
            # One more per accepted request doubles the window each round trip. It grows only while
            # at least half of it is used, since a wider one would otherwise not be tested.
            self.window = min(self._settings.max_in_flight, self.window + 1)
        if self._pacer.is_reached and self._rate.grow(now, self._refusal_trip_s):
            self._pacer.is_reached = False

    def record_refused(
        self, sent: SentRequest, now: float, kind: LimitKind = LimitKind.UNKNOWN
    ) -> None:
        """Updates the limits after a refused request.

        One cut is made for all refused requests that were in flight at the same time.
        """
        self.in_flight -= 1
        self._refusal_trip_s = _smoothed(self._refusal_trip_s, now - sent.at)
        self._rate.record_refused(sent)
        self._concurrency.record_refused()
        if sent.number <= self._episode_end:
            return
        self._episode_end = self._num_sent
        unit = _UNIT_BY_KIND.get(kind)
        if self._delay_if_stated(unit):
            return
        is_concurrency = kind is LimitKind.CONCURRENCY or not self._rate.has_answers
        if is_concurrency or (
            kind is LimitKind.UNKNOWN
            and self._concurrency.explains(
                sent,
                self._rate,
                round_trips_vary=self._trip_deviation_s > _MIN_TRIP_VARIATION * self._trip_s,
            )
        ):
            self.window = self._concurrency.cut(sent, now)
            self._rate.forget_limit(sent, now)
            return
        self._concurrency.forget_limit()
        self._rate.cut(sent, now, self._trip_s, unit)
        self._pacer.is_reached = False
        self._pacer.free_at = now + self._rate.pause_s(sent.amount(self.unit))

    def record_failed(self, _sent: SentRequest) -> None:
        """Records the end of a request that failed for reasons other than a limit."""
        self.in_flight -= 1

    def record_allowance(
        self, sent: SentRequest, now: float, unit: LimitUnit, allowance: Allowance
    ) -> None:
        """Updates what remains of a limit, according to a response's headers."""
        self._header_limits[unit].update(allowance, sent, self._total(unit), unit, now)

    def _total(self, unit: LimitUnit) -> float:
        return float(self._num_sent) if unit is LimitUnit.REQUESTS else self._tokens_sent

    def _spacing_s(self) -> float:
        """Returns the seconds between requests under a concurrency limit; see `_SPACING_FACTOR`."""
        return self._trip_s / (self.window * _SPACING_FACTOR)

    def _delay_if_stated(self, unit: LimitUnit | None) -> bool:
        """Delays the next request if a limit in the headers explains a refusal.

        Returns whether one does. `unit` is the unit that the refusal names, or None.
        """
        for limited in LimitUnit if unit is None else (unit,):
            header_limit = self._header_limits[limited]
            if (
                header_limit.accounts_for_refusal(self._total(limited))
                and header_limit.pace is not None
            ):
                self._header_pacers[limited].free_at += 1.0 / header_limit.pace
                return True
        return False


def _amount(unit: LimitUnit, tokens: float) -> float:
    return 1.0 if unit is LimitUnit.REQUESTS else tokens


def _smoothed(before: float, value: float) -> float:
    return before + (value - before) * 0.1 if before else value
