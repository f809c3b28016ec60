"""Training runs, in processes of their own or in this one, and what they recorded."""

import time
from typing import Any

from fakes.runs_here import do_run
from fakes.training import Project
from fakes.waiting import wait_until
from stillroom import api
from stillroom.run_folder import RunFolder, create_run, find_run
from stillroom.train.config.request import plan_request, resolve_resume
from stillroom.types import RunKind


def start(project: Project, **request: Any) -> str:
    return api.start_training(project.workspace, api.StartTraining(**request)).run_id


def run_here(project: Project, **request: Any) -> api.RunReport:
    """Does in this process all that a training run's own process would do.

    For tests of what comes of a run: loading torch once more takes longer than most runs do.
    """
    training = resolve_resume(project.workspace, api.StartTraining(**request))
    kind = RunKind(plan_request(project.workspace, training).config.dataset_type)
    folder = create_run(project.workspace, kind, training.model_dump(mode="json"))
    do_run(folder)
    return report(project, folder.run_id)


def report(project: Project, run_id: str) -> api.RunReport:
    return api.get_run(project.workspace, api.GetRun(run_id=run_id))


def ended(project: Project, run_id: str) -> api.RunReport:
    wait_until(lambda: report(project, run_id).status not in ("starting", "running"))
    return report(project, run_id)


def asked_long_ago(folder: RunFolder) -> None:
    """Has the run been asked to stop so long ago that the next cancel kills it."""
    folder.cancel_mark.write_text(f"{time.monotonic() - 11}\n", encoding="ascii")


def losses(project: Project, run_id: str) -> dict[int, float]:
    metrics = find_run(project.workspace, run_id).read_metrics()
    return {step: values["loss"] for step, values in metrics}
