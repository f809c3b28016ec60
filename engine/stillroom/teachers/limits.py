"""How fast and how many at once: a controller that learns an endpoint's limits from its refusals.

Pure: time comes in as an argument, so it runs against a simulated clock. Three parts work together:
`LimitSettings` says what is wished, `LimitController` decides, `limiter.Limiter` makes calls wait.

It starts with a few requests in flight and doubles them each round trip until one is refused.
From then on requests are paced. Between two refusals a token bucket was emptied twice, so what it
let through in between, over the time, is its rate: that is held, a little below, and tried again
now and then, rarely enough that trying costs few refusals. Where requests are refused at a rate
that was fine before, but with more in flight than ever before, the limit is on how many at once.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class LimitKind(StrEnum):
    """What an endpoint said it limits; many do not say."""

    RATE = "rate"
    CONCURRENCY = "concurrency"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What is wished of a limiter."""

    start: int = 20
    """Requests in flight at first."""
    most: int = 256
    """Never more in flight."""
    accepted_per_refusal: int = 150
    """A limit is tried again only after so many requests for each that the last try cost."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request on its way, as the controller knows it."""

    number: int
    at: float
    in_flight: int
    """How many there were with it."""
    fills_window: bool


_HELD_SHARE = 0.98
"""Of the measured rate: what is asked for while nothing is tried."""
_MIN_MEASURE_S = 0.3
_MIN_MEASURE_COUNT = 10
_SAME_LIMIT = 0.07
_MIN_STEP_S = 0.2
_GROWTHS = (1.04, 1.06, 1.08, 1.1, 1.12, 1.16, 1.25)
"""Of the steps of a try; small at first, because most tries end soon."""
_FIRST_CUT, _NEXT_CUT = 0.5, 0.85
_MIN_HOLD_S = 1.0
_MAX_COUNTED_REFUSALS = 4
_MIN_PACE = 0.02
_UNBOUNDED = math.inf
_NUM_KEPT = 64
_NUM_EPISODES_KEPT, _MIN_EPISODES = 6, 3
_STEADY = 0.05
_JUDGED_AFTER = 4
_MIN_APART_S = 0.25


class LimitController:
    """Decides when the next request may go. All times are seconds of one monotonic clock."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self.in_flight = 0
        self.window = float(min(settings.start, settings.most))
        """How many may be in flight."""
        self.pace: float | None = None
        """Requests a second; None until something was refused."""
        self._next_at = -math.inf
        self._num_sent = 0
        self._episode_end = 0
        """Requests up to this number were sent before the last cut."""
        self._episode_until = -math.inf
        self._trip_s = self._refusal_trip_s = 0.0
        self._rate = _RateSearch(settings)
        self._crowd = _CrowdSearch(settings)
        self._evidence = _Evidence()

    def ready_at(self, now: float) -> float:
        """Returns when the next request may go: `now`, later, or inf while too many are out."""
        if self.in_flight >= int(self.window):
            return math.inf
        return max(now, self._next_at) if self.pace is not None else now

    def send(self, now: float) -> Sent:
        """Counts a request that goes out now."""
        self.in_flight += 1
        self._num_sent += 1
        self._evidence.sent(now)
        if self.pace is not None:
            # A request that comes late does not let the next ones come in a bunch.
            self._rate.is_reached |= now - self._next_at < 1.0 / self.pace
            self._next_at = max(now, self._next_at) + 1.0 / self.pace
        return Sent(self._num_sent, now, self.in_flight, self.in_flight >= int(self.window))

    def accepted(self, sent: Sent, now: float) -> None:
        """Learns that the endpoint took a request; called when its answer is there."""
        self.in_flight -= 1
        self._trip_s = _smoothed(self._trip_s, now - sent.at)
        self._rate.accept(now)
        self._crowd.accepted(sent)
        if self.pace is None:
            # Doubles in a round trip, and only while the window is what holds requests back.
            if sent.in_flight * 2 > self.window:
                self.window = min(self._settings.most, self.window + 1)
            return
        self.window = self._crowd.grown(self.window, now)
        self.pace = self._rate.grown(self.pace, now, self._refusal_trip_s)

    def refused(self, sent: Sent, now: float, kind: LimitKind = LimitKind.UNKNOWN) -> None:
        """Learns that a request was too much; one cut answers all that were on their way."""
        self.in_flight -= 1
        self._refusal_trip_s = _smoothed(self._refusal_trip_s, now - sent.at)
        if sent.number <= self._episode_end or now < self._episode_until:
            self._rate.refused += 1
            self._crowd.refused += 1
            return
        self._episode_end = self._num_sent
        self._evidence.refused(sent, now, self._trip_s)
        if kind is LimitKind.CONCURRENCY or (
            kind is LimitKind.UNKNOWN and self._evidence.is_about_number()
        ):
            self.window, self.pace = self._crowd.cut(sent, now), self._rate.let_go(now)
        elif self.pace is None and not self._rate.accepted:
            # Nothing has come back yet, so there is no rate to go by.
            self.window = max(1.0, sent.in_flight / 2)
        else:
            self.pace = self._rate.cut(self.pace, now, self._trip_s)
        if self.pace is not None:
            self._next_at = min(self._next_at, now + 1.0 / self.pace)
            # What the new pace does shows only after a few requests.
            self._episode_until = now + min(_JUDGED_AFTER / self.pace, 1.0)

    def failed(self, _sent: Sent) -> None:
        """Counts a request that came back with nothing that tells about limits."""
        self.in_flight -= 1


class _RateSearch:
    """Finds the rate that an endpoint takes."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self.accepted = self.refused = 0
        """Since the last cut, and in the refusals that led to it."""
        self.is_reached = False
        """Whether requests have waited for the pace since it last changed."""
        self._known: float | None = None
        self._good = 0.0
        self._num_steps: int | None = None
        """How many steps the try has gone; None while the pace is held."""
        self._step_at = self._cut_at = 0.0
        self._accepts: deque[float] = deque(maxlen=_NUM_KEPT)

    def accept(self, now: float) -> None:
        """Counts a request that was taken."""
        self.accepted += 1
        self._accepts.append(now)

    def _recent(self, now: float, trip_s: float) -> float:
        """Returns the rate at which requests were taken in the last round trip or so."""
        since = now - max(trip_s, _MIN_STEP_S)
        recent = [at for at in self._accepts if at >= since] or list(self._accepts)
        return len(recent) / max(now - recent[0], trip_s, 1e-3)

    def let_go(self, now: float) -> float:
        """Returns a pace that holds nothing back, where the number in flight is what is limited."""
        self._restart(now, is_held=True)
        return _UNBOUNDED

    def cut(self, pace: float | None, now: float, trip_s: float) -> float:
        """Returns the pace after a refusal."""
        passed = now - self._cut_at
        rate = self.accepted / max(passed, 1e-3)
        if pace is None or pace >= _UNBOUNDED:
            # The burst that a bucket allows at first says little about its rate.
            rate = self._recent(now, trip_s) * _FIRST_CUT
            self._restart(now, is_held=False)
        elif passed < max(_MIN_MEASURE_S, 4 * trip_s) or self.accepted < _MIN_MEASURE_COUNT:
            rate = pace * _NEXT_CUT
            self._restart(now, is_held=False)
        else:
            is_same = self._known is not None and abs(rate / self._known - 1) <= _SAME_LIMIT
            was_trying = self._num_steps is not None
            # The pace so far and a limit that moved are mixed in what was measured.
            self._known = rate = rate if is_same or not was_trying else max(rate, self._good * 0.95)
            rate *= _HELD_SHARE
            if not was_trying:
                rate = min(rate, pace * _NEXT_CUT)
            self._restart(now, is_held=was_trying)
        return max(rate, _MIN_PACE)

    def grown(self, pace: float, now: float, refusal_trip_s: float) -> float:
        """Returns the pace for now: held, or a step higher where it is being tried."""
        if not self.is_reached or pace >= _UNBOUNDED:
            return pace
        if self._num_steps is None:
            owed = self._settings.accepted_per_refusal * min(self.refused, _MAX_COUNTED_REFUSALS)
            if now - self._cut_at < _MIN_HOLD_S or self.accepted < owed:
                return pace
            self._num_steps, self.refused = 0, 0
        elif now - self._step_at < max(_MIN_STEP_S, 2 * refusal_trip_s):
            return pace
        self._good, self._step_at, self.is_reached = pace, now, False
        growth = _GROWTHS[min(self._num_steps, len(_GROWTHS) - 1)]
        self._num_steps += 1
        return pace * growth

    def _restart(self, now: float, *, is_held: bool) -> None:
        self.accepted, self.is_reached = 0, False
        self._cut_at = self._step_at = now
        self._num_steps = None if is_held else 0
        self.refused += 1


class _CrowdSearch:
    """Finds how many requests at once an endpoint takes."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self.refused = 0
        self._accepted = 0
        self._is_limited = self._is_filled = False
        self._tried_at = 0.0

    def accepted(self, sent: Sent) -> None:
        """Learns whether the window was what held requests back."""
        self._accepted += 1
        self._is_filled |= sent.fills_window

    def cut(self, sent: Sent, now: float) -> float:
        """Returns the window after a refusal."""
        self._is_limited, self._is_filled = True, False
        self._accepted, self._tried_at = 0, now
        self.refused += 1
        return float(max(1, sent.in_flight - 1))

    def grown(self, window: float, now: float) -> float:
        """Returns the window for now: one more where it is being tried."""
        if not self._is_filled:
            return window
        if self._is_limited:
            owed = self._settings.accepted_per_refusal * min(self.refused, _MAX_COUNTED_REFUSALS)
            if now - self._tried_at < _MIN_HOLD_S or self._accepted < owed:
                return window
        self._is_filled, self._tried_at, self.refused = False, now, 0
        self._is_limited = False
        return min(self._settings.most, window + 1)


class _Evidence:
    """Tells a limit on the number in flight from one on the rate.

    Whichever is limited is about the same at every refusal, while the other differs.
    """

    def __init__(self) -> None:
        self._sends: deque[float] = deque(maxlen=_NUM_KEPT)
        self._numbers: deque[float] = deque(maxlen=_NUM_EPISODES_KEPT)
        self._rates: deque[float] = deque(maxlen=_NUM_EPISODES_KEPT)
        self._noted_at = -math.inf

    def sent(self, now: float) -> None:
        """Remembers when a request went out."""
        self._sends.append(now)

    def refused(self, sent: Sent, now: float, trip_s: float) -> None:
        """Remembers what the first refusal of an episode was like."""
        # Within a round trip nothing has changed, so another refusal says nothing new.
        if now - self._noted_at < max(trip_s, _MIN_APART_S):
            return
        self._noted_at = now
        self._numbers.append(sent.in_flight)
        self._rates.append(len(self._sends) / max(now - self._sends[0], 1e-3))

    def is_about_number(self) -> bool:
        """Returns whether the refusals so far speak for a limit on the number in flight."""
        if len(self._numbers) < _MIN_EPISODES:
            return False
        spread = _spread(self._numbers)
        return spread <= _STEADY and spread * 2 < _spread(self._rates)


def _spread(values: Collection[float]) -> float:
    """Returns the standard deviation as a share of the mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean


def _smoothed(before: float, value: float) -> float:
    return before + (value - before) * 0.1 if before else value
