"""What a run may cost on a machine that is paid by the hour, with a clock that tests set."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from stillroom.errors import DataError
from stillroom.files import write_json
from stillroom.jobs.worker import enforce_limits
from stillroom.remote.follower.launcher import reserve_s
from stillroom.remote.follower.local_run import machine_usd
from stillroom.run_folder import LIMITS_FILE
from stillroom.teachers.budget import Budget, BudgetSpentError, Cost
from stillroom.teachers.run_limits import RunLimits, machine_usd_of, read_limits

HOUR = 3600.0


def limits(**fields: float) -> RunLimits:
    given = {"hours": 10.0, "budget_usd": 6.0, "price_per_hour": 2.0, "reserve_s": 900.0}
    return RunLimits(started=100.0, **{**given, **fields})


def test_the_machine_costs_by_its_own_clock_and_what_it_cost_before_counts() -> None:
    assert limits(spent_usd=0.5).machine_usd(100.0 + 1.5 * HOUR) == pytest.approx(3.5)
    assert machine_usd(2.0, 1.5 * HOUR) == pytest.approx(3.0)
    assert machine_usd(None, HOUR) is None


@pytest.mark.parametrize(
    ("hours", "teacher_usd", "reached"),
    [
        (0.0, 0.0, None),
        (2.7, 0.0, None),
        # $5.50 for 2.75 hours, and $0.50 are kept for the stop.
        (2.75, 0.0, "the machine $5.50; the rest is reserved"),
        (1.0, 3.4, None),
        (1.0, 3.5, "the machine $2.00, its teacher $3.50; the rest"),
    ],
)
def test_a_budget_is_for_machine_and_teacher_together(
    hours: float, teacher_usd: float, reached: str | None
) -> None:
    reason = limits().stop_reason(100.0 + hours * HOUR, teacher_usd)
    assert (reason is None) == (reached is None)
    assert reached is None or reached in str(reason)


def test_the_hours_count_without_a_price_too() -> None:
    timed = RunLimits(started=0.0, hours=2.0)
    assert timed.stop_reason(2 * HOUR - 1, 99.0) is None
    assert "reached the machine's max_hours of 2" in str(timed.stop_reason(2 * HOUR, 0.0))
    assert not timed.is_overdue(2 * HOUR + 599, 0.0)
    assert timed.is_overdue(2 * HOUR + 600, 0.0)


def test_a_large_model_keeps_more_of_the_budget_but_never_most_of_it() -> None:
    def kept(**fields: float) -> float:
        given = {"price_per_hour": 2.0, "budget_usd": 6.0, "model_bytes": 0, "bytes_per_s": 1e6}
        return reserve_s(**{**given, **fields})  # type: ignore[arg-type]

    assert kept() == 60
    assert kept(model_bytes=100_000_000) == 60 + 300
    assert kept(model_bytes=10**12) == pytest.approx(0.25 * 3 * HOUR)
    assert reserve_s(price_per_hour=2.0, budget_usd=None, model_bytes=1, bytes_per_s=1) == 0


class Work:
    """A run that stops some time after it is told to, or never."""

    def __init__(self, stops_after_s: float) -> None:
        self.stops_after_s, self.clock_s = stops_after_s, 100.0
        self.teacher_usd = 0.0
        self.reasons: list[str | None] = []
        self.stopped_at: float | None = None
        self.was_killed = False

    def cancel_from_any_thread(self, limit: str | None = None) -> None:
        self.reasons.append(limit)
        self.stopped_at = self.clock_s

    def has_ended(self, _: float) -> bool:
        self.clock_s += 10.0
        self.teacher_usd += 0.001
        return self.stopped_at is not None and self.clock_s - self.stopped_at >= self.stops_after_s

    def kill(self, reason: str) -> None:
        assert reason == self.reasons[0]
        self.was_killed = True


@pytest.mark.parametrize(
    ("stops_after_s", "was_killed"), [(0.0, False), (300.0, False), (1e9, True)]
)
def test_a_run_is_stopped_in_time_and_killed_if_it_does_not_stop(
    stops_after_s: float, was_killed: bool
) -> None:
    work = Work(stops_after_s)
    enforce_limits(limits(), work, work.has_ended, clock=lambda: work.clock_s, kill=work.kill)
    assert len(work.reasons) == 1
    assert work.was_killed == was_killed
    # However it ended, the machine and the teacher together cost no more than the budget, and
    # something of it is left for bringing back what there is.
    total = limits().machine_usd(work.clock_s) + work.teacher_usd
    assert total <= 6.0 - 0.2


def share(folder: Path, clock: Callable[[], float], **fields: float) -> Callable[[], float]:
    write_json(folder / LIMITS_FILE, limits(**fields))
    return machine_usd_of(folder, clock)


def test_a_teacher_gets_only_what_its_machine_leaves_of_the_budget(tmp_path: Path) -> None:
    clock_s = 100.0
    budget = Budget(usd=6.0, other_usd=share(tmp_path, lambda: clock_s))
    call = Cost(tokens=10, usd=1.0)

    async def spend() -> int:
        nonlocal clock_s
        num_calls = 0
        while True:
            try:
                await budget.reserve(call)
            except BudgetSpentError:
                return num_calls
            budget.record_sent(call)
            clock_s += HOUR / 2  # The machine costs $1 while a call is made.
            budget.settle(call, call)
            num_calls += 1

    # $0.50 are kept: after two calls $2 are the teacher's and $2 the machine's, and the third
    # would leave nothing to stop with.
    assert anyio.run(spend) == 3
    assert budget.spent.usd + limits().machine_usd(clock_s) <= 6.0


def test_without_limits_a_budget_is_the_teachers_alone(tmp_path: Path) -> None:
    assert read_limits(tmp_path) is None
    assert machine_usd_of(tmp_path)() == 0.0
    # Damaged ones end the run: it would go on without any.
    (tmp_path / LIMITS_FILE).write_text("{")
    with pytest.raises(DataError):
        machine_usd_of(tmp_path)
