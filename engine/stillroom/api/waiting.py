"""When a call that waits for a run answers: at what matters, and not at every step."""

from dataclasses import dataclass, field

from stillroom.api.runs import RunReport
from stillroom.types import RunStatus, WaitReason

_LEAST_WAIT_S = 30.0
_BUDGET_SHARE = 0.8


@dataclass(slots=True)
class RunWatch:
    """Compares a run with how it stood when the call began.

    A call of an agent is paid for in its context, so that progress alone answers only after a
    while, and not if the run will end before the call has to answer anyway.
    """

    first: RunReport
    wait_s: float
    """The most seconds that the call waits."""
    _alarms: set[str] = field(init=False)
    _tenth: tuple[str, int] | None = field(init=False)

    def __post_init__(self) -> None:
        self._alarms = _names(self.first)
        self._tenth = _tenth(self.first)

    def reason(self, run: RunReport, waited_s: float) -> WaitReason | None:
        """Returns why the call should answer now, or None if it should wait on."""
        if RunStatus(run.status).is_final:
            return "ended"
        if _names(run) - self._alarms:
            return "alarm"
        if _is_nearly_spent(run) and not _is_nearly_spent(self.first):
            return "budget"
        if waited_s >= self.wait_s:
            return "time"
        has_moved = _tenth(run) != self._tenth and self._tenth is not None
        is_long = waited_s >= min(_LEAST_WAIT_S, self.wait_s / 2)
        if has_moved and is_long and not self._ends_in_time(run, waited_s):
            return "progress"
        # What the call began with may have been no more than a start.
        self._tenth = self._tenth or _tenth(run)
        return None

    def _ends_in_time(self, run: RunReport, waited_s: float) -> bool:
        eta_s = run.progress.eta_s if run.progress else None
        return eta_s is not None and eta_s < self.wait_s - waited_s


def _names(run: RunReport) -> set[str]:
    """Returns the names of a run's alarms, without the figures, which change with every step."""
    return {alarm.partition(":")[0] for alarm in run.alarms}


def _tenth(run: RunReport) -> tuple[str, int] | None:
    progress = run.progress
    return (
        None if progress is None else (progress.phase, 10 * progress.done // (progress.total or 1))
    )


def _is_nearly_spent(run: RunReport) -> bool:
    # The budget of a run on another machine is for that machine too.
    spent = (run.metrics.get("cost_usd") or 0.0) + (run.machine_usd or 0.0)
    return run.budget_usd is not None and spent > 0 and spent >= _BUDGET_SHARE * run.budget_usd
