"""The list of runs: the kind, outcome and result of each in a line or two."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stillroom.evaluate.intervals import Estimate
from stillroom.report.folders import Run
from stillroom.report.wording import (
    NOTHING,
    count,
    duration,
    moment,
    number,
    percent_interval,
    plural,
    short_name,
)
from stillroom.run_folder import RunFailure, RunState
from stillroom.types import RunKind, RunStatus

_MAIN_METRICS: dict[RunKind, tuple[str, str]] = {
    RunKind.SFT: ("loss", "loss"),
    RunKind.DPO: ("loss", "loss"),
    RunKind.DISTILL: ("teacher_kl", "reverse KL"),
}


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as the page lists it."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    when: str
    took: str
    outcome: str
    error: RunFailure | None


class _Rollouts(msgspec.Struct, frozen=True):
    """The fields of a rollout run's result, or of a dry run's forecast, that the list shows."""

    requested: int
    succeeded: int = 0
    mean_reward: float | None = None
    output: str = ""
    dry_run: bool = False
    todo: int = 0


class _Scoring(msgspec.Struct, frozen=True):
    """The fields of score_rollouts' result that the list shows."""

    read: int
    changed: int
    mean_after: float | None


class _Export(msgspec.Struct, frozen=True):
    """The fields of export_model's result that the list shows."""

    output: str
    format: str


class _Training(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    rows: int
    metrics: dict[str, float | None]


class _Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    accuracy: Estimate


def run_rows(runs: Sequence[Run]) -> list[RunRow]:
    """Returns the runs, newest first."""
    return [_row(run) for run in reversed(runs)]


def _row(run: Run) -> RunRow:
    state = run.state
    took = duration(state.started_at, state.ended_at)
    return RunRow(
        run_id=run.run_id,
        kind=state.kind,
        status=state.status,
        created_at=state.created_at,
        when=moment(state.created_at),
        took=took or (NOTHING if state.status.is_final else "unfinished"),
        outcome=_outcome(state),
        error=state.error,
    )


def _outcome(state: RunState) -> str:
    if state.status is not RunStatus.SUCCEEDED:
        return _progress(state)
    try:
        match state.kind:
            case RunKind.ROLLOUTS:
                return _of_rollouts(msgspec.convert(state.result, type=_Rollouts))
            case RunKind.SCORE:
                return _of_scoring(msgspec.convert(state.result, type=_Scoring))
            case RunKind.EVALUATE:
                return _of_evaluation(msgspec.convert(state.result, type=_Evaluation))
            case RunKind.EXPORT:
                return _of_export(msgspec.convert(state.result, type=_Export))
            case RunKind.SFT | RunKind.DPO | RunKind.DISTILL:
                result = msgspec.convert(state.result, type=_Training)
                return _of_training(result, state.kind)
    # What another version of stillroom wrote may have other fields.
    except (ValueError, RecursionError):
        return "its result cannot be read"


def _progress(state: RunState) -> str:
    progress = state.progress
    if progress is None:
        return "ended without progress" if state.status.is_final else "no progress yet"
    done = f"{count(progress.done)} of {count(progress.total)} {progress.unit}"
    return f"{progress.phase}: {done}" if progress.phase != state.kind else done


def _of_rollouts(result: _Rollouts) -> str:
    if result.dry_run:
        return f"dry run: {plural(result.todo, 'rollout')} to do"
    done = f"{count(result.succeeded)} of {count(result.requested)} rollouts in {result.output}"
    if result.mean_reward is None:
        return done
    return f"{done}, mean reward {number(result.mean_reward)}"


def _of_scoring(result: _Scoring) -> str:
    done = f"{count(result.changed)} of {count(result.read)} rollouts scored anew"
    if result.mean_after is None:
        return done
    return f"{done}, mean reward {number(result.mean_after)}"


def _of_evaluation(result: _Evaluation) -> str:
    accuracy = percent_interval(result.accuracy)
    within = f" ({accuracy.range})" if accuracy.range else ""
    tasks = plural(result.accuracy.n, "task")
    return f"{short_name(result.name)}: {accuracy.value}{within} of {tasks} right"


def _of_export(result: _Export) -> str:
    return f"{result.format} in {result.output}"


def _of_training(result: _Training, kind: RunKind) -> str:
    steps = f"{plural(result.steps, 'step')} on {plural(result.rows, 'row')}"
    metric, name = _MAIN_METRICS[kind]
    value = result.metrics.get(metric)
    return steps if value is None else f"{steps}, {name} at the end {number(value)}"
