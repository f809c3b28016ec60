"""Finds an endpoint's rate limit, in requests or tokens per second, from when it refuses requests.

Most endpoints limit the rate with a token bucket, and a refusal shows that the bucket was empty.
What was accepted between two refusals, divided by the time between them, is therefore the rate at
which the bucket refills. It is measured in requests and in tokens; whichever measurement stays the
same from refusal to refusal is the one that the endpoint limits.

Requests are then sent slightly below that rate, and from time to time a higher rate is probed in
small steps. If more is accepted than the known rate allows, the limit has risen, and the steps
become large. `benchmarks/rollouts/limits_simulated.py` compares this with plain AIMD.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from stillroom.teachers.limits.limit_types import LimitSettings, LimitUnit, SentRequest

_HELD_SHARE = 0.98
"""The pace, as a share of the measured rate, while no higher rate is being probed."""
_MIXED_SHARE = 0.93
"""If the measured rate is below this share of the pace before the last step, which was accepted,
the measurement is mixed; the next rate is then this share of that pace."""
_GUESSED_SHARE, _NEXT_CUT = 0.5, 0.75
"""The first pace, as a share of the rate of recent responses, and the factor of each further cut,
while no rate has been measured."""
_MIN_MEASURE_COUNT = 6
"""The least number of requests accepted between two refusals from which a rate is computed."""
_SMALL_STEP, _SEARCH_STEP, _LARGE_STEP = 1.06, 1.08, 1.3
"""The factors by which a step raises the pace: near a known rate, without one, and after the limit
has risen."""
_HIGHEST_PROBE, _CREEP_STEP = 1.1, 1.005
"""The multiple of the known rate up to which small steps go, and the factor of steps above it."""
_SURPLUS_COUNT = 2.0
"""If the known rate is exceeded by this many accepted requests, the limit has risen."""
_MIN_RELATIVE_ERROR, _RELATIVE_ERROR_OF_ONE = 0.01, 1.5
"""The relative error of a measured rate is the second of these divided by the number of requests,
but at least the first."""
_SAME, _MOVED = 0.05, 0.1
"""The relative differences up to which a measured rate equals the known one, and above which a
limit has moved."""
_NEEDED_PER_ERROR = 10.0
"""Divided by the rate's relative error, the maximum number of requests that must be accepted before
the next probe. A rate that was measured over few requests is therefore probed again sooner."""
_SLACK_S, _LONGEST_PAUSE_S = 0.01, 1.0
"""The shortest pause after a refusal, which covers requests that arrive slightly early, and the
longest pause after doubling."""
_MIN_STEP_S = 0.1
"""The least seconds between two steps of a probe."""
_MIN_HOLD_S = 0.5
"""The least seconds between a cut and the next probe."""
_MIN_PACE = 0.02
"""The lowest pace, in requests or tokens per second."""
_NUM_KEPT = 64
"""The number of latest responses whose times are kept."""
_NUM_EPISODES, _MIN_EPISODES = 6, 4
"""The number of measurements that are kept, and the least number from which the unit is chosen."""
_MIN_VARIATION_RATIO = 1.5
"""The unit is changed only if its rates vary more than this many times as much as the other's."""


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """The throughput that an endpoint accepted between two refusals, per second."""

    requests: float
    """The requests accepted per second."""
    tokens: float
    """The estimated tokens of accepted requests per second."""
    num: int
    """The number of requests that were accepted in that time."""

    def rate(self, unit: LimitUnit) -> float:
        """Returns the throughput in the given unit."""
        return self.requests if unit is LimitUnit.REQUESTS else self.tokens


class RateSearch:
    """Keeps the pace at which requests are sent, and decides when to probe a higher one."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self.pace: float | None = None
        """The amount that may be sent per second, in `unit`; None while no rate limit is known."""
        self.unit = LimitUnit.REQUESTS
        self.measured: deque[MeasuredRate] = deque(maxlen=_NUM_EPISODES)
        """The most recent measurements."""
        self._mark: SentRequest | None = None
        """The refused request at which the current measurement began."""
        self._refused_amount = dict.fromkeys(LimitUnit, 0.0)
        self._accepted_amount = dict.fromkeys(LimitUnit, 0.0)
        """The refused and the accepted amount of all requests sent after the mark."""
        self._last_accepted_at = 0.0
        """When the latest accepted request after the mark was sent; at first, when the mark was."""
        self._num_accepted = self._num_refused = 0
        """Requests accepted since the last cut; refusals since the limit was last probed."""
        self._known_rate: float | None = None
        """The last measured rate, in `unit` per second; None if no measurement is valid."""
        self._relative_error = 0.0
        """The relative error that the known rate may have."""
        self._is_probing = self._has_risen = False
        """Whether a higher pace is being probed, and whether the limit was found to have risen."""
        self._pace_before_step = 0.0
        """The pace before the last step."""
        self._is_guess = False
        """Whether the pace is an estimate that no measurement supports."""
        self._num_unmeasured = 0
        """The number of consecutive cuts for which no rate could be measured."""
        self._cut_at = self._step_at = 0.0
        self._answered_at: deque[float] = deque(maxlen=_NUM_KEPT)
        """When the latest accepted requests were answered."""
        self._mean_tokens = 0.0
        """The moving average of the tokens of one request."""

    def record_accepted(self, sent: SentRequest, now: float) -> None:
        """Counts a request that was accepted."""
        self._num_accepted += 1
        self._answered_at.append(now)
        before = self._mean_tokens or sent.tokens
        self._mean_tokens = before + (sent.tokens - before) * 0.05
        if self._mark is not None and sent.number > self._mark.number:
            self._last_accepted_at = max(self._last_accepted_at, sent.at)
            for unit in LimitUnit:
                self._accepted_amount[unit] += sent.amount(unit)

    def record_refused(self, sent: SentRequest) -> None:
        """Counts a request that was refused."""
        self._num_refused += 1
        if self._mark is not None and sent.number > self._mark.number:
            for unit in LimitUnit:
                self._refused_amount[unit] += sent.amount(unit)

    @property
    def has_answers(self) -> bool:
        """Whether any request was ever accepted; before that there is no rate to estimate."""
        return bool(self._answered_at)

    def pause_s(self, amount: float) -> float:
        """Returns the seconds to pause after a cut; they double when cuts follow one another."""
        if self.pace is None:
            return 0.0
        request_s = amount / self.pace
        doubled_s = request_s * 2 ** min(self._num_unmeasured, 9)
        return max(_SLACK_S, request_s, min(doubled_s, _LONGEST_PAUSE_S))

    def forget_limit(self, sent: SentRequest, now: float) -> None:
        """Drops the rate limit, because the endpoint limits something other than the rate."""
        self.pace = self._known_rate = None
        self._restart(sent, now)

    def cut(self, sent: SentRequest, now: float, trip_s: float, unit: LimitUnit | None) -> None:
        """Lowers the pace after a refusal of the request `sent`.

        trip_s: the average round trip. unit: the unit that the refusal names; None if it names
        none.
        """
        measured = self._measure(sent)
        if measured is None:
            self._cut_blindly(now, trip_s, unit)
            if self._mark is None:
                self._restart(sent, now)
            self._step_at = now
            return
        old_unit, old_pace = self.unit, self.pace
        self._num_unmeasured = 0
        if self._is_mixed(measured) and not self._is_guess:
            rate = self._pace_before_step * _MIXED_SHARE
            self._known_rate, self._is_guess = None, True
        else:
            self._is_guess = False
            self._keep_measurement(measured)
            self._choose_unit(unit)
            self._known_rate = rate = measured.rate(self.unit)
            self._relative_error = max(_MIN_RELATIVE_ERROR, _RELATIVE_ERROR_OF_ONE / measured.num)
        pace = rate * _HELD_SHARE
        if not self._is_probing and old_pace is not None and self.unit is old_unit:
            pace = min(pace, old_pace * 0.97)
        self.pace = max(pace, _MIN_PACE)
        self._is_probing = self._known_rate is None
        self._restart(sent, now)

    def grow(self, now: float, refusal_trip_s: float) -> bool:
        """Raises the pace by a step if one is due, and returns whether it did.

        It is called only while the pace holds requests back.
        """
        if self.pace is None:
            return False
        if not self._is_probing:
            if now - self._cut_at < _MIN_HOLD_S or self._num_accepted < self._num_needed():
                return False
            self._is_probing, self._num_refused = True, 0
        elif now - self._step_at < max(_MIN_STEP_S, 2 * refusal_trip_s):
            return False
        self._step_at, self._pace_before_step = now, self.pace
        self._has_risen |= self._accepts_more_than_known()
        if self._has_risen:
            self.pace *= _LARGE_STEP
        elif self._known_rate is None:
            self.pace *= _SEARCH_STEP
        else:
            # A busy machine sends less than the pace allows, so even a pace above the limit may
            # cause no refusal. The pace therefore keeps creeping up beyond `highest`.
            highest = self._known_rate * (_HIGHEST_PROBE + self._relative_error)
            self.pace = max(self.pace * _CREEP_STEP, min(self.pace * _SMALL_STEP, highest))
        return True

    def _num_needed(self) -> float:
        """Returns how many requests must be accepted before a higher rate is probed."""
        num_needed = self._settings.num_accepted_needed(self._num_refused)
        return (
            min(num_needed, _NEEDED_PER_ERROR / self._relative_error)
            if self._relative_error
            else num_needed
        )

    def _restart(self, sent: SentRequest, now: float) -> None:
        """Begins a new measurement at the refused request `sent`."""
        self._mark, self._has_risen = sent, False
        self._num_accepted, self._cut_at, self._step_at = 0, now, now
        self._last_accepted_at = sent.at
        for unit in LimitUnit:
            self._refused_amount[unit] = self._accepted_amount[unit] = 0.0

    def _measure(self, sent: SentRequest) -> MeasuredRate | None:
        """Returns the throughput accepted between the mark and a refused request.

        Returns None if too few requests were accepted for a measurement.
        """
        if self._mark is None or sent.at <= self._mark.at:
            return None
        # `_refused_amount` counts the refused request itself, `before` does not: it is added back.
        accepted = {
            unit: sent.before(unit)
            - self._mark.before(unit)
            - self._mark.amount(unit)
            - self._refused_amount[unit]
            + sent.amount(unit)
            for unit in LimitUnit
        }
        if accepted[LimitUnit.REQUESTS] < _MIN_MEASURE_COUNT:
            return None
        passed = sent.at - self._mark.at
        num = accepted[LimitUnit.REQUESTS]
        return MeasuredRate(num / passed, accepted[LimitUnit.TOKENS] / passed, int(num))

    def _is_mixed(self, measured: MeasuredRate) -> bool:
        """Whether the measured average is below a pace that was accepted for a while.

        Then the limit changed in between, or the bucket was full when the measurement began.
        """
        rate = measured.rate(self.unit)
        if not self._is_probing or rate >= self._pace_before_step * _MIXED_SHARE:
            return False
        return self._known_rate is None or not _is_close(rate, self._known_rate, _SAME)

    def _cut_blindly(self, now: float, trip_s: float, unit: LimitUnit | None) -> None:
        """Lowers or initialises the pace when too few requests were accepted to measure a rate."""
        self._is_probing = self._known_rate is None
        if self.pace is not None:
            self._num_unmeasured += 1
            if self._known_rate is None and self._num_accepted:
                self.pace = max(self.pace * _NEXT_CUT, _MIN_PACE)
            return
        # Only recent responses count, because the burst that a full bucket allows at first says
        # little about its rate.
        since = now - max(trip_s, 0.2)
        recent = [at for at in self._answered_at if at >= since] or list(self._answered_at)
        rate = len(recent) / max(now - recent[0], trip_s, 1e-3)
        if unit is LimitUnit.TOKENS and self._mean_tokens:
            self.unit, rate = unit, rate * self._mean_tokens
        self.pace = max(rate * _GUESSED_SHARE, _MIN_PACE)

    def _keep_measurement(self, measured: MeasuredRate) -> None:
        """Keeps a measurement, and drops older ones if both units show that the limit moved."""
        last = self.measured[-1] if self.measured else measured
        if all(not _is_close(measured.rate(u), last.rate(u), _MOVED) for u in LimitUnit):
            self.measured.clear()
        self.measured.append(measured)

    def _choose_unit(self, stated_unit: LimitUnit | None) -> None:
        """Chooses the unit whose measured rates vary least from refusal to refusal."""
        if stated_unit is not None:
            self.unit = stated_unit
            return
        if len(self.measured) < _MIN_EPISODES:
            return
        spreads = {u: spread([rate.rate(u) for rate in self.measured]) for u in LimitUnit}
        best = min(LimitUnit, key=lambda u: spreads[u])
        if spreads[best] * _MIN_VARIATION_RATIO < spreads[self.unit]:
            self.unit = best

    def _accepts_more_than_known(self) -> bool:
        """Whether clearly more was accepted since the mark than the known rate would allow."""
        if self._known_rate is None or self._mark is None:
            return False
        accepted = self._accepted_amount[self.unit]
        allowed = self._known_rate * (self._last_accepted_at - self._mark.at)
        per_request = 1.0 if self.unit is LimitUnit.REQUESTS else self._mean_tokens
        return accepted > allowed * (1 + self._relative_error) + _SURPLUS_COUNT * per_request


def _is_close(value: float, other: float, share: float) -> bool:
    return abs(value - other) <= share * other


def spread(values: Collection[float]) -> float:
    """Returns the standard deviation as a share of the mean; inf if all values are 0."""
    mean = sum(values) / len(values)
    if mean <= 0:
        return math.inf
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean
