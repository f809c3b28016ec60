"""Long work: started here, done in a process of its own, looked at and stopped from anywhere."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from stillroom.errors import InputError
from stillroom.evaluate.request import EvaluateModel, check_evaluation
from stillroom.export.request import ExportModel, plan_export
from stillroom.jobs import supervise
from stillroom.jobs.inline import plan_in_child
from stillroom.jobs.store import (
    Progress,
    RunFailure,
    RunFolder,
    RunState,
    Turn,
    all_runs,
    find_run,
    hashes_of,
)
from stillroom.rollout.request import GenerateRollouts, check_rollouts, locate_policy
from stillroom.rollout.score import ScoreRollouts, check_scoring
from stillroom.settings import (
    Workspace,
    tool_environment,
    tracking_environment,
    training_environment,
)
from stillroom.teachers.providers import IN_PROCESS, TEACHER_KEYS
from stillroom.train.forecast import TrainingForecast
from stillroom.train.request import (
    PlanTraining,
    StartTraining,
    TrainingPlan,
    plan_request,
    resolve_resume,
)
from stillroom.train.several import one_for_each_model, planned_together
from stillroom.types import RunKind, RunStatus

MAX_WAIT_S = 50.0


class GetRun(BaseModel):
    """Ask how a run stands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: Annotated[str, Field(description="Id, or enough of its beginning")]
    wait_s: Annotated[
        float, Field(ge=0, le=MAX_WAIT_S, description="Wait so long for it to end")
    ] = 0


class ListRuns(BaseModel):
    """Ask which runs there are, newest first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Annotated[
        Literal["starting", "running", "succeeded", "failed", "cancelled", "interrupted"] | None,
        Field(description="Only these"),
    ] = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str | None, Field(description="next_cursor of the page before")] = None


class GetRunLogs(BaseModel):
    """Ask for the end of a run's log or events."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    source: Annotated[
        Literal["log", "events"], Field(description="log.txt, or metrics and notes")
    ] = "log"
    lines: Annotated[int, Field(ge=1, le=500, description="How many of the last ones")] = 50


class CancelRun(BaseModel):
    """Ask a run to stop; what it has done stays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it stands now."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    started_at: str | None
    ended_at: str | None
    progress: Progress | None
    metrics: dict[str, float | None]
    alarms: list[str]
    """What is wrong with it now, and what to change (distill)."""
    result: dict[str, Any] | None
    error: RunFailure | None
    folder: str
    log_path: str
    then: list[str] = []
    """Of start_training with several models: the runs of the others, which wait for this one."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run as a line of a list."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    progress: Progress | None
    problem: str | None


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some runs, newest first."""

    runs: list[RunSummary]
    total_count: int
    has_more: bool
    next_cursor: str | None


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """The last lines of a run's log or events."""

    run_id: str
    source: str
    path: str
    lines: list[str]
    total_lines: int


def generate_rollouts(workspace: Workspace, request: GenerateRollouts) -> RunReport:
    """Starts a rollout run. Raises an EngineError for what is wrong before anything is spent."""
    workspace.existing(request.input, what="input")
    workspace.output_file(request.output, what="output")
    check_rollouts(workspace, request)
    if request.provider in IN_PROCESS:
        locate_policy(workspace, request)
    return _start(workspace, RunKind.ROLLOUTS, request, tool_environment())


def score_rollouts(workspace: Workspace, request: ScoreRollouts) -> RunReport:
    """Starts a scoring run. Raises an EngineError for what is wrong before anything is spent."""
    check_scoring(workspace, request)
    return _start(workspace, RunKind.SCORE, request, tool_environment())


def plan_training(workspace: Workspace, request: PlanTraining) -> TrainingForecast:
    """Returns what a run would need and what to change; raises for what would end it."""
    requests = one_for_each_model(workspace, request)
    plans = [plan_request(workspace, each) for each in requests]
    forecasts = [
        plan_in_child(workspace, each, environment=_planning_environment(workspace, plan))
        for each, plan in zip(requests, plans, strict=True)
    ]
    return planned_together(requests, forecasts)


def _planning_environment(workspace: Workspace, plan: TrainingPlan) -> dict[str, str]:
    """Returns that of training on files, with a served teacher's key: its server is asked."""
    name = plan.config.teacher.api_key_env if plan.config.teacher is not None else None
    key = workspace.read_key(name)
    return training_environment() | ({name: key} if name is not None and key is not None else {})


def start_training(workspace: Workspace, request: StartTraining) -> RunReport:
    """Starts a training run; where model.path is a list one for each, which wait for one another.

    Raises an EngineError for what is wrong with any of them before a model is loaded.
    """
    requests = one_for_each_model(workspace, resolve_resume(workspace, request))
    plans = [plan_request(workspace, each) for each in requests]
    environment = _training_environment(workspace, plans[0])
    kind = RunKind(plans[0].config.dataset_type)
    first, *others = requests
    report = _start(workspace, kind, first, environment)
    then, files = list[str](), hashes_of([plans[0].config_file])
    for other in others:
        turn = Turn(after=[report.run_id, *then], files=files)
        then.append(_start(workspace, kind, other, environment, turn=turn).run_id)
    return msgspec.structs.replace(report, then=then)


def _training_environment(workspace: Workspace, plan: TrainingPlan) -> dict[str, str]:
    kind = RunKind(plan.config.dataset_type)
    # The user's tools may need secrets where the student acts; otherwise only files are read.
    is_acting = kind is RunKind.DISTILL or bool(plan.config.evals)
    environment = training_environment()
    if is_acting:
        # The keys of servers that score and sample are needed there.
        config, is_distilled = plan.config, kind is RunKind.DISTILL
        servers = (config.teacher, config.rollout.server) if is_distilled else ()
        own = {server.api_key_env for server in servers if server is not None}
        environment = tool_environment(without=frozenset(TEACHER_KEYS - own))
    has_wandb = plan.config.trainer.wandb_project is not None
    return environment | tracking_environment(workspace, has_wandb=has_wandb)


def evaluate_model(workspace: Workspace, request: EvaluateModel) -> RunReport:
    """Starts an evaluation. Raises an EngineError for what is wrong before a model is loaded."""
    check_evaluation(workspace, request)
    return _start(workspace, RunKind.EVALUATE, request, tool_environment())


def export_model(workspace: Workspace, request: ExportModel) -> RunReport:
    """Starts an export. Raises an EngineError for what is wrong before a model is loaded."""
    plan_export(workspace, request)
    return _start(workspace, RunKind.EXPORT, request, training_environment())


def get_run(workspace: Workspace, request: GetRun) -> RunReport:
    """Returns the run as it stands now; waiting is the caller's."""
    folder = find_run(workspace, request.run_id)
    return _report(workspace, folder, supervise.read_run(folder))


def cancel_run(workspace: Workspace, request: CancelRun) -> RunReport:
    """Asks the run to stop; called again after 10 seconds it kills what has not stopped."""
    folder = find_run(workspace, request.run_id)
    return _report(workspace, folder, supervise.cancel_run(folder))


def list_runs(workspace: Workspace, request: ListRuns) -> RunPage:
    """Returns a page of the workspace's runs, newest first."""
    states = [supervise.read_run(folder) for folder in all_runs(workspace)]
    chosen = [s for s in states if request.status is None or s.status == request.status]
    chosen.sort(key=lambda state: (state.created_at, state.run_id), reverse=True)
    start = _offset(request.cursor)
    page = chosen[start : start + request.limit]
    end = start + len(page)
    has_more = end < len(chosen)
    return RunPage(
        runs=[_summary(state) for state in page],
        total_count=len(chosen),
        has_more=has_more,
        next_cursor=str(end) if has_more else None,
    )


def get_run_logs(workspace: Workspace, request: GetRunLogs) -> LogPage:
    """Returns the last lines of the run's log or events."""
    folder = find_run(workspace, request.run_id)
    path = folder.log if request.source == "log" else folder.events
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines()
    return LogPage(
        run_id=folder.run_id,
        source=request.source,
        path=workspace.shown(path),
        lines=lines[-request.lines :],
        total_lines=len(lines),
    )


def _start(
    workspace: Workspace,
    kind: RunKind,
    request: BaseModel,
    environment: dict[str, str],
    *,
    turn: Turn | None = None,
) -> RunReport:
    asked = request.model_dump(mode="json")
    state = supervise.start_run(workspace, kind, asked, environment=environment, turn=turn)
    return _report(workspace, find_run(workspace, state.run_id), state)


def _report(workspace: Workspace, folder: RunFolder, state: RunState) -> RunReport:
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
        result=state.result,
        error=state.error,
        folder=workspace.shown(folder.path),
        log_path=workspace.shown(folder.log),
    )


def _summary(state: RunState) -> RunSummary:
    return RunSummary(
        run_id=state.run_id,
        kind=state.kind,
        status=state.status,
        created_at=state.created_at,
        progress=state.progress,
        problem=state.error.problem if state.error else None,
    )


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdecimal():
        raise InputError(f"cursor {cursor!r} is not one of ours", "pass next_cursor unchanged")
    return int(cursor)


__all__ = [
    "CancelRun",
    "GetRun",
    "GetRunLogs",
    "ListRuns",
    "LogPage",
    "RunPage",
    "RunReport",
    "cancel_run",
    "evaluate_model",
    "export_model",
    "generate_rollouts",
    "get_run",
    "get_run_logs",
    "list_runs",
    "plan_training",
    "start_training",
]
