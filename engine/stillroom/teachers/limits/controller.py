"""How fast and how many at once: a controller that learns an endpoint's limits from its refusals.

Pure: time comes in as an argument, so it runs against a simulated clock. Three parts work together:
`LimitSettings` says what is wished, `LimitController` decides, `limiter.Limiter` makes calls wait.

It starts with a few requests in flight and doubles them each round trip until one is refused. What
is limited then shows by what helps: held at one less in flight, an endpoint that counts how many
are out refuses no more; one that counts how many come, or how many tokens, does (`rate_search`).
Where an endpoint says in its headers what is left, that is believed instead of tried (`allowance`).
"""

import math
from dataclasses import dataclass

from stillroom.teachers.limits.allowance import Allowance, AllowanceFollower
from stillroom.teachers.limits.concurrency_search import ConcurrencySearch
from stillroom.teachers.limits.rate_search import RateSearch
from stillroom.teachers.limits.words import LimitKind, LimitSettings, LimitUnit, Sent

_CATCH_UP_S = 0.01
"""A request that comes so late does not push back those after it."""
_VARIES = 0.1
_SPACED = 3.0
"""Where only the window holds requests back, they come at most so many times as fast as they can
be answered: not all at the same moment, which would empty any bucket."""
_LONGEST_HELD_S = 60.0
"""So long after the last request the next may go whatever is thought of the limits: only an answer
can show that they are no longer so."""
_UNITS_OF = {LimitKind.REQUESTS: LimitUnit.REQUESTS, LimitKind.TOKENS: LimitUnit.TOKENS}


@dataclass(slots=True)
class _Pacer:
    """Spaces requests so that in each unit of time no more than the pace is sent."""

    free_at: float = -math.inf
    """When all that was sent so far has been paid off."""
    is_reached: bool = False
    """Whether requests have waited for the pace since this was last put to False."""

    def ready_at(self, amount: float, pace: float) -> float:
        return self.free_at + amount / pace

    def send(self, now: float, amount: float, pace: float) -> None:
        ready_at = self.free_at + amount / pace
        self.is_reached |= now - ready_at < max(_CATCH_UP_S, amount / pace)
        self.free_at = max(ready_at, now - _CATCH_UP_S)


class LimitController:
    """Decides when the next request may go. All times are seconds of one monotonic clock."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self.in_flight = 0
        self.window = float(min(settings.start, settings.most))
        """How many may be in flight."""
        self._num_sent = 0
        self._tokens_sent = 0.0
        self._episode_end = 0
        """Requests up to this number were sent before the last cut."""
        self._trip_s = self._refusal_trip_s = 0.0
        self._trips_differ_s = 0.0
        """How much a trip takes more or less than most."""
        self._rate = RateSearch(settings)
        self._concurrency = ConcurrencySearch(settings)
        self._pacer = _Pacer()
        self._last_at = -math.inf
        self._told = {unit: AllowanceFollower() for unit in LimitUnit}
        self._told_pacers = {unit: _Pacer() for unit in LimitUnit}

    @property
    def pace(self) -> float | None:
        """What may be sent in a second, in `unit`; None where nothing showed a limit on it."""
        return self._rate.pace

    @property
    def unit(self) -> LimitUnit:
        """What the pace counts."""
        return self._rate.unit

    def ready_at(self, now: float, tokens: float = 0.0) -> float:
        """Returns when a request may go: `now`, later, or inf while too many are out."""
        if self.in_flight >= int(self.window):
            return math.inf
        ready_at = now
        if self.pace is not None:
            ready_at = self._pacer.ready_at(_amount(self.unit, tokens), self.pace)
        elif self._concurrency.is_found:
            ready_at = self._last_at + self._spacing_s()
        for unit, told in self._told.items():
            if told.pace is not None:
                told_at = self._told_pacers[unit].ready_at(_amount(unit, tokens), told.pace)
                ready_at = max(ready_at, told_at)
        return max(now, min(ready_at, self._last_at + _LONGEST_HELD_S))

    def send(self, now: float, tokens: float = 0.0) -> Sent:
        """Counts a request that goes out now."""
        self.in_flight += 1
        self._num_sent += 1
        if self.pace is not None:
            self._pacer.send(now, _amount(self.unit, tokens), self.pace)
        for unit, told in self._told.items():
            if told.pace is not None:
                self._told_pacers[unit].send(now, _amount(unit, tokens), told.pace)
        sent = Sent(
            number=self._num_sent,
            at=now,
            in_flight=self.in_flight,
            fills_window=self.in_flight >= int(self.window),
            tokens=tokens,
            tokens_before=self._tokens_sent,
        )
        self._tokens_sent += tokens
        spacing_s = self._spacing_s() if self._concurrency.is_found else 0.0
        self._last_at = max(now - _CATCH_UP_S, self._last_at + spacing_s)
        return sent

    def accepted(self, sent: Sent, now: float) -> None:
        """Learns that the endpoint took a request; called when its answer is there."""
        self.in_flight -= 1
        self._trip_s = _smoothed(self._trip_s, now - sent.at)
        difference_s = abs(now - sent.at - self._trip_s)
        self._trips_differ_s += (difference_s - self._trips_differ_s) * 0.1
        self._rate.accepted(sent, now)
        self._concurrency.accepted(sent)
        if self._concurrency.is_found:
            self.window = self._concurrency.grown(self.window, now)
        elif sent.in_flight * 2 > self.window:
            # Doubles in a round trip, and only while the window is what holds requests back.
            self.window = min(self._settings.most, self.window + 1)
        if self._pacer.is_reached and self._rate.grow(now, self._refusal_trip_s):
            self._pacer.is_reached = False

    def refused(self, sent: Sent, now: float, kind: LimitKind = LimitKind.UNKNOWN) -> None:
        """Learns that a request was too much; one cut answers all that were on their way."""
        self.in_flight -= 1
        self._refusal_trip_s = _smoothed(self._refusal_trip_s, now - sent.at)
        self._rate.refused(sent)
        self._concurrency.refused()
        if sent.number <= self._episode_end:
            return
        self._episode_end = self._num_sent
        unit = _UNITS_OF.get(kind)
        if self._told_refused(unit):
            return
        is_concurrency = kind is LimitKind.CONCURRENCY or not self._rate.has_answers
        if is_concurrency or (
            kind is LimitKind.UNKNOWN
            and self._concurrency.explains(
                sent, self._rate, do_trips_vary=self._trips_differ_s > _VARIES * self._trip_s
            )
        ):
            self.window = self._concurrency.cut(sent, now)
            self._rate.let_go(sent, now)
            return
        self._concurrency.let_go()
        self._rate.cut(sent, now, self._trip_s, unit)
        self._pacer.is_reached = False
        self._pacer.free_at = now + self._rate.pause_s(sent.amount(self.unit))

    def failed(self, _sent: Sent) -> None:
        """Counts a request that came back with nothing that tells about limits."""
        self.in_flight -= 1

    def told(self, sent: Sent, now: float, unit: LimitUnit, allowance: Allowance) -> None:
        """Learns what the answer to a request says is left of a limit."""
        self._told[unit].follow(allowance, sent, self._total(unit), unit, now)

    def _total(self, unit: LimitUnit) -> float:
        return float(self._num_sent) if unit is LimitUnit.REQUESTS else self._tokens_sent

    def _spacing_s(self) -> float:
        return self._trip_s / (self.window * _SPACED)

    def _told_refused(self, unit: LimitUnit | None) -> bool:
        """Whether what the endpoint itself says of its limits accounts for a refusal."""
        for one in LimitUnit if unit is None else (unit,):
            told = self._told[one]
            if told.accounts_for_refusal(self._total(one)) and told.pace is not None:
                self._told_pacers[one].free_at += 1.0 / told.pace
                return True
        return False


def _amount(unit: LimitUnit, tokens: float) -> float:
    return 1.0 if unit is LimitUnit.REQUESTS else tokens


def _smoothed(before: float, value: float) -> float:
    return before + (value - before) * 0.1 if before else value
