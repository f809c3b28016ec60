"""The operations that start runs: each checks its request, then starts a process for the work.

Training is also planned here, since a plan makes the same checks.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from pydantic import BaseModel

from stillroom.api.operations import child_work
from stillroom.api.placement import (
    check_not_running_elsewhere,
    check_not_written_elsewhere,
    pack_job,
    resolve_machine,
    with_budget_left,
    with_job,
)
from stillroom.api.prompts_folder import complete_evaluation, complete_rollouts
from stillroom.api.recipe.plan import plan_recipe
from stillroom.api.runs import RunReport, continuing_runs, report_run
from stillroom.api.spending import one_start_at_a_time, within_workspace_budget
from stillroom.curate.sources import check_needs_no_import, unread_file_notes
from stillroom.errors import RunError
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.export.request import ExportModel, plan_export
from stillroom.jobs import supervise
from stillroom.jobs.child import run_in_child
from stillroom.outputs import ReplacingRequest, check_replaceable_by_size, check_unlocked
from stillroom.recipe.request import RunRecipe
from stillroom.remote.bundle.checks import check_remote_config
from stillroom.remote.bundle.job_spec import PackedJob
from stillroom.remote.bundle.needs import (
    needs_of_evaluation,
    needs_of_export,
    needs_of_generation,
    needs_of_scoring,
    needs_of_training,
)
from stillroom.remote.machine import Machine
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts, plan_scoring
from stillroom.run_folder import NewRun, StartAfter, find_run, given_config
from stillroom.secrecy.commands import hide_secrets
from stillroom.secrecy.environments import run_environment, shared_variables
from stillroom.settings import Workspace, tracking_environment
from stillroom.train.config.request import (
    PlanTraining,
    StartTraining,
    TrainingPlan,
    plan_request,
    requests_per_model,
    resolve_resume,
)
from stillroom.train.planning.forecast import (
    TrainingForecast,
    combined_forecast,
)
from stillroom.types import RunKind

_COMMAND_KEY = "rollout.mcp_url"
"""The key of config.yml with the command lines or URLs of MCP servers."""


def generate_rollouts(workspace: Workspace, request: GenerateRollouts) -> RunReport:
    """Starts a rollout run, with tools.py and config.yml of the prompts' project as defaults.

    The run writes one rollout per line to request.output, and continues an output that an earlier
    run left unfinished. Raises EngineError for an invalid request, before spending anything.
    """
    request, machine = resolve_machine(workspace, request)
    completed = complete_rollouts(workspace, request)
    request = completed.request
    if request.refine is not None:
        check_needs_no_import(workspace, request.refine)
    plan = plan_generation(workspace, request)
    check_unlocked(plan.output)
    check_not_written_elsewhere(workspace, plan.output)
    keys = workspace.read_keys(plan.rollouts.key_names)
    needs = functools.partial(needs_of_generation, plan)
    # The processes of a cluster on this machine call the endpoints themselves.
    local = shared_variables(keys) if request.ray_address == "local" else {}
    with one_start_at_a_time(workspace, machine):
        limited = within_workspace_budget(workspace, request, plan.rollouts)
        new = NewRun(
            inputs=plan.rollouts.inputs,
            notes=[*completed.notes, *limited.notes],
            share=limited.share,
        )
        return _start(
            workspace,
            RunKind.ROLLOUTS,
            limited.request,
            keys=keys,
            variables=local,
            new=new,
            job=pack_job(workspace, machine, needs, budget_usd=limited.added_usd),
        )


def run_recipe(workspace: Workspace, request: RunRecipe) -> RunReport:
    """Starts a recipe, which continues the work of earlier runs with the same request.

    Raises EngineError for an invalid request, before spending anything.
    """
    plan = plan_recipe(workspace, request)
    check_unlocked(plan.locked_path)
    keys = workspace.read_keys(plan.key_names)
    return _start(workspace, RunKind.RECIPE, request, keys=keys, new=NewRun(inputs=plan.inputs))


def score_rollouts(workspace: Workspace, request: ScoreRollouts) -> RunReport:
    """Starts a run that gives finished rollouts new rewards, and writes them to request.output.

    Raises EngineError for an invalid request, before spending anything.
    """
    request, machine = resolve_machine(workspace, request)
    check_needs_no_import(workspace, request.input)
    plan = plan_scoring(workspace, request)
    check_unlocked(plan.output)
    check_not_written_elsewhere(workspace, plan.output)
    keys = workspace.read_keys([plan.judge.endpoint.api_key_env if plan.judge else None])
    needs = functools.partial(needs_of_scoring, request, plan)
    unread = unread_file_notes(workspace, request.input)
    with one_start_at_a_time(workspace, machine):
        limited = within_workspace_budget(workspace, request, plan)
        job = pack_job(workspace, machine, needs, budget_usd=limited.added_usd)
        notes = [*unread, *limited.notes]
        new = NewRun(inputs=plan.inputs, notes=notes, share=limited.share)
        return _start(workspace, RunKind.SCORE, limited.request, keys=keys, new=new, job=job)


def plan_training(workspace: Workspace, request: PlanTraining) -> TrainingForecast:
    """Returns the time, memory and disk that a training run would need, and what to change.

    Times are in seconds. The forecast is made in a child process within 10 minutes.
    Raises EngineError for any problem that would make the run fail.
    """
    requests = requests_per_model(workspace, request)
    plans = [plan_request(workspace, model_request) for model_request in requests]
    forecasts = [
        run_in_child(
            workspace,
            child_work("plan_training"),
            model_request,
            result=TrainingForecast,
            secrets=workspace.read_keys(plan.key_names),
        )
        for model_request, plan in zip(requests, plans, strict=True)
    ]
    return combined_forecast(requests, forecasts)


def start_training(workspace: Workspace, request: StartTraining) -> RunReport:
    """Starts a training run, or one for each model if model.path is a list, one after another.

    Returns the report of the first run; `then` has the ids of the others. Raises EngineError if
    any of them is invalid, before loading a model.
    """
    request, machine = resolve_machine(workspace, request)
    first_notes = list[str]()
    if request.resume is not None:
        check_not_running_elsewhere(workspace, request.resume)
        first_notes += _notes_on_continuations(workspace, request.resume)
    if machine is not None:
        request, budget_notes = with_budget_left(workspace, request, machine)
        first_notes += budget_notes
    requests = requests_per_model(workspace, resolve_resume(workspace, request))
    plans = [plan_request(workspace, each) for each in requests]
    config, keys = plans[0].config, workspace.read_keys(plans[0].key_names)
    job_for = functools.partial(_training_job, workspace, machine, num=len(plans))
    has_wandb = config.trainer.wandb_project is not None
    variables = tracking_environment(workspace, has_wandb=has_wandb) if machine is None else {}
    kind = RunKind(config.dataset_type)
    first, *others = requests
    run_files, hidden = _redacted_config(plans[0])
    if config.launcher.kind != "local" and machine is None:
        variables |= shared_variables({**keys, **hidden})  # each training process may need them
    start = functools.partial(_start, workspace, kind, keys={**keys, **hidden}, variables=variables)
    notes = [*first_notes, *plans[0].notes]
    new = NewRun(inputs=plans[0].inputs, run_files=run_files, notes=notes)
    with one_start_at_a_time(workspace, machine):
        # All jobs are packed before the first run starts, since any of them may be refused.
        jobs = [job_for(each, plan) for each, plan in zip(requests, plans, strict=True)]
        report, then = start(first, new=new, job=jobs[0]), list[str]()
        for other, plan, job in zip(others, plans[1:], jobs[1:], strict=True):
            queued = StartAfter(after=[report.run_id, *then])
            new = replace(new, start_after=queued, inputs=plan.inputs, notes=plan.notes)
            then.append(start(other, new=new, job=job and job.after(queued.after)).run_id)
    return msgspec.structs.replace(report, then=then)


def _notes_on_continuations(workspace: Workspace, run_id: str) -> list[str]:
    """Returns a note if the run was resumed before. Raises RunError if that run is active."""
    folder = find_run(workspace, run_id)
    ids = continuing_runs(workspace, folder, folder.read().kind)
    states = [
        supervise.read_run(find_run(workspace, run_id_of_continuation))
        for run_id_of_continuation in ids
    ]
    for state in states:
        if not state.status.is_final:
            raise RunError(
                f"run {run_id!r} is already being continued by {state.run_id} ({state.status})",
                f"follow it with get_run(run_id={state.run_id}); to resume from {run_id} again, "
                f"call cancel_run(run_id={state.run_id}) first",
            )
    if not states:
        return []
    last = states[-1]
    note = (
        f"{run_id} was resumed before by {last.run_id} ({last.status}), so this run trains the "
        f"same steps again; resume={last.run_id} would keep the steps of that run"
    )
    return [note]


def _training_job(
    workspace: Workspace,
    machine: Machine | None,
    request: StartTraining,
    plan: TrainingPlan,
    *,
    num: int,
) -> PackedJob | None:
    """Returns the job for the machine of a training run; `num` runs share their budget."""
    if machine is not None:
        check_remote_config(plan.config, machine)
    budget = request.budget_usd / num if request.budget_usd is not None else None
    needs = functools.partial(needs_of_training, request, plan)
    return pack_job(workspace, machine, needs, budget_usd=budget, num_runs=num)


def _redacted_config(plan: TrainingPlan) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the run's copy of config.yml, by name, and the secrets behind its placeholders."""
    text, hidden = plan.config_source.read_bytes(), dict[str, str]()
    for command in plan.config.rollout.mcp_servers:
        hidden |= hide_secrets(command)[1]
    for placeholder, secret in hidden.items():
        text = text.replace(secret.encode(), placeholder.encode())
    return {given_config(plan.config_file): text}, hidden


def evaluate_model(workspace: Workspace, request: EvaluateModel) -> RunReport:
    """Starts an evaluation, with tools.py and rewards.py of the prompts' project as defaults.

    Raises EngineError for an invalid request, before loading a model.
    """
    request, machine = resolve_machine(workspace, request)
    completed = complete_evaluation(workspace, request)
    request = completed.request
    plan = plan_evaluation(workspace, request)
    keys = workspace.read_keys(plan.rollouts.key_names)
    needs = functools.partial(needs_of_evaluation, plan)
    with one_start_at_a_time(workspace, machine):
        limited = within_workspace_budget(workspace, request, plan.rollouts)
        job = pack_job(workspace, machine, needs, budget_usd=limited.added_usd)
        notes = [*completed.notes, *limited.notes]
        new = NewRun(inputs=plan.inputs, notes=notes, share=limited.share)
        return _start(workspace, RunKind.EVALUATE, limited.request, keys=keys, new=new, job=job)


def export_model(workspace: Workspace, request: ExportModel) -> RunReport:
    """Starts a run that writes a trained model to the folder request.output.

    Raises EngineError for an invalid request, before loading a model.
    """
    request, machine = resolve_machine(workspace, request)
    plan = plan_export(workspace, request)
    check_unlocked(plan.output)
    check_not_written_elsewhere(workspace, plan.output)
    verification = plan.verification
    keys = workspace.read_keys(
        verification.plan.rollouts.key_names if verification is not None else []
    )
    needs = functools.partial(needs_of_export, request, plan)
    with one_start_at_a_time(workspace, machine):
        job, new = pack_job(workspace, machine, needs), NewRun(inputs=plan.inputs)
        return _start(workspace, RunKind.EXPORT, request, keys=keys, new=new, job=job)


def start_large_run(
    workspace: Workspace, kind: RunKind, request: BaseModel, *, inputs: Sequence[Path]
) -> RunReport:
    """Starts a run for an operation whose files are too large for a direct call.

    Raises InputError if its output is being written, or is a file of another program.
    """
    keys, input_files = dict[str, str](), list(inputs)
    if isinstance(request, PlanTraining):
        for plan in _training_plans(workspace, request):
            keys |= workspace.read_keys(plan.key_names)
            input_files += [plan.config_file, *plan.inputs]
    name = getattr(request, "output", None)
    if isinstance(request, ReplacingRequest) and isinstance(name, str):
        output = workspace.output_file(name, label="output")
        check_replaceable_by_size(output, overwrite=request.overwrite)
    return _start(workspace, kind, request, keys=keys, new=NewRun(inputs=input_files))


def _training_plans(workspace: Workspace, request: PlanTraining) -> list[TrainingPlan]:
    """Returns the validated plan of each training, one for each model in the config."""
    return [
        plan_request(workspace, model_request)
        for model_request in requests_per_model(workspace, request)
    ]


def planned_bytes(workspace: Workspace, request: PlanTraining) -> int:
    """Returns the size in bytes of the training files."""
    files = {file for plan in _training_plans(workspace, request) for file in plan.train_files}
    return sum(file.stat().st_size for file in files)


def _start(
    workspace: Workspace,
    kind: RunKind,
    request: BaseModel,
    *,
    keys: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    new: NewRun,
    job: PackedJob | None = None,
) -> RunReport:
    """Starts a run's process with `keys` and the secrets in MCP servers' command lines.

    With `job`, the process is a follower, which runs the job on another machine.
    """
    hidden = dict[str, str]()
    for command in getattr(request, "mcp_servers", ()):
        hidden |= hide_secrets(command)[1]
    overrides = [
        hide_secrets(override) if override.startswith(_COMMAND_KEY) else (override, {})
        for override in getattr(request, "overrides", ())
    ]
    document = request.model_dump(mode="json")
    if overrides:
        document["overrides"] = [override for override, _ in overrides]
        for _, secrets in overrides:
            hidden |= secrets
    state = supervise.start_run(
        workspace,
        kind,
        document,
        environment=run_environment(workspace.root) | dict(variables or {}),
        secrets={**(keys or {}), **(job.secrets if job is not None else {}), **hidden},
        new=with_job(new, job),
    )
    return report_run(workspace, find_run(workspace, state.run_id), state)
