"""The cases of limits.py and some slower ones, simulated, for the engine's controller and for a plain AIMD one.

limits_simulated.py [CASE …] prints one JSON line for each case and controller: the means of five seeds. The endpoint
is endpoint.py's own; the clients, the network and the clock are simulated, so nothing waits.
"""

import math
import random
import sys
from collections import deque
from datetime import UTC, datetime
from statistics import mean
from typing import Any

import endpoint as scripted
import limits
from aimd import AimdController
from common import report
from simulated_clock import Clock

from stillroom.teachers.endpoint.replies import limit_kind
from stillroom.teachers.limits.allowance import allowances
from stillroom.teachers.limits.limit_types import LimitSettings
from stillroom.teachers.limits.limiter import LimitController

CONTROLLERS = {"searches": LimitController, "aimd": AimdController}
CASES = limits.CASES | {
    "long_answers": (["--rps", "200", "--latency", "0.5", "--sigma", "0.5"], 2000),
    "few_a_second": (["--rps", "8", "--burst", "8", "--latency", "5", "--sigma", "0.5"], 1000),
    "one_a_second": (["--rps", "1", "--burst", "5", "--latency", "2", "--sigma", "0.5"], 400),
}
NUM_SEEDS = 5
WIRE_S, LATE_S, TOOL_S = 0.0005, 0.001, 0.002
"""One way over the network; how late a timer is on average; what a tool takes."""
CALLS = 4
MIN_WAIT_S = 0.016
"""A refused call waits at least so long, as in the engine."""


class Run:
    """One run of many rollouts, each some calls in a row, against one endpoint."""

    def __init__(self, controller: Any, options: list[str], num_rollouts: int, seed: int) -> None:
        self.clock = scripted.time = Clock()
        self.options = scripted.parse(options)
        self.endpoint = scripted.Endpoint(self.options)
        self.controller, self.rng = controller, random.Random(seed)
        self.num_left, self.num_active = num_rollouts, 0
        self.queue: deque[tuple[int, float]] = deque()
        self.timer_at = math.inf

    def start(self) -> None:
        """Begins rollouts, a quarter more than there are calls allowed, as the engine does."""
        window = int(self.controller.window)
        while self.num_left and self.num_active < max(20, window + window // 4):
            self.num_left, self.num_active = self.num_left - 1, self.num_active + 1
            self.clock.after(self.rng.uniform(0, 0.001), self.ask, 0)

    def ask(self, turn: int, tokens: float = 0.0) -> None:
        tokens = tokens or 170 + 65 * turn + self.rng.randrange(8)
        self.queue.append((turn, tokens))
        self.let_go()

    def woken(self, at: float) -> None:
        if at == self.timer_at:
            self.timer_at = math.inf
            self.let_go()

    def let_go(self) -> None:
        while self.queue:
            now, call = self.clock.now, self.queue[0]
            at = self.controller.ready_at(now, call[1])
            if at > now:
                if at not in (math.inf, self.timer_at):
                    self.timer_at = at
                    self.clock.after(at - now + self.rng.expovariate(1 / LATE_S), self.woken, at)
                return
            sent = self.controller.record_sent(now, self.queue.popleft()[1])
            self.clock.after(WIRE_S, self.arrives, sent, call)

    def arrives(self, sent: Any, call: tuple[int, float]) -> None:
        endpoint, options = self.endpoint, self.options
        endpoint.first_at = endpoint.first_at or self.clock.now
        endpoint.counts["requests"] += 1
        refusal = endpoint.refusal(b"", int(call[1]))
        headers = dict(h.split(": ") for h in endpoint.reported().decode().split("\r\n") if h)
        if refusal is not None:
            endpoint.counts["refused"] += 1
            return self.clock.after(WIRE_S, self.is_refused, sent, call, headers, refusal)
        endpoint.in_flight += 1
        latency = options.latency
        if options.sigma:
            middle = math.log(latency) - options.sigma**2 / 2
            latency = self.rng.lognormvariate(middle, options.sigma)
        return self.clock.after(latency, self.answers, sent, call[0], headers)

    def answers(self, sent: Any, turn: int, headers: dict[str, str]) -> None:
        self.endpoint.in_flight -= 1
        self.endpoint.counts["answered"] += 1
        self.endpoint.last_at = self.clock.now
        self.clock.after(WIRE_S, self.is_answered, sent, turn, headers)

    def is_answered(self, sent: Any, turn: int, headers: dict[str, str]) -> None:
        self.tell(sent, headers)
        self.controller.record_accepted(sent, self.clock.now)
        if turn + 1 < CALLS:
            self.clock.after(TOOL_S, self.ask, turn + 1)
        self.num_active -= turn + 1 == CALLS
        self.start()
        self.let_go()

    def is_refused(self, sent: Any, call: tuple, headers: dict[str, str], refusal: tuple) -> None:
        self.tell(sent, headers)
        self.controller.record_refused(sent, self.clock.now, limit_kind(refusal[1]))
        self.clock.after(max(refusal[0], MIN_WAIT_S), self.ask, *call)
        self.let_go()

    def tell(self, sent: Any, headers: dict[str, str]) -> None:
        for unit, allowance in allowances(headers, datetime.now(UTC)).items():
            self.controller.record_allowance(sent, self.clock.now, unit, allowance)


def figures(name: str, controller: Any, seed: int) -> tuple[float, float, float]:
    options, num = CASES[name]
    run = Run(
        controller(LimitSettings(initial_in_flight=20, max_in_flight=256)), options, num, seed
    )
    run.start()
    run.clock.run()
    seen = run.endpoint.counters()
    used = [limit["granted"] / limit["offered"] for limit in seen["limits"].values()]
    at_once = run.options.max_in_flight * seen["span_s"]
    share = used[0] if used else seen["answered"] * run.options.latency / at_once
    return share, seen.get("refused", 0) / seen["requests"], seen["span_s"]


def main() -> None:
    for name in sys.argv[1:] or CASES:
        for label, controller in CONTROLLERS.items():
            runs = [figures(name, controller, seed) for seed in range(NUM_SEEDS)]
            used, refused, seconds = (round(mean(one), 4) for one in zip(*runs, strict=True))
            report(case=name, controller=label, share_of_limit_used=used, share_refused=refused, seconds=seconds)  # fmt: skip


if __name__ == "__main__":
    main()
