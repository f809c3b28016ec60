"""The operations that start runs: each checks its request, then starts a process for the work.

Training is also planned here, since a plan makes the same checks.
"""

import msgspec
from pydantic import BaseModel

from stillroom.api.operations import child_work
from stillroom.api.runs import RunReport, report_run
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.export.request import ExportModel, plan_export
from stillroom.jobs import supervise
from stillroom.jobs.child import run_in_child
from stillroom.rollout.request import GenerateRollouts, plan_generation
from stillroom.rollout.rescore.score import ScoreRollouts, check_scoring
from stillroom.run_folder import StartAfter, find_run, hashes_of
from stillroom.settings import (
    Workspace,
    tool_environment,
    tracking_environment,
    training_environment,
)
from stillroom.teachers.providers import TEACHER_KEYS
from stillroom.train.config.request import (
    PlanTraining,
    StartTraining,
    TrainingPlan,
    plan_request,
    resolve_resume,
)
from stillroom.train.planning.forecast import TrainingForecast
from stillroom.train.planning.per_model import combined_forecast, requests_per_model
from stillroom.types import RunKind


def generate_rollouts(workspace: Workspace, request: GenerateRollouts) -> RunReport:
    """Starts a rollout run. Raises an EngineError if the request is faulty, before any spending."""
    plan_generation(workspace, request)
    return _start(workspace, RunKind.ROLLOUTS, request, tool_environment())


def score_rollouts(workspace: Workspace, request: ScoreRollouts) -> RunReport:
    """Starts a scoring run. Raises an EngineError if the request is faulty, before any spending."""
    check_scoring(workspace, request)
    return _start(workspace, RunKind.SCORE, request, tool_environment())


def plan_training(workspace: Workspace, request: PlanTraining) -> TrainingForecast:
    """Returns the time, memory and disk that a training run would need, and what to change.

    Raises an EngineError for any fault that would end the run.
    """
    requests = requests_per_model(workspace, request)
    plans = [plan_request(workspace, each) for each in requests]
    forecasts = [
        run_in_child(
            workspace,
            child_work("plan_training"),
            each,
            result=TrainingForecast,
            environment=_planning_environment(workspace, plan),
        )
        for each, plan in zip(requests, plans, strict=True)
    ]
    return combined_forecast(requests, forecasts)


def _planning_environment(workspace: Workspace, plan: TrainingPlan) -> dict[str, str]:
    """Returns the environment of the planning process.

    It holds no secrets but the hub's tokens and the key of the config's served teacher.
    """
    name = plan.config.teacher.api_key_env if plan.config.teacher is not None else None
    key = workspace.read_key(name)
    return training_environment() | ({name: key} if name is not None and key is not None else {})


def start_training(workspace: Workspace, request: StartTraining) -> RunReport:
    """Starts a training run, or one for each model if model.path is a list, one after another.

    Raises an EngineError if any of them is faulty, before a model is loaded.
    """
    requests = requests_per_model(workspace, resolve_resume(workspace, request))
    plans = [plan_request(workspace, each) for each in requests]
    environment = _training_environment(workspace, plans[0])
    kind = RunKind(plans[0].config.dataset_type)
    first, *others = requests
    report = _start(workspace, kind, first, environment)
    then, files = list[str](), hashes_of([plans[0].config_file])
    for other in others:
        queued = StartAfter(after=[report.run_id, *then], files=files)
        then.append(_start(workspace, kind, other, environment, start_after=queued).run_id)
    return msgspec.structs.replace(report, then=then)


def _training_environment(workspace: Workspace, plan: TrainingPlan) -> dict[str, str]:
    kind = RunKind(plan.config.dataset_type)
    # The user's tools may need secrets where the student acts; otherwise only files are read.
    is_acting = kind is RunKind.DISTILL or bool(plan.config.evals)
    environment = training_environment()
    if is_acting:
        # Of the known API keys, the run gets only those of the servers that it is to call.
        config, is_distilled = plan.config, kind is RunKind.DISTILL
        servers = (config.teacher, config.rollout.server) if is_distilled else ()
        needed = {server.api_key_env for server in servers if server is not None}
        environment = tool_environment(without=frozenset(TEACHER_KEYS - needed))
    has_wandb = plan.config.trainer.wandb_project is not None
    return environment | tracking_environment(workspace, has_wandb=has_wandb)


def evaluate_model(workspace: Workspace, request: EvaluateModel) -> RunReport:
    """Starts an evaluation. Raises an EngineError for a faulty request, before loading a model."""
    plan_evaluation(workspace, request)
    return _start(workspace, RunKind.EVALUATE, request, tool_environment())


def export_model(workspace: Workspace, request: ExportModel) -> RunReport:
    """Starts an export. Raises an EngineError for a faulty request, before loading a model."""
    plan_export(workspace, request)
    return _start(workspace, RunKind.EXPORT, request, training_environment())


def _start(
    workspace: Workspace,
    kind: RunKind,
    request: BaseModel,
    environment: dict[str, str],
    *,
    start_after: StartAfter | None = None,
) -> RunReport:
    state = supervise.start_run(
        workspace,
        kind,
        request.model_dump(mode="json"),
        environment=environment,
        start_after=start_after,
    )
    return report_run(workspace, find_run(workspace, state.run_id), state)
