"""The time and budget limits of a run on a machine that is billed by the hour.

Time is read from the machine's monotonic clock, which needs no connection and cannot be set.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.files import read_json
from stillroom.home_paths import is_remote_process
from stillroom.run_folder import LIMITS_FILE
from stillroom.settings import Workspace
from stillroom.teachers.pricing import machine_usd_per_hour

_HOUR_S = 3600.0
_KILL_GRACE_S = 600.0
"""The seconds after `hours` until a run that has not stopped is killed."""


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits at which a run saves a checkpoint and stops, even with no connection to it."""

    started: float
    """When the run was started, in seconds on the machine's monotonic clock."""
    hours: float | None = None
    """The maximum duration in hours; None for no limit."""
    budget_usd: float | None = None
    """The maximum cost of machine and teacher together, in US dollars; None for no limit."""
    price_per_hour: float | None = None
    """The hourly price of the machine in US dollars; None if it is unknown."""
    spent_usd: float = 0.0
    """The cost of the machine before the start, in US dollars."""
    reserve_s: float = 0.0
    """The seconds of machine time reserved for the last checkpoint and for copying back."""

    def machine_usd(self, now: float, *, with_reserve: bool = False) -> float:
        """Returns the machine's cost in US dollars at `now`, a time of the monotonic clock.

        with_reserve: adds the reserved time, which gives the cost after a stop at `now`.
        """
        used_s = max(0.0, now - self.started) + (self.reserve_s if with_reserve else 0.0)
        return self.spent_usd + (self.price_per_hour or 0.0) * used_s / _HOUR_S

    def stop_reason(self, now: float, teacher_usd: float) -> str | None:
        """Returns why the run has to stop now; None if it may continue."""
        if self.hours is not None and now - self.started >= self.hours * _HOUR_S:
            return f"it has reached the machine's max_hours of {self.hours:g}"
        if self.budget_usd is None:
            return None
        machine_usd = self.machine_usd(now, with_reserve=True)
        if machine_usd + teacher_usd < self.budget_usd:
            return None
        parts = f"the machine ${self.machine_usd(now):.2f}"
        if teacher_usd:
            parts += f", its teacher ${teacher_usd:.2f}"
        return (
            f"its budget of ${self.budget_usd:g} is spent: {parts}; the rest is reserved for the "
            "last checkpoint and its download"
        )

    def is_overdue(self, now: float, teacher_usd: float) -> bool:
        """Whether a run that was asked to stop must be killed to keep within its limits."""
        used_s = now - self.started
        if self.hours is not None and used_s >= self.hours * _HOUR_S + _KILL_GRACE_S:
            return True
        # Half of the reserved time is for copying the outputs back.
        spent = self.machine_usd(now) + (self.price_per_hour or 0.0) * self.reserve_s / 2 / _HOUR_S
        return self.budget_usd is not None and spent + teacher_usd >= self.budget_usd


def read_limits(folder: Path) -> RunLimits | None:
    """Returns the limits of the run with this folder; None for a run without any.

    Raises DataError if they cannot be read, since a run must not continue without them.
    """
    with suppress(FileNotFoundError):
        return read_json(folder / LIMITS_FILE, RunLimits)
    return None


def usd_per_hour_of(workspace: Workspace, folder: Path) -> float | None:
    """Returns the hourly price of the machine that executes this run; None if it is unknown.

    prices.yml gives the price of the machine that Stillroom itself runs on.
    """
    if not is_remote_process():
        return machine_usd_per_hour(workspace)
    limits = read_limits(folder)
    return limits.price_per_hour if limits is not None else None


def machine_usd_of(
    folder: Path, clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Returns a function for what a run's machine has cost so far, in US dollars.

    The cost includes the reserved time; the rest of the budget may be spent on the teacher's calls.
    It is 0 if the price of the machine is unknown.
    """
    limits = read_limits(folder)
    if limits is None or limits.price_per_hour is None:
        return lambda: 0.0
    return lambda: limits.machine_usd(clock(), with_reserve=True)
