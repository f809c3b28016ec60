"""A plain AIMD controller behind the interface of the engine's own, to compare the two.

Requests in flight double until one is refused. From then on each refusal cuts the window by a twentieth (at least by
one, more where refusals follow one another), and it grows with the requests that are taken, slowly and then faster.
"""

import math
from collections.abc import Iterator

from stillroom.teachers.limits.allowance import Allowance, AllowancePace
from stillroom.teachers.limits.limit_types import LimitKind, LimitSettings, LimitUnit, SentRequest

SHARE, MAX_TIMES, FEW = 0.05, 4.0, 5
"""What a refusal cuts; up to so many times that, where fewer than FEW were taken since the last."""
GROWS_AFTER, POWER, AT_FIRST = 120, 2.5, 0.5
"""The cut is made good after so many were taken; how the growth quickens; by how much each grows it at first."""
SPACED, PAUSE = 1.25, 4.0
"""How much faster than the window and the round trip allow; requests left out after a refusal."""
CATCH_UP_S = 0.01


class Pacer:
    """Spaces requests evenly."""

    def __init__(self) -> None:
        self.free_at = -math.inf

    def record_sent(self, now: float, gap_s: float) -> None:
        self.free_at = max(self.free_at + gap_s, now - CATCH_UP_S)


class AimdController:
    """Decides when the next request may go."""

    def __init__(self, settings: LimitSettings) -> None:
        self.most, self.window = settings.max_in_flight, float(settings.initial_in_flight)
        self.in_flight = 0
        self.after_cut, self.cut_times = self.window, 1.0
        self.is_limited = False
        """Whether anything was refused yet."""
        self.num_sent = self.num_taken = self.last_of_cut = 0
        """Of all; since the last cut; requests up to this number were sent before it."""
        self.tokens_sent = self.trip_s = 0.0
        self.pacer = Pacer()
        self.told_by = {unit: AllowancePace() for unit in LimitUnit}
        self.told_pacers = {unit: Pacer() for unit in LimitUnit}

    def ready_at(self, now: float, tokens: float = 0.0) -> float:
        if self.in_flight >= math.ceil(self.window):
            return math.inf
        return max([now, *(pacer.free_at + gap_s for pacer, gap_s in self.gaps(tokens))])

    def record_sent(self, now: float, tokens: float = 0.0) -> SentRequest:
        self.in_flight += 1
        self.num_sent += 1
        for pacer, gap_s in self.gaps(tokens):
            pacer.record_sent(now, gap_s)
        sent = SentRequest(
            number=self.num_sent,
            at=now,
            in_flight=self.in_flight,
            fills_window=self.in_flight >= math.ceil(self.window),
            tokens=tokens,
            tokens_before=self.tokens_sent,
        )
        self.tokens_sent += tokens
        return sent

    def record_accepted(self, sent: SentRequest, now: float) -> None:
        self.in_flight -= 1
        trip_s = now - sent.at
        self.trip_s += (trip_s - self.trip_s) * 0.1 if self.trip_s else trip_s
        if sent.in_flight * 2 <= self.window or sent.number <= self.last_of_cut:
            return
        window = self.window + AT_FIRST
        if self.is_limited:
            self.num_taken += 1
            grown = (self.num_taken / GROWS_AFTER) ** POWER
            window = self.after_cut + grown * max(1.0, self.after_cut * SHARE)
        self.window = min(float(self.most), window)

    def record_refused(
        self, sent: SentRequest, now: float, _kind: LimitKind = LimitKind.UNKNOWN
    ) -> None:
        self.in_flight -= 1
        if sent.number <= self.last_of_cut or self.told_refused():
            return
        if self.num_taken >= FEW or not self.is_limited:
            self.cut_times = 1.0
        window = min(self.window, sent.in_flight)
        self.window = max(0.05, window - max(1.0, window * SHARE * self.cut_times))
        self.after_cut, self.cut_times = self.window, min(MAX_TIMES, self.cut_times * 2)
        self.is_limited, self.num_taken, self.last_of_cut = True, 0, self.num_sent
        self.pacer.free_at = now + (PAUSE - 1) * self.gap_s

    def record_allowance(
        self, sent: SentRequest, now: float, unit: LimitUnit, allowance: Allowance
    ) -> None:
        self.told_by[unit].update(allowance, sent, self.total(unit), unit, now)

    @property
    def gap_s(self) -> float:
        return self.trip_s / (SPACED * self.window)

    def gaps(self, tokens: float) -> Iterator[tuple[Pacer, float]]:
        """Gives what spaces a request, and by how much."""
        if self.is_limited:
            yield self.pacer, self.gap_s
        for unit, reported in self.told_by.items():
            if reported.pace is not None:
                amount = 1.0 if unit is LimitUnit.REQUESTS else tokens
                yield self.told_pacers[unit], amount / reported.pace

    def total(self, unit: LimitUnit) -> float:
        return float(self.num_sent) if unit is LimitUnit.REQUESTS else self.tokens_sent

    def told_refused(self) -> bool:
        """Whether what the endpoint says of its limits accounts for a refusal."""
        return any(
            reported.accounts_for_refusal(self.total(unit))
            for unit, reported in self.told_by.items()
        )
