"""Training runs in processes of their own: started, waited for, and what they told."""

from typing import Any

from fakes.training import Project
from fakes.waiting import wait_until
from stillroom import api
from stillroom.run_folder import find_run


def start(project: Project, **request: Any) -> str:
    return api.start_training(project.workspace, api.StartTraining(**request)).run_id


def report(project: Project, run_id: str) -> api.RunReport:
    return api.get_run(project.workspace, api.GetRun(run_id=run_id))


def ended(project: Project, run_id: str) -> api.RunReport:
    wait_until(lambda: report(project, run_id).status not in ("starting", "running"), timeout_s=120)
    return report(project, run_id)


def losses(project: Project, run_id: str) -> dict[int, float]:
    metrics = find_run(project.workspace, run_id).read_metrics()
    return {step: values["loss"] for step, values in metrics}
