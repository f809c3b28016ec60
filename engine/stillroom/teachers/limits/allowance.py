"""Reads the remaining allowance from response headers, and derives a pace from it.

Most endpoints state a limit, how much of it remains, and the time until it has fully refilled
(`x-ratelimit-*`). If the limit is a bucket that refills steadily, the used part divided by that
time is its refill rate, the same in each response. The headers are trusted only in this case. Other
limits, such as a counter that restarts each minute, are learned from refusals, as are those of
endpoints that send no such headers.
"""

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from stillroom.teachers.limits.limit_types import LimitUnit, SentRequest
from stillroom.teachers.providers import PROVIDERS

_MIN_SPACING_S = 0.25
"""Refill rates are computed from requests sent at least this many seconds apart."""
_NUM_KEPT = 4
"""The number of latest rates that are compared with each other."""
_MAX_RATE_RATIO = 1.15
"""The headers are trusted while the highest kept rate is at most this multiple of the lowest."""
_FREE_S = 2.0
"""Requests are not held back while more remains than refills in this many seconds."""
_TARGET_S = 1.0
"""The pace keeps in reserve the amount that refills in this many seconds."""
_MIN_PACE_FACTOR, _MAX_PACE_FACTOR = 0.7, 1.5
"""The lowest and the highest pace, as multiples of the refill rate."""
_MAX_REFUSED, _REFUSAL_SPAN = 4, 200.0
"""After this many refusals within this amount sent, the headers are no longer trusted."""
_MAX_RESET_S = 2 * 86_400.0
"""A longer time until the reset is ignored: it must be a date, or an endpoint's mistake."""
_NAMES = [
    (unit, tuple(name.format(unit=unit, part=part) for part in ("limit", "remaining", "reset")))
    for unit in LimitUnit
    for name in dict.fromkeys(provider.limit_headers for provider in PROVIDERS.values())
]
_LIMIT_HEADERS = frozenset(names[0] for _, names in _NAMES)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+\.?\d*)s)?(?:(\d+\.?\d*)ms)?")


@dataclass(frozen=True, slots=True)
class Allowance:
    """The state of a limit as an endpoint's headers give it."""

    limit: float
    """The number of requests or tokens that are allowed in total."""
    remaining: float
    """The number of requests or tokens that remain."""
    reset_s: float
    """The seconds until the whole limit is available again."""


def allowances(headers: Mapping[str, str], now: datetime) -> dict[LimitUnit, Allowance]:
    """Returns the allowances in a response's headers, whose names must be in lower case.

    A unit is left out if one of its three headers is missing or implausible.
    """
    stated: dict[LimitUnit, Allowance] = {}
    if _LIMIT_HEADERS.isdisjoint(headers):
        return stated
    for unit, names in _NAMES:
        if all(name in headers for name in names):
            limit, remaining = _number(headers[names[0]]), _number(headers[names[1]])
            reset_s = _seconds(headers[names[2]], now)
            if limit is None or remaining is None or reset_s is None:
                continue
            if 0 <= remaining <= limit and 0 < reset_s <= _MAX_RESET_S:
                stated[unit] = Allowance(limit, remaining, reset_s)
    return stated


class AllowancePace:
    """Derives a pace from the allowances that successive responses report for one limit."""

    def __init__(self) -> None:
        self.pace: float | None = None
        """The requests or tokens to send per second; None for no limit.

        It is None if the headers are missing or implausible, or if much of the limit remains.
        """
        self._rates: deque[float] = deque(maxlen=_NUM_KEPT)
        self._last_recorded: tuple[float, float, float] | None = None
        """The last request whose rate was recorded: when it was sent, what remained after it, and
        how much had been sent in total up to it."""
        self._scale = 1.0
        """The amount that the endpoint counts for each unit of our own estimate."""
        self._refused_at: deque[float] = deque(maxlen=_MAX_REFUSED)
        self._is_distrusted = False

    def update(
        self, allowance: Allowance, sent: SentRequest, total: float, unit: LimitUnit, now: float
    ) -> None:
        """Updates the pace from the allowance in the response to a request.

        `total` is the total amount sent so far, in `unit`.
        """
        if self._is_distrusted or allowance.reset_s <= 0:
            return
        before = sent.before(unit) + sent.amount(unit)
        if self._last_recorded is None or sent.at - self._last_recorded[0] >= _MIN_SPACING_S:
            self._record_refill_rate(allowance, sent.at, before)
        sent_since = max(0.0, total - before) * self._scale
        self.pace = self._pace(allowance, sent_since, now - sent.at)

    def accounts_for_refusal(self, sent: float) -> bool:
        """Counts a refusal, and returns whether it is one of the few expected at this pace.

        `sent` is the total amount sent. If refusals are too frequent, the headers are
        distrusted from then on.
        """
        if self.pace is None:
            return False
        self._refused_at.append(sent)
        if len(self._refused_at) == _MAX_REFUSED and sent - self._refused_at[0] < _REFUSAL_SPAN:
            self._is_distrusted, self.pace = True, None
        return not self._is_distrusted

    def _record_refill_rate(self, allowance: Allowance, now: float, sent: float) -> None:
        """Records the refill rate that an allowance implies, and adjusts the scale."""
        rate = (allowance.limit - allowance.remaining) / allowance.reset_s
        if rate <= 0:
            return
        if self._last_recorded is not None and sent > self._last_recorded[2]:
            at, remaining, sent_before = self._last_recorded
            counted = rate * (now - at) + remaining - allowance.remaining
            scale = counted / (sent - sent_before)
            if scale > 0:
                self._scale += (scale - self._scale) * 0.3
        self._rates.append(rate)
        self._last_recorded = (now, allowance.remaining, sent)

    def _pace(self, allowance: Allowance, sent_since: float, passed_s: float) -> float | None:
        """Returns a pace that keeps the reserve; None if the rates vary or much remains."""
        if len(self._rates) < _NUM_KEPT or max(self._rates) > min(self._rates) * _MAX_RATE_RATIO:
            return None
        rate = sorted(self._rates)[_NUM_KEPT // 2]
        remaining = min(allowance.limit, allowance.remaining + rate * passed_s - sent_since)
        if remaining > rate * _FREE_S:
            return None
        target = min(rate * _TARGET_S, allowance.limit / 2)
        factor = 1 + 0.2 * (remaining - target) / target
        return rate * min(_MAX_PACE_FACTOR, max(_MIN_PACE_FACTOR, factor)) / self._scale


def _number(text: str) -> float | None:
    """Returns a finite number; None if the text is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _seconds(text: str, now: datetime) -> float | None:
    """Returns the seconds of a duration such as 0.5, 20ms or 6m0s, or until a given date."""
    number = _number(text)
    if number is not None:
        return number
    if text and (match := _DURATION.fullmatch(text)):
        days, hours, minutes, seconds, millis = (float(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds + millis / 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
