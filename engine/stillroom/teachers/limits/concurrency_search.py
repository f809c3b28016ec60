"""Finds an endpoint's limit on concurrent requests, and whether it has one.

A refusal at a known number of requests in flight gives the limit: the window is set to one less,
and after enough accepted requests a wider window is probed. `RateSearch` is used instead when
the refusals follow the rate of requests rather than their number.
"""

from collections import deque

from stillroom.teachers.limits.limit_types import LimitSettings, SentRequest
from stillroom.teachers.limits.rate_search import RateSearch, spread

_MIN_HOLD_S = 1.0
"""The least seconds between a cut or a probe and the next probe."""
_MAX_SHRINKS = 3
"""After this many refusals within the known limit, something else must cause them."""
_MIN_SHARE = 0.8
"""With less than this share of the known limit in flight, a refusal has another cause."""
_NUM_EPISODES = 4
"""The number of refusals that are compared to find a concurrency limit below the pace."""
_MIN_RATE_SPREAD = 0.08
"""Rates differ if their standard deviation is more than this share of their mean."""


class ConcurrencySearch:
    """Keeps the limit on concurrent requests (the window) and decides when to probe a wider one."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self._known_limit: int | None = None
        """The number of concurrent requests known to be accepted; None while no limit is known."""
        self._num_shrinks = 0
        """Recent refusals at a number of concurrent requests that had been accepted before."""
        self._accepted = self._num_refused = 0
        """Requests accepted since the last cut; refusals since a wider window was last probed."""
        self._num_filled = 0
        """Accepted requests that filled the window, since the last cut or probe."""
        self._step = 1
        """The number of requests by which the next probe widens the window."""
        self._is_settled = False
        """Whether a wider window was probed and refused."""
        self._last_change_at = 0.0
        """The time of the last cut or probe."""
        self._refused_in_flight: deque[int] = deque(maxlen=_NUM_EPISODES)
        """Requests in flight at each of the last refusals that were attributed to the rate."""
        self._most_accepted: deque[int] = deque([0], maxlen=_NUM_EPISODES)
        """The maximum number of requests in flight when one was accepted, between each two of those
        refusals."""

    @property
    def has_limit(self) -> bool:
        """Whether concurrency appears to be what the endpoint limits."""
        return self._known_limit is not None

    def record_accepted(self, sent: SentRequest) -> None:
        """Counts a request that was accepted."""
        self._accepted += 1
        self._num_filled += sent.fills_window
        self._most_accepted[-1] = max(self._most_accepted[-1], sent.in_flight)

    def record_refused(self) -> None:
        """Counts a request that was refused."""
        self._num_refused += 1

    def explains(self, sent: SentRequest, rate: RateSearch, *, round_trips_vary: bool) -> bool:
        """Returns whether a concurrency limit may be the reason for a refusal.

        `round_trips_vary` is False if all responses take about equally long. A concurrency limit
        and a rate limit are then equivalent; the rate is preferred because it can be set more
        finely.
        """
        if rate.pace is not None:
            return self._is_constant_despite_pace(sent, rate) and round_trips_vary
        if self._known_limit is None:
            return True
        if not round_trips_vary:
            return False
        if sent.in_flight > self._known_limit:
            return True
        self._num_shrinks += 1
        return sent.in_flight >= _MIN_SHARE * self._known_limit and self._num_shrinks < _MAX_SHRINKS

    def cut(self, sent: SentRequest, now: float) -> float:
        """Returns the reduced window after a refusal."""
        self._is_settled = self._known_limit is not None and sent.in_flight > self._known_limit
        self._known_limit = max(1, sent.in_flight - 1)
        self._accepted = self._num_filled = 0
        self._last_change_at, self._step = now, 1
        return float(self._known_limit)

    def forget_limit(self) -> None:
        """Drops the concurrency limit, because the refusal had another reason."""
        self._known_limit, self._num_shrinks = None, 0

    def next_window(self, window: float, now: float) -> float:
        """Returns the window to use now.

        Widens it to start a probe once enough requests were accepted, and keeps the wider one once
        requests have filled it twice without a refusal.
        """
        if self._known_limit is None or self._num_filled == 0:
            return window
        if window > self._known_limit:
            # Every request that filled the wider window so far was accepted.
            if self._num_filled < 2 * window:
                return window
            self._known_limit, self._step = int(window), self._step * 2
        else:
            num_needed = self._settings.num_accepted_needed(self._num_refused)
            if not self._is_settled:
                num_needed = min(num_needed, 2 * self._known_limit)
            if now - self._last_change_at < _MIN_HOLD_S or self._accepted < num_needed:
                return window
        self._num_filled = self._num_refused = self._num_shrinks = 0
        self._last_change_at = now
        return float(min(self._settings.max_in_flight, self._known_limit + self._step))

    def _is_constant_despite_pace(self, sent: SentRequest, rate: RateSearch) -> bool:
        """Whether refusals come at the same number of requests in flight but at other rates."""
        counts, most_accepted = self._refused_in_flight, max(self._most_accepted)
        counts.append(sent.in_flight)
        self._most_accepted.append(0)
        if len(counts) < _NUM_EPISODES or len(rate.measured) < _NUM_EPISODES:
            return False
        are_same = max(counts) - min(counts) <= max(1.0, 0.05 * min(counts))
        rates = [measured.requests for measured in rate.measured]
        return are_same and most_accepted <= max(counts) and spread(rates) > _MIN_RATE_SPREAD
