"""A simulated endpoint with limits, and clients that keep it as busy as a controller lets them."""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from stillroom.teachers.limits.allowance import Allowance
from stillroom.teachers.limits.limit_types import LimitKind, LimitSettings, LimitUnit
from stillroom.teachers.limits.limiter import LimitController


@dataclass
class Bucket:
    """Refills at the rate of the schedule [(from second, units per second)], up to a burst."""

    schedule: Sequence[tuple[float, float]]
    burst: float
    level: float = field(init=False)
    at: float = 0.0
    offered: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.offered = self.burst

    def rate(self, now: float) -> float:
        return [rate for second, rate in self.schedule if second <= now][-1]

    def allowance(self, now: float, times: float) -> Allowance:
        """What an endpoint says of it in its headers; wrong by `times`."""
        reset_s = (self.burst - self.level) / self.rate(now)
        return Allowance(self.burst * times, self.level * times, reset_s)

    def take(self, now: float, amount: float) -> bool:
        gained = (now - self.at) * self.rate(now)
        self.at, self.offered = now, self.offered + gained
        self.level = min(self.burst, self.level + gained)
        if self.level < amount:
            return False
        self.level -= amount
        return True


@dataclass
class Simulated:
    """How a run went."""

    accepted: int = 0
    refused: int = 0
    accepted_cost: float = 0.0
    most_in_flight: int = 0
    busy: float = 0.0
    """Seconds x requests that were being answered."""


def simulate(
    settings: LimitSettings,
    *,
    seconds: float,
    bucket: Bucket | None = None,
    most_at_once: int = 10**9,
    latency_s: float = 0.05,
    sigma: float = 0.0,
    refusal_s: float = 0.002,
    num_clients: int = 256,
    cost: Callable[[random.Random], float] = lambda _rng: 1.0,
    lateness_s: float = 0.0,
    kind: LimitKind = LimitKind.UNKNOWN,
    tells: LimitUnit | None = None,
    told_times: float = 1.0,
    controller: LimitController | None = None,
) -> Simulated:
    """Lets clients send whenever the controller allows it, each waiting for its answer.

    `cost` is what a request counts in the bucket, in tokens where the controller asks for those.
    Requests go out late by `lateness_s` on average, as they do on a busy machine. With `tells` each
    answer says what is left in the bucket, and how much that is, `told_times` as much as it is.
    """
    controller = controller or LimitController(settings)
    rng, numbers = random.Random(0), count()
    result = Simulated()
    events: list = []
    now, waiting, answering = 0.0, num_clients, 0
    amount, late_s = cost(rng), 0.0
    while now < seconds:
        ready_at = controller.ready_at(now, amount) if waiting else math.inf
        if ready_at > now:
            late_s = rng.expovariate(1 / lateness_s) if lateness_s else 0.0
        if ready_at <= now:
            sent, waiting = controller.record_sent(now, amount), waiting - 1
            is_taken = answering < most_at_once and (bucket is None or bucket.take(now, amount))
            if is_taken:
                answering += 1
                mean = math.log(latency_s) - sigma**2 / 2
                trip = rng.lognormvariate(mean, sigma) if sigma else latency_s
                result.accepted_cost += amount
                result.busy += trip
            else:
                trip = refusal_s
            reported = (
                bucket.allowance(now, told_times)
                if tells is not None and bucket is not None
                else None
            )
            heapq.heappush(events, (now + trip, next(numbers), sent, is_taken, reported))
            amount = cost(rng)
            result.most_in_flight = max(result.most_in_flight, controller.in_flight)
            continue
        next_at = min(ready_at + late_s, events[0][0] if events else math.inf)
        now = next_at
        while events and events[0][0] <= now:
            _, _, sent, is_taken, reported = heapq.heappop(events)
            waiting += 1
            if tells is not None and reported is not None:
                controller.record_allowance(sent, now, tells, reported)
            if is_taken:
                answering -= 1
                controller.record_accepted(sent, now)
                result.accepted += 1
            else:
                controller.record_refused(sent, now, kind)
                result.refused += 1
    return result
