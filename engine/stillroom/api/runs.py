"""The operations that show and stop runs, whichever process started them."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from stillroom.errors import DataError, InputError
from stillroom.jobs import supervise
from stillroom.lines import Tail, read_tail
from stillroom.run_folder import (
    FOLLOWER_LOG,
    Progress,
    RunFailure,
    RunFolder,
    RunState,
    all_runs,
    find_run,
    read_remote_state,
)
from stillroom.settings import Workspace
from stillroom.types import OthersText, RunKind, RunStatus, WaitReason
from stillroom.validation import StrictModel

MAX_WAIT_S = 110.0
"""The longest wait of a call, since MCP hosts time out after about 120 s."""
_MAX_NAME = 80
_MAX_UNREADABLE = 20
_CONTINUED_BY_OUTPUT = frozenset({RunKind.ROLLOUTS, RunKind.SCORE})
"""The kinds of runs that resume the work of an earlier run with the same output."""
_MAX_POINTS = 400
_MIN_WAIT_S = 30.0
_BUDGET_SHARE = 0.8


class GetRun(StrictModel):
    """The request for a run's state."""

    run_id: Annotated[str, Field(description="Id, or its unique beginning")]
    wait_s: Annotated[
        float,
        Field(ge=0, le=MAX_WAIT_S, description="Seconds to wait for its end, an alarm or progress"),
    ] = 0


class ListRuns(StrictModel):
    """The request for the list of runs, newest first."""

    status: Annotated[
        Literal["starting", "running", "succeeded", "failed", "cancelled", "interrupted"] | None,
        Field(description="Only this status"),
    ] = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str | None, Field(description="next_cursor of the previous page")] = None


class GetRunLogs(StrictModel):
    """The request for the end of a run's log or events."""

    run_id: str
    source: Annotated[
        Literal["log", "events"], Field(description="log.txt, or metrics and notes")
    ] = "log"
    lines: Annotated[int, Field(ge=1, le=500, description="How many, from the end")] = 50


class CancelRun(StrictModel):
    """The request to stop a run; its finished work is kept."""

    run_id: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a run."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    """A time with its zone in ISO 8601, as all times here."""
    started_at: str | None
    """When its process started; on another machine after installation and upload."""
    ended_at: str | None
    progress: Progress | None
    metrics: dict[str, float | None]
    """The latest value of each metric; None if it was not finite."""
    alarms: list[OthersText]
    """The current problems of a distillation run, each with its remedy; otherwise empty."""
    notes: list[OthersText]
    """Notes on its tools, data and settings; all notes are in its events."""
    result: dict[str, Any] | None
    """The result of a run that has succeeded, or of one that was cancelled if it has any."""
    error: RunFailure | None
    folder: str
    """The folder of the run, relative to the workspace, as `log_path` is."""
    log_path: str
    then: list[str] = []
    """The ids of the runs queued after this one, if start_training got several models."""
    resumed_by: str | None = None
    """The id of the run that resumed this one, if this one ended early."""
    budget_usd: float | None = None
    """The run's spending cap; `metrics.cost_usd` is its spending so far."""
    answered_at: WaitReason | None = None
    """Why a call with wait_s returned; None if it did not wait."""
    where: str | None = None
    """The machine of the run; None for this one, and the next three fields are then unused."""
    last_contact: str | None = None
    """When that machine answered last; the report is as old as this."""
    unreachable: OthersText | None = None
    """Why the machine cannot be reached at the moment; the run continues on it."""
    machine_usd: float | None = None
    """The cost of the machine for this run so far, with installation and upload; None without a
    price. While the machine is unreachable, the cost since `last_contact` is an estimate."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a list of runs."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    name: str | None
    """The name of the run, else its output, else its config; None if it has none."""
    duration_s: float | None
    """The seconds from its process's start to its end, or to now; None if it has not started.

    On another machine, installation and transfers are not counted here, but in `machine_usd`.
    """
    progress: Progress | None
    problem: OthersText | None
    where: str | None = None
    """The machine of the run; None for this one."""
    last_contact: str | None = None
    machine_usd: float | None = None


class UnreadableRun(msgspec.Struct, frozen=True, kw_only=True):
    """A folder in runs/ whose run.json is damaged or from another program."""

    folder: str
    problem: OthersText


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the list of runs, newest first."""

    runs: list[RunSummary]
    total_count: int
    has_more: bool
    next_cursor: str | None
    unreadable: list[UnreadableRun]
    """Folders that are left out because their run.json cannot be read."""


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """The last lines of a run's log or events."""

    run_id: str
    source: str
    path: str
    lines: list[OthersText]
    """The last lines; the middle of a long line is replaced by its length."""
    size_bytes: int
    has_more: bool
    """Whether there are lines before these."""


def get_run(workspace: Workspace, request: GetRun) -> RunReport:
    """Returns the current state of a run without waiting; the caller handles `wait_s`.

    Raises RunError if there is no such run, and DataError if its run.json is damaged.
    """
    folder = find_run(workspace, request.run_id)
    state = supervise.read_run(folder)
    report = report_run(workspace, folder, state)
    if not state.status.is_final or state.status is RunStatus.SUCCEEDED:
        return report
    continuations = continuing_runs(workspace, folder, state.kind)
    return msgspec.structs.replace(report, resumed_by=next(iter(continuations), None))


def cancel_run(workspace: Workspace, request: CancelRun) -> RunReport:
    """Asks a run to stop; a second call after 10 seconds or more kills it.

    Returns the state of the run at once, which may still be `running`. Raises RunError if there is
    no such run, and DataError if its run.json is damaged.
    """
    folder = find_run(workspace, request.run_id)
    return report_run(workspace, folder, supervise.cancel_run(folder))


def list_runs(workspace: Workspace, request: ListRuns) -> RunPage:
    """Returns one page of the workspace's runs, newest first.

    Raises InputError if the cursor is invalid.
    """
    states, unreadable = list[RunState](), list[UnreadableRun]()
    for folder in all_runs(workspace):
        try:
            states.append(supervise.read_run(folder))
        except (DataError, OSError) as error:
            problem = error.problem if isinstance(error, DataError) else str(error)
            unreadable.append(UnreadableRun(folder=workspace.shown(folder.path), problem=problem))
    chosen = [s for s in states if request.status is None or s.status == request.status]
    chosen.sort(key=lambda state: (state.created_at, state.run_id), reverse=True)
    start = _offset(request.cursor)
    page = chosen[start : start + request.limit]
    end = start + len(page)
    has_more = end < len(chosen)
    return RunPage(
        runs=[_summary(workspace, state) for state in page],
        total_count=len(chosen),
        has_more=has_more,
        next_cursor=str(end) if has_more else None,
        unreadable=sorted(unreadable, key=lambda run: run.folder)[:_MAX_UNREADABLE],
    )


def get_run_logs(workspace: Workspace, request: GetRunLogs) -> LogPage:
    """Returns the last lines of a run's log or events; empty if it has not written any.

    Raises RunError if there is no such run.
    """
    folder = find_run(workspace, request.run_id)
    path = _log_of(folder) if request.source == "log" else folder.events
    tail = read_tail(path, request.lines) if path.exists() else Tail([], 0, is_whole=True)
    return LogPage(
        run_id=folder.run_id,
        source=request.source,
        path=workspace.shown(path),
        lines=tail.lines,
        size_bytes=tail.num_bytes,
        has_more=not tail.is_whole,
    )


def report_run(workspace: Workspace, folder: RunFolder, state: RunState) -> RunReport:
    """Returns a run's state as a report, with the paths of its folder and log for display."""
    remote, recorded = read_remote_state(folder.path), folder.try_read_request()
    budget_usd = remote.budget_usd if remote is not None else None
    if budget_usd is None and recorded is not None:
        budget_usd = recorded.request.get("budget_usd")
    return RunReport(
        run_id=state.run_id,
        kind=state.kind,
        status=state.status,
        created_at=state.created_at,
        started_at=state.started_at,
        ended_at=state.ended_at,
        progress=state.progress,
        metrics=state.metrics,
        alarms=state.alarms,
        notes=state.notes,
        result=state.result,
        error=state.error,
        folder=workspace.shown(folder.path),
        log_path=workspace.shown(_log_of(folder)),
        where=remote.where if remote else None,
        last_contact=remote.last_contact if remote else None,
        unreachable=remote.problem if remote else None,
        machine_usd=remote.machine_usd if remote else None,
        budget_usd=budget_usd,
    )


def _log_of(folder: RunFolder) -> Path:
    """Returns the log of a run; for a remote run that has not started, the follower's log."""
    if folder.is_remote and not folder.log.exists():
        return folder.path / FOLLOWER_LOG
    return folder.log


def continuing_runs(workspace: Workspace, folder: RunFolder, kind: RunKind) -> list[str]:
    """Returns the runs that resumed this one's checkpoint, or continued its output, in order."""
    recorded = folder.try_read_request() if kind in _CONTINUED_BY_OUTPUT else None
    output = recorded.request.get("output") if recorded is not None else None
    ended_at = folder.state_file.stat().st_mtime
    later: list[tuple[float, str]] = []
    for other in all_runs(workspace):
        if other.path == folder.path or not other.run_id.startswith(f"{kind}-"):
            continue
        with suppress(DataError, OSError):
            started_at = other.request_file.stat().st_mtime
            request = other.read_request().request
            is_same_output = output is not None and request.get("output") == output
            if request.get("resume") == folder.run_id or (is_same_output and started_at > ended_at):
                later.append((started_at, other.run_id))
    return [run_id for _, run_id in sorted(later)]


def _summary(workspace: Workspace, state: RunState) -> RunSummary:
    folder = RunFolder(workspace.runs / state.run_id)
    request, remote = folder.try_read_request(), read_remote_state(folder.path)
    name = request.display_name if request is not None else None
    return RunSummary(
        run_id=state.run_id,
        kind=state.kind,
        status=state.status,
        created_at=state.created_at,
        name=name[:_MAX_NAME] if name is not None else None,
        duration_s=state.seconds,
        progress=state.progress,
        problem=state.error.problem if state.error else None,
        where=remote.where if remote else None,
        last_contact=remote.last_contact if remote else None,
        machine_usd=remote.machine_usd if remote else None,
    )


def _offset(cursor: str | None) -> int:
    """Returns the index of the first run of a page. Raises InputError for an invalid cursor."""
    if cursor is None:
        return 0
    if not cursor.isdecimal():
        raise InputError(
            f"cursor {cursor!r} was not returned by list_runs", "pass next_cursor unchanged"
        )
    return int(cursor)


class RunMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A run's metrics in columns: `values[name][i]` was measured at `steps[i]`."""

    run_id: str
    num_steps: int
    """The number of steps with metrics; `steps` may list only some of them."""
    steps: list[int]
    values: dict[str, list[float | None]]
    """None where a metric was not measured or not finite."""


def read_run_metrics(workspace: Workspace, run_id: str) -> RunMetrics:
    """Returns the metrics of a run at up to 400 evenly spaced steps, including the last.

    run_id: the id, or its unique beginning. Raises RunError if there is no such run.
    """
    folder = find_run(workspace, run_id)
    by_step: dict[int, dict[str, float | None]] = {}
    for step, values in folder.read_metrics():
        by_step.setdefault(step, {}).update(values)
    steps = sorted(by_step)
    stride = -(-len(steps) // _MAX_POINTS) or 1
    kept_steps = steps[::-1][::stride][::-1]
    names = dict.fromkeys(name for step in kept_steps for name in by_step[step])
    return RunMetrics(
        run_id=folder.run_id,
        num_steps=len(steps),
        steps=kept_steps,
        values={name: [by_step[step].get(name) for step in kept_steps] for name in names},
    )


@dataclass(slots=True)
class RunWatch:
    """Decides when a call that waits for a run should return.

    Each answer costs tokens in the agent's context, so progress alone ends the wait only after a
    while, and not if the run will end before the wait does.
    """

    first: RunReport
    wait_s: float
    """The maximum wait in seconds."""
    _alarms: set[str] = field(init=False)
    _progress_tenth: tuple[str, int] | None = field(init=False)

    def __post_init__(self) -> None:
        self._alarms = _alarm_names(self.first)
        self._progress_tenth = _progress_tenth(self.first)

    def reason(self, run: RunReport, waited_s: float) -> WaitReason | None:
        """Returns why the call should return now, or None if it should keep waiting."""
        if RunStatus(run.status).is_final:
            return "ended"
        if _alarm_names(run) - self._alarms:
            return "alarm"
        if _is_nearly_spent(run) and not _is_nearly_spent(self.first):
            return "budget"
        if waited_s >= self.wait_s:
            return "time"
        has_progressed = (
            _progress_tenth(run) != self._progress_tenth and self._progress_tenth is not None
        )
        # A recipe has many stages, and none of them needs a reaction.
        is_long = waited_s >= min(_MIN_WAIT_S, self.wait_s / 2) and run.kind is not RunKind.RECIPE
        if has_progressed and is_long and not self._ends_in_time(run, waited_s):
            return "progress"
        # The run may have had no progress when the call began.
        self._progress_tenth = self._progress_tenth or _progress_tenth(run)
        return None

    def _ends_in_time(self, run: RunReport, waited_s: float) -> bool:
        eta_s = run.progress.eta_s if run.progress else None
        return eta_s is not None and eta_s < self.wait_s - waited_s


def _alarm_names(run: RunReport) -> set[str]:
    """Returns the names of a run's alarms, without their numbers, which change in every step."""
    return {alarm.partition(":")[0] for alarm in run.alarms}


def _progress_tenth(run: RunReport) -> tuple[str, int] | None:
    """Returns the phase of a run and how many tenths of it are done; None without progress."""
    if (progress := run.progress) is None:
        return None
    # Ignores the detail of a phase, as in "box: installing packages: torch".
    phase = ": ".join(progress.phase.split(": ")[:2])
    return phase, 10 * progress.done // (progress.total or 1)


def _is_nearly_spent(run: RunReport) -> bool:
    """Returns whether a run has spent at least 80 % of its budget."""
    # The budget of a remote run also covers its machine.
    spent = (run.metrics.get("cost_usd") or 0.0) + (run.machine_usd or 0.0)
    return run.budget_usd is not None and spent > 0 and spent >= _BUDGET_SHARE * run.budget_usd
