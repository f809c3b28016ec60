"""Finds how many requests at once an endpoint takes, and whether that is what it limits."""

from collections import deque

from stillroom.teachers.limits.rate_search import RateSearch, spread
from stillroom.teachers.limits.words import LimitSettings, Sent

_MIN_HOLD_S = 1.0
_MAX_SHRINKS = 3
_LEAST_SHARE = 0.8
_NUM_EPISODES = 4
_RATES_DIFFER = 0.08


class ConcurrencySearch:
    """Holds the window, and knows when to try a wider one."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self._held: int | None = None
        """How many at once were taken; None where nothing shows a limit on it."""
        self._num_shrinks = 0
        """Refusals, in short order, of no more at once than had been taken before."""
        self._accepted = self._num_refused = 0
        self._num_filled = 0
        self._step = 1
        self._is_settled = False
        """Whether a wider window was tried, and refused."""
        self._tried_at = 0.0
        self._refused_at: deque[int] = deque(maxlen=_NUM_EPISODES)
        """How many were out at the last refusals that were put down to the rate."""
        self._most_accepted: deque[int] = deque([0], maxlen=_NUM_EPISODES)
        """The most that were out with one that was taken, from each of those to the next."""

    @property
    def is_found(self) -> bool:
        """Whether the number in flight is what is limited, as far as can be told."""
        return self._held is not None

    def accepted(self, sent: Sent) -> None:
        """Learns from a request that was taken."""
        self._accepted += 1
        self._num_filled += sent.fills_window
        self._most_accepted[-1] = max(self._most_accepted[-1], sent.in_flight)

    def refused(self) -> None:
        """Counts a request that was not taken."""
        self._num_refused += 1

    def explains(self, sent: Sent, rate: RateSearch, *, do_trips_vary: bool) -> bool:
        """Returns whether too many at once may be why a request was refused.

        Where all take equally long, so many at once and so many a second are the same, and the
        rate can be held more finely.
        """
        if rate.pace is not None:
            return self._shows_despite_pace(sent, rate) and do_trips_vary
        if self._held is None:
            return True
        if not do_trips_vary:
            return False
        if sent.in_flight > self._held:
            return True
        self._num_shrinks += 1
        return sent.in_flight >= _LEAST_SHARE * self._held and self._num_shrinks < _MAX_SHRINKS

    def cut(self, sent: Sent, now: float) -> float:
        """Returns the window after a refusal."""
        self._is_settled = self._held is not None and sent.in_flight > self._held
        self._held = max(1, sent.in_flight - 1)
        self._accepted = self._num_filled = 0
        self._tried_at, self._step = now, 1
        return float(self._held)

    def let_go(self) -> None:
        """Forgets the limit: something else was the reason."""
        self._held, self._num_shrinks = None, 0

    def grown(self, window: float, now: float) -> float:
        """Returns the window for now: wider where it is being tried."""
        if self._held is None or self._num_filled == 0:
            return window
        if window > self._held:
            # All that were sent since then, and found it wider, were taken.
            if self._num_filled < 2 * window:
                return window
            self._held, self._step = int(window), self._step * 2
        else:
            owed = self._settings.owed(self._num_refused)
            if not self._is_settled:
                owed = min(owed, 2 * self._held)
            if now - self._tried_at < _MIN_HOLD_S or self._accepted < owed:
                return window
        self._num_filled = self._num_refused = self._num_shrinks = 0
        self._tried_at = now
        return float(min(self._settings.most, self._held + self._step))

    def _shows_despite_pace(self, sent: Sent, rate: RateSearch) -> bool:
        """Whether the number is the same at each refusal while the rate is not."""
        numbers, most_accepted = self._refused_at, max(self._most_accepted)
        numbers.append(sent.in_flight)
        self._most_accepted.append(0)
        if len(numbers) < _NUM_EPISODES or len(rate.measured) < _NUM_EPISODES:
            return False
        are_same = max(numbers) - min(numbers) <= max(1.0, 0.05 * min(numbers))
        rates = [one.requests for one in rate.measured]
        return are_same and most_accepted <= max(numbers) and spread(rates) > _RATES_DIFFER
