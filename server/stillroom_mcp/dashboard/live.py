"""The parts of a run's page that change while it runs: figures, progress and metrics."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.report.folders import Run
from stillroom.report.run_list import spent_usd
from stillroom.report.wording import Figure, count, duration, number, percent
from stillroom.run_folder import Progress, RunEvent, RunState
from stillroom.types import dollars

_MAX_BYTES = 4 << 20
"""The maximum number of bytes of events in one response; the page requests the rest later."""

_METRIC_LABELS: tuple[tuple[str, str, str], ...] = (
    ("loss", "Loss", "of the last step"),
    ("teacher_kl", "Reverse KL", "to the teacher, nats per token"),
    ("reward", "Reward", "mean of the last batch"),
    ("tokens_per_s", "Tokens per second", "trained"),
    ("calls_per_s", "Calls per second", "to the teacher"),
    ("tokens", "Tokens", "sent and received"),
    ("failed", "Failed", "rollouts"),
)


class MetricsSoFar(msgspec.Struct, frozen=True):
    """The metrics that a run recorded after a position in its events, as columns."""

    steps: list[int]
    values: dict[str, list[float | None]]
    """For each metric, one value per step; None where a step has no value."""
    next: int
    """The position (a byte of the events file) at which the next metrics begin."""
    has_more: bool


@dataclass(frozen=True, slots=True)
class Spending:
    """The money that a run has spent, and its budget, in US dollars."""

    spent: float
    budget: float | None

    @property
    def text(self) -> str:
        """The spending, and the budget if there is one."""
        spent = dollars(self.spent)
        return spent if self.budget is None else f"{spent} of {dollars(self.budget)}"

    @property
    def share(self) -> float | None:
        """The share of the budget that is spent; None without a budget."""
        return min(1.0, self.spent / self.budget) if self.budget else None


def read_metrics_from(events: Path, start: int) -> MetricsSoFar:
    """Returns the metrics in the lines of an events file after the byte `start`.

    Unreadable lines are skipped. A line that is still being written is left for the next call.
    """
    steps: list[int] = []
    values: dict[str, list[float | None]] = {}
    data = _complete_lines(events, start)
    decoder = msgspec.json.Decoder(RunEvent)
    for line in data.splitlines():
        # A crash may have left an incomplete line.
        with suppress(ValueError, RecursionError):
            event = decoder.decode(line)
            if event.event == "metrics":
                for name, value in (event.values or {}).items():
                    column = values.setdefault(name, [])
                    column += [None] * (len(steps) - len(column))
                    column.append(value)
                steps.append(event.step or 0)
    for column in values.values():
        column.extend([None] * (len(steps) - len(column)))
    end = start + len(data)
    return MetricsSoFar(steps, values, end, has_more=bool(_complete_lines(events, end)))


def _complete_lines(path: Path, start: int) -> bytes:
    """Returns the complete lines of a file after the byte `start`; empty if there is no file."""
    with suppress(FileNotFoundError), path.open("rb") as stream:
        stream.seek(start)
        data = stream.read(_MAX_BYTES)
        return data[: data.rfind(b"\n") + 1]
    return b""


def spending(run: Run, request: Mapping[str, Any]) -> Spending | None:
    """Returns the money that a run has spent; None if it has no known cost and no budget."""
    spent = spent_usd(run)
    budget = run.remote_view.budget_usd if run.remote_view is not None else None
    budget = request.get("budget_usd") if budget is None else budget
    if not isinstance(budget, int | float):
        budget = None
    if spent is None and budget is None:
        return None
    return Spending(spent or 0.0, budget)


def figures(run: Run, request: Mapping[str, Any]) -> list[Figure]:
    """Returns the figures at the top of a run's page, for its current state."""
    state = run.state
    return [*_time_figures(run), *_metric_figures(state), *_money_figures(run, request)]


def _time_figures(run: Run) -> Iterator[Figure]:
    state, progress = run.state, run.state.progress
    if progress is not None and progress.total and not state.status.is_final:
        note = f"{count(progress.done)} of {count(progress.total)} {progress.unit}"
        yield Figure("Done", percent(share_done(progress)), note)
    elapsed = state.seconds
    if elapsed is None:
        return
    if state.status.is_final:
        is_here = run.remote_view is None
        note = "from start to end" if is_here else "without installation and transfers"
        yield Figure("Took", duration(elapsed), note)
    else:
        eta_s = progress.eta_s if progress else None
        left = "remaining time not known yet" if eta_s is None else f"about {duration(eta_s)} left"
        yield Figure("Running for", duration(elapsed), left)


def _metric_figures(state: RunState) -> Iterator[Figure]:
    """Yields the latest metrics of a run; 0 failed rollouts are not shown."""
    for name, label, note in _METRIC_LABELS:
        value = state.metrics.get(name)
        if value is not None and not (name == "failed" and not value):
            yield Figure(label, number(value), note)


def _money_figures(run: Run, request: Mapping[str, Any]) -> Iterator[Figure]:
    money, remote_view = spending(run, request), run.remote_view
    if money is None:
        return
    note = "no budget was set" if money.share is None else f"{percent(money.share)} of the budget"
    if remote_view is not None and remote_view.machine_usd is not None:
        note += f", {dollars(remote_view.machine_usd)} for {remote_view.where}"
        if remote_view.problem is not None:
            note += " (estimated since the last contact)"
    yield Figure("Spent", money.text, note)


def share_done(progress: Progress) -> float:
    """Returns the share of a phase that is done, from 0 to 1."""
    return min(1.0, progress.done / progress.total) if progress.total else 0.0
