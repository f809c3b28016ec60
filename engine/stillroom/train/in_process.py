"""Training in this process, alone or as one of several."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import torch

from stillroom.data.formats import SftRow, Task, load_datasets, load_dpo_rows, load_sft_rows
from stillroom.lineage import ModelRecord, Recording
from stillroom.models.identity import identify
from stillroom.models.resolve import locate_model
from stillroom.policy.check import check_decoding
from stillroom.reporting import Reporter
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining, TrainingPlan
from stillroom.train.config.resume import Asked, check_unchanged, find_resume_point
from stillroom.train.config.schema import TrainConfig
from stillroom.train.config.teacher_servers import served_teacher
from stillroom.train.loop.checkpoints import Origin
from stillroom.train.loop.evaluations import Evaluations, read_prompts
from stillroom.train.loop.session import Session, TrainResult
from stillroom.train.loop.student_stage import open_student_stage
from stillroom.train.methods.cold_start import encode_cold_start
from stillroom.train.methods.dpo import train_dpo
from stillroom.train.methods.sft import train_sft
from stillroom.train.on_policy.loop import train_on_policy
from stillroom.train.on_policy.preflight import check_contract
from stillroom.train.on_policy.teachers import load_teachers
from stillroom.train.student.collective import ALONE, Collective
from stillroom.train.student.model import load_student


def train_in_process(
    workspace: Workspace,
    request: StartTraining,
    plan: TrainingPlan,
    *,
    folder: Path,
    reporter: Reporter,
    peers: Collective = ALONE,
) -> TrainResult:
    """Trains in this process, alone or as one of `peers`, which all call it alike.

    Only the first of them writes checkpoints and has something to tell its reporter.
    """
    started = time.monotonic()
    config = plan.config
    point = find_resume_point(workspace, request.resume) if request.resume else None
    given = (
        plan.config_file,
        *plan.train_files,
        plan.cold_start_file,
        plan.tools_file,
        plan.rewards_file,
    )
    with Recording([file for file in given if file is not None]) as files:
        method = _method(workspace, plan)
        prompts = read_prompts(plan)
        models = _models(workspace, config)
        asked = _asked(plan, files, models)
        if point is not None:
            check_unchanged(point.state.asked, asked, run_id=point.run_id)
        student = load_student(workspace, config.model, seed=config.trainer.seed, peers=peers)
        if peers.rank:
            # Dropout must not be the same everywhere.
            torch.manual_seed(config.trainer.seed + peers.rank)
        origin = Origin(files, models, request.model_dump(mode="json"))
        evaluations = Evaluations(workspace, plan, student, reporter, prompts)
        evaluations.check()
        session = Session(
            config, student, folder, reporter, started, origin, point, asked, evaluations
        )
        return method(session)


def _asked(plan: TrainingPlan, files: Recording, models: list[ModelRecord]) -> Asked:
    """Returns what the run computes from; of config.yml only what it says counts."""
    config_file = str(plan.config_file)
    records = [record for record in files.records() if record.path != config_file]
    return Asked(config=plan.config.model_dump(mode="json"), files=records, models=models)


def _models(workspace: Workspace, config: TrainConfig) -> list[ModelRecord]:
    """Returns what training starts from, and the teacher, as they are now."""
    found = [identify(locate_model(workspace, config.model.path), role="student")]
    for index, teacher in enumerate(dict.fromkeys(config.teachers)):
        role = "teacher" if index == 0 else f"teacher {index + 1}"
        if teacher.section.is_served:
            where = served_teacher(workspace, teacher).server.endpoint.base_url
            found.append(ModelRecord(role=role, name=teacher.path, location=where))
        else:
            found.append(identify(locate_model(workspace, teacher.path), role=role))
    return found


def _method(workspace: Workspace, plan: TrainingPlan) -> Callable[[Session], TrainResult]:
    """Reads the rows, before any model is loaded, and returns what is to be done with them."""
    match plan.config.dataset_type:
        case "sft":
            sft_rows = load_sft_rows(plan.train_file)
            return lambda session: train_sft(session, sft_rows, max_length=_max_length(session))
        case "dpo":
            dpo_rows = load_dpo_rows(plan.train_file)
            return lambda session: train_dpo(session, dpo_rows, max_length=_max_length(session))
        case "distill":
            tasks = load_datasets(plan.train_files)
            first = load_sft_rows(plan.cold_start_file) if plan.cold_start_file else []
            return lambda session: _distill(workspace, session, plan, tasks, first)


def _max_length(session: Session) -> int:
    return session.config.model.row_length(session.student.loaded.max_context)


def _distill(
    workspace: Workspace,
    session: Session,
    plan: TrainingPlan,
    tasks: Sequence[Task],
    first_rows: Sequence[SftRow],
) -> TrainResult:
    """Trains on the rows of a cold start, if there is one, and then on the student's rollouts."""
    config = plan.config
    check_decoding(session.student.loaded)
    teachers = load_teachers(workspace, config, session.student)
    if config.curriculum.teacher_share:
        for teacher in teachers.local.values():
            check_decoding(teacher.loaded)
    for note in check_contract(workspace, config, session.student):
        session.reporter.note(note)
    first = encode_cold_start(session, first_rows) if first_rows else None
    stage = open_student_stage(workspace, plan, session.student, tasks, is_judge_optional=True)
    return anyio.run(train_on_policy, session, tasks, teachers, stage, first)
