"""Training in several processes: starts them, relays their reports, explains their failures."""

import os
from pathlib import Path

import msgspec

from stillroom import __version__
from stillroom.errors import RunCancelledError
from stillroom.files import write_json
from stillroom.home_paths import is_remote_process
from stillroom.places import make_folder
from stillroom.reporting import Reporter
from stillroom.secrecy.environments import shared_variables
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining, TrainingPlan
from stillroom.train.distributed.rank_folder import (
    FOLDER,
    RankFiles,
    RankJob,
    RanksFailedError,
    failure_of_ranks,
    relay_rank_reports,
    this_process,
)
from stillroom.train.loop.session import TrainResult
from stillroom.train.planning.weightless_models import process_count


def launch_training(
    workspace: Workspace,
    request: StartTraining,
    plan: TrainingPlan,
    *,
    folder: Path,
    reporter: Reporter,
) -> TrainResult:
    """Starts the processes that train and returns the result of the first one.

    Raises the error that ended them, or RunCancelledError if they were cancelled.
    """
    section = plan.config.launcher
    size = process_count(section)
    files = RankFiles(folder / FOLDER)
    make_folder(files.folder)
    job = RankJob(
        workspace=str(workspace.root),
        request=request.model_dump(mode="json"),
        run=str(folder),
        is_sharded=section.is_sharded,
        owner=this_process(),
        version=__version__,
    )
    write_json(files.job, job)
    endings: dict[int, str] = {}
    with relay_rank_reports(files, reporter):
        try:
            if section.kind == "ray":
                from stillroom.train.distributed.ray import run_on_ray

                run_on_ray(files, section, size=size, note=reporter.note)
            else:
                from stillroom.train.distributed.accelerate import run_on_accelerate

                if is_remote_process():
                    # On the user's machine the process that starts a run sets these for it.
                    os.environ.update(shared_variables(workspace.secrets))
                run_on_accelerate(files, section, size=size, note=reporter.note)
        except RanksFailedError as failed:
            endings = failed.endings
    end = files.ends().get(0)
    if end is not None and end.result is not None and not endings:
        return msgspec.convert(end.result, TrainResult)
    if end is not None and end.is_cancelled:
        raise RunCancelledError
    raise failure_of_ranks(files, endings)
