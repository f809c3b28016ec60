"""A training run: checks the plan, then trains in this process or starts several that do."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from stillroom.data.formats import load_datasets
from stillroom.files import write_json
from stillroom.lineage import ModelRecord, Recording
from stillroom.models.resolve import identify, locate_model
from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.train.config.distill_sections import served_teacher
from stillroom.train.config.request import StartTraining, TrainingPlan, plan_request
from stillroom.train.config.resume import RunInputs, check_unchanged, find_resume_point
from stillroom.train.config.schema import TrainConfig
from stillroom.train.distributed.launch import launch_training
from stillroom.train.loop.checkpoints import RunSources
from stillroom.train.loop.evaluations import TrainingEvaluations, read_prompts
from stillroom.train.loop.session import Session, TrainResult
from stillroom.train.loop.trackers import TrackedReporter, open_trackers
from stillroom.train.methods.dpo import train_dpo
from stillroom.train.methods.sft import PrepareTargets, train_sft
from stillroom.train.on_policy.loop import distill
from stillroom.train.soft_targets.targets import prepare_targets
from stillroom.train.student.collective import ALONE, Collective
from stillroom.train.student.model import load_student, router_notes


def train(
    workspace: Workspace,
    request: StartTraining,
    *,
    folder: Path,
    reporter: Reporter,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Runs the training that config.yml describes, and returns its result.

    Checkpoints are written to the run's folder.
    """
    plan = plan_request(workspace, request, run=RunFolder(folder))
    write_json(folder / "config.json", plan.config.model_dump(mode="json"))
    tracked = TrackedReporter(reporter, open_trackers(plan.config, folder))
    is_local = plan.config.launcher.kind == "local"
    run = partial(train_in_process, clock=clock) if is_local else launch_training
    try:
        result = run(workspace, request, plan, folder=folder, reporter=tracked)
    finally:
        tracked.close()
    shown = workspace.shown(Path(result.checkpoint))
    return msgspec.structs.replace(result, checkpoint=shown)


def train_in_process(
    workspace: Workspace,
    request: StartTraining,
    plan: TrainingPlan,
    *,
    folder: Path,
    reporter: Reporter,
    peers: Collective = ALONE,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Trains in this process, alone or as one of `peers`, which must all make the same call.

    Only the first process writes checkpoints and reports.
    """
    started = clock()
    config = plan.config
    point = find_resume_point(workspace, request.resume) if request.resume else None
    row_files = [*plan.train_files, *plan.rows_files]
    other_files = [*plan.context_files, *plan.code_files, *plan.template_files]
    files = [plan.config_file, *row_files, *other_files]
    # The files are hashed while they are read, and must be unchanged since the start.
    with Recording(files, copies={plan.config_file: plan.config_source}) as recording:
        prompts = read_prompts(plan)
        models = _model_records(workspace, config)
        train_on_rows = _prepare_method(workspace, plan, models)
        inputs = _run_inputs(plan, recording, models)
        if point is not None:
            check_unchanged(point.state.inputs, inputs, run_id=point.run_id)
        student = load_student(
            workspace,
            config.model,
            seed=config.trainer.seed,
            peers=peers,
            resumed=point.checkpoint if point is not None else None,
        )
        RunFolder(folder).check_inputs()
        router = router_notes(student.loaded.model.config)
        notes = [*plan.notes, *student.head.notes, *router]
        for note in notes if peers.is_first else []:
            reporter.note(note)
        if peers.rank:
            # Each process must sample its own dropout.
            torch.manual_seed(config.trainer.seed + peers.rank)
        evaluations = TrainingEvaluations(workspace, plan, student, reporter, prompts)
        evaluations.check()
        session = Session(
            config,
            student,
            folder,
            reporter,
            started,
            sources=RunSources(recording, models, request.model_dump(mode="json")),
            resumed=point,
            inputs=inputs,
            evaluations=evaluations,
            clock=clock,
            deadline=started + 60 * (config.trainer.max_minutes or math.inf),
        )
        return train_on_rows(session)


def _prepare_method(
    workspace: Workspace, plan: TrainingPlan, models: list[ModelRecord]
) -> Callable[[Session[Any]], TrainResult]:
    """Reads the rows, before any model is loaded, and returns a function that trains on them."""
    prepare = _prepare_targets(workspace, plan, models)
    match plan.config.dataset_type:
        case "sft":
            sft_rows = plan.load_rows(plan.train_file)
            return lambda session: train_sft(
                session,
                sft_rows,
                max_length=_max_length(session),
                prepare=prepare,
                instruction=plan.rows_instruction,
            )
        case "dpo":
            dpo_rows = plan.load_pairs(plan.train_file)
            return lambda session: train_dpo(session, dpo_rows, max_length=_max_length(session))
        case "distill":
            tasks = load_datasets(plan.train_files)
            cold_rows = plan.load_rows(plan.cold_start_file) if plan.cold_start_file else []
            mixed_rows = plan.load_rows(plan.mixed_rows_file) if plan.mixed_rows_file else []
            return lambda session: distill(
                workspace, session, plan, tasks, cold_rows, mixed_rows, prepare
            )


def _prepare_targets(
    workspace: Workspace, plan: TrainingPlan, models: list[ModelRecord]
) -> PrepareTargets | None:
    """Returns the function that prepares soft targets, if supervised rows have a teacher."""
    if plan.config.soft_targets is None:
        return None
    teacher = next(model for model in models if model.role == "teacher")
    rows_file = plan.cold_start_file or plan.train_file
    return partial(prepare_targets, workspace, plan.config, teacher, rows_file)


def _max_length(session: Session[TrainConfig]) -> int:
    """Returns the maximum number of tokens of a row that the run trains on."""
    return session.config.model.max_row_length(session.student.loaded.max_context)


def _run_inputs(plan: TrainingPlan, recording: Recording, models: list[ModelRecord]) -> RunInputs:
    """Returns the inputs of the run; config.yml is compared by values, not by bytes."""
    modules: dict[str, str] = {}
    paths = {plan.config_file}
    for file in filter(None, (plan.tools_file, plan.rewards_file)):
        modules |= file.modules_sha256 or {}
        paths |= set(file.paths[1:])
    files = [record for record in recording.records() if record.file not in paths]
    config = plan.config.model_dump(mode="json")
    return RunInputs(config=config, files=files, models=models, modules=modules)


def _model_records(workspace: Workspace, config: TrainConfig) -> list[ModelRecord]:
    """Returns the records of the student and of each teacher, with their current hashes."""
    records = [identify(workspace, locate_model(workspace, config.model.path), role="student")]
    for index, teacher in enumerate(dict.fromkeys(config.teachers)):
        role = "teacher" if index == 0 else f"teacher {index + 1}"
        if teacher.section.is_served:
            base_url = served_teacher(workspace, teacher).server.endpoint.base_url
            records.append(ModelRecord(role=role, name=teacher.path, location=base_url))
        else:
            records.append(identify(workspace, locate_model(workspace, teacher.path), role=role))
    return records
