"""The list of runs, with the kind, outcome and result of each in a line or two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from stillroom.evaluate.intervals import Estimate
from stillroom.lineage import seconds_between
from stillroom.report.folders import Run
from stillroom.report.wording import (
    NO_VALUE,
    count,
    duration,
    number,
    percent_interval,
    plural,
    short_name,
)
from stillroom.run_folder import RemoteView, RunFolder, RunRequest, RunState
from stillroom.types import RunKind, RunStatus, dollars


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in the list."""

    run: Run
    took: str
    outcome: str
    remote_view: RemoteView | None
    """The state of a run on another machine; None if it runs on this machine."""
    cost: str | None
    """Its cost in US dollars; None if it is unknown or zero."""
    command: str | None
    """The command that starts the run again; None if its request cannot be read."""


class _Rollouts(msgspec.Struct, frozen=True):
    """The fields of a rollout run's result, or of a dry run's forecast, that the list shows."""

    requested: int
    succeeded: int = 0
    mean_reward: float | None = None
    output: str = ""
    dry_run: bool = False
    todo: int = 0

    def line(self) -> str:
        if self.dry_run:
            return f"dry run: {plural(self.todo, 'rollout')} to generate"
        text = f"{count(self.succeeded)} of {count(self.requested)} rollouts in {self.output}"
        return text + _mean_reward(self.mean_reward)


class _Scoring(msgspec.Struct, frozen=True):
    """The fields of score_rollouts' result that the list shows."""

    read: int
    changed: int
    mean_after: float | None

    def line(self) -> str:
        text = f"{count(self.changed)} of {count(self.read)} rollouts have new rewards"
        return text + _mean_reward(self.mean_after)


def _mean_reward(mean: float | None) -> str:
    return "" if mean is None else f", mean reward {number(mean)}"


class _Curation(msgspec.Struct, frozen=True):
    """The fields of the results of operations on large files that the list shows."""

    read: int = 0
    rows: int = 0
    kept: int | None = None
    converted: int | None = None
    pairs: int | None = None
    sampled: int | None = None
    good: int | None = None
    output: str = ""

    def line(self) -> str:
        counts = {"kept": self.kept, "converted": self.converted, "pairs": self.pairs,
                "sampled": self.sampled, "good": self.good}  # fmt: skip
        parts = [f"{count(num)} {name}" for name, num in counts.items() if num is not None]
        if not parts:
            return "the result is in run.json"
        location = f" in {self.output}" if self.output else ""
        return f"{parts[0]}{location}, of {plural(self.read or self.rows, 'row')}"


class _Export(msgspec.Struct, frozen=True):
    """The fields of export_model's result that the list shows."""

    output: str
    format: str

    def line(self) -> str:
        return f"{self.format} in {self.output}"


class _Training(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a training run's result that the list shows."""

    steps: int
    rows: int
    metrics: dict[str, float | None]

    def line(self) -> str:
        steps = f"{plural(self.steps, 'step')} on {plural(self.rows, 'row')}"
        is_distilled = "teacher_kl" in self.metrics
        metric, name = ("teacher_kl", "reverse KL") if is_distilled else ("loss", "loss")
        value = self.metrics.get(metric)
        return steps if value is None else f"{steps}, final {name} {number(value)}"


class _Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an evaluation's result that the list shows."""

    name: str
    accuracy: Estimate

    def line(self) -> str:
        accuracy = percent_interval(self.accuracy)
        interval = f" ({accuracy.range})" if accuracy.range else ""
        tasks = plural(self.accuracy.n, "task")
        return f"{short_name(self.name)}: {accuracy.value}{interval} of {tasks} right"


_RESULTS = {
    RunKind.ROLLOUTS: _Rollouts,
    RunKind.SCORE: _Scoring,
    RunKind.EVALUATE: _Evaluation,
    RunKind.EXPORT: _Export,
    RunKind.SFT: _Training,
    RunKind.DPO: _Training,
    RunKind.DISTILL: _Training,
}


def run_rows(
    runs: Sequence[Run], command_of: Callable[[RunRequest], str] | None = None
) -> list[RunRow]:
    """Returns the rows of the runs, newest first.

    `command_of` returns the command for a request; without it, rows have no commands.
    """
    return [
        RunRow(
            run=run,
            took=_duration_text(run.state),
            outcome=_outcome(run.state),
            remote_view=run.remote_view,
            cost=dollars(spent) if (spent := spent_usd(run)) else None,
            command=_command(run, command_of) if command_of else None,
        )
        for run in reversed(runs)
    ]


def totals(runs: Sequence[Run]) -> str:
    """Returns the total duration and cost of the runs as a sentence."""
    spans = (seconds_between(run.state.started_at or "", run.state.ended_at or "") for run in runs)
    costs = [spent for run in runs if (spent := spent_usd(run))]
    sentence = f"In total, they took {duration(sum(filter(None, spans)))}"
    if any(run.remote_view is not None for run in runs):
        sentence += " without installation and transfers on other machines"
    return f"{sentence} and cost {dollars(sum(costs))}." if costs else f"{sentence}."


def spent_usd(run: Run) -> float | None:
    """Returns the cost of a run's calls and machine so far, in US dollars; None if unknown."""
    # A run's last live metric may be older than its result.
    recorded_costs = ((run.state.result or {}).get("cost_usd"), run.state.metrics.get("cost_usd"))
    calls = next((float(cost) for cost in recorded_costs if isinstance(cost, int | float)), None)
    machine = run.remote_view.machine_usd if run.remote_view is not None else None
    return None if calls is None and machine is None else (calls or 0.0) + (machine or 0.0)


def _command(run: Run, command_of: Callable[[RunRequest], str]) -> str | None:
    request = RunFolder(run.folder).try_read_request()
    return command_of(request) if request is not None else None


def _duration_text(state: RunState) -> str:
    """Returns the duration of a run as text; `unfinished` while it is active."""
    took = seconds_between(state.started_at or "", state.ended_at or "")
    if took is None or took < 0:
        return NO_VALUE if state.status.is_final else "unfinished"
    return duration(took)


def _outcome(state: RunState) -> str:
    """Returns the result of a successful run in a line; for any other run, its progress."""
    if state.status is not RunStatus.SUCCEEDED:
        return _progress(state)
    try:
        return msgspec.convert(state.result, type=_RESULTS.get(state.kind, _Curation)).line()
    # Another version of stillroom may have written other fields.
    except (ValueError, RecursionError):
        return "the result cannot be read"


def _progress(state: RunState) -> str:
    progress = state.progress
    if progress is None:
        return "ended without progress" if state.status.is_final else "no progress yet"
    done = f"{count(progress.done)} of {count(progress.total)} {progress.unit}"
    return f"{progress.phase}: {done}" if progress.phase != state.kind else done
