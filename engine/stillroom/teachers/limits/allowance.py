"""What an endpoint says in its headers is left of its limits, and the pace that follows from it.

Most say how much may be sent, how much of it is left and how long until nothing is used any more
(`x-ratelimit-*`). In a bucket that refills steadily, what is used over that time is the rate at
which it does, the same in each answer; only then is it believed. Other ways of counting, such as
one that starts anew each minute, are found out by being refused, like those that say nothing.
"""

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from stillroom.teachers.limits.words import LimitUnit, Sent

_APART_S = 0.25
_NUM_KEPT = 4
_STEADY = 1.15
_FREE_S = 2.0
"""With more left than refills in this time nothing is held back."""
_TARGET_S = 1.0
_SLOWEST, _FASTEST = 0.7, 1.5
_MAX_REFUSED, _PER_SENT = 4, 200.0
_LONGEST_S = 2 * 86_400.0
"""What is further off is no span of time, but a date or a slip."""
_NAMES = [
    (unit, tuple(name.format(unit=unit, part=part) for part in ("limit", "remaining", "reset")))
    for unit in LimitUnit
    for name in ("x-ratelimit-{part}-{unit}", "anthropic-ratelimit-{unit}-{part}")
]
_TELLING = frozenset(names[0] for _, names in _NAMES)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+\.?\d*)s)?(?:(\d+\.?\d*)ms)?")


@dataclass(frozen=True, slots=True)
class Allowance:
    """A limit as an endpoint tells it."""

    limit: float
    remaining: float
    reset_s: float
    """Seconds until all of it is there again."""


def allowances(headers: Mapping[str, str], now: datetime) -> dict[LimitUnit, Allowance]:
    """Returns what a response's headers (names in lower case) say, for each unit told in full.

    What cannot be a limit is left out.
    """
    found: dict[LimitUnit, Allowance] = {}
    if _TELLING.isdisjoint(headers):
        return found
    for unit, names in _NAMES:
        if all(name in headers for name in names):
            limit, remaining = _number(headers[names[0]]), _number(headers[names[1]])
            reset_s = _seconds(headers[names[2]], now)
            if limit is None or remaining is None or reset_s is None:
                continue
            if 0 <= remaining <= limit and 0 < reset_s <= _LONGEST_S:
                found[unit] = Allowance(limit, remaining, reset_s)
    return found


class AllowanceFollower:
    """Turns one limit, as it is told with each answer, into a pace."""

    def __init__(self) -> None:
        self.pace: float | None = None
        """What may be sent in a second; None where nothing is told, or much is left."""
        self._rates: deque[float] = deque(maxlen=_NUM_KEPT)
        self._noted: tuple[float, float, float] | None = None
        """When a rate was last noted, what was left then, and what had been sent."""
        self._scale = 1.0
        """What the endpoint counts for each unit that is thought to be sent."""
        self._refused_at: deque[float] = deque(maxlen=_MAX_REFUSED)
        self._is_distrusted = False

    def follow(
        self, allowance: Allowance, sent: Sent, total: float, unit: LimitUnit, now: float
    ) -> None:
        """Learns what the answer to a request says is left, when `total` had been sent in all."""
        if self._is_distrusted or allowance.reset_s <= 0:
            return
        before = sent.before(unit) + sent.amount(unit)
        if self._noted is None or sent.at - self._noted[0] >= _APART_S:
            self._note(allowance, sent.at, before)
        sent_since = max(0.0, total - before) * self._scale
        self.pace = self._pace(allowance, sent_since, now - sent.at)

    def accounts_for_refusal(self, sent: float) -> bool:
        """Returns whether a refusal is one of the few that come with pacing by what is told."""
        if self.pace is None:
            return False
        self._refused_at.append(sent)
        if len(self._refused_at) == _MAX_REFUSED and sent - self._refused_at[0] < _PER_SENT:
            self._is_distrusted, self.pace = True, None
        return not self._is_distrusted

    def _note(self, allowance: Allowance, now: float, sent: float) -> None:
        rate = (allowance.limit - allowance.remaining) / allowance.reset_s
        if rate <= 0:
            return
        if self._noted is not None and sent > self._noted[2]:
            at, remaining, sent_before = self._noted
            counted = rate * (now - at) + remaining - allowance.remaining
            scale = counted / (sent - sent_before)
            if scale > 0:
                self._scale += (scale - self._scale) * 0.3
        self._rates.append(rate)
        self._noted = (now, allowance.remaining, sent)

    def _pace(self, allowance: Allowance, sent_since: float, passed_s: float) -> float | None:
        if len(self._rates) < _NUM_KEPT or max(self._rates) > min(self._rates) * _STEADY:
            return None
        rate = sorted(self._rates)[_NUM_KEPT // 2]
        remaining = min(allowance.limit, allowance.remaining + rate * passed_s - sent_since)
        if remaining > rate * _FREE_S:
            return None
        target = min(rate * _TARGET_S, allowance.limit / 2)
        factor = 1 + 0.2 * (remaining - target) / target
        return rate * min(_FASTEST, max(_SLOWEST, factor)) / self._scale


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _seconds(text: str, now: datetime) -> float | None:
    """Returns a span of time written as 0.5, 20ms, 6m0s or as the moment when it ends."""
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
