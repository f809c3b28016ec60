"""A training run: checks the plan, then trains in this process or starts several that train."""

from pathlib import Path

import msgspec

from stillroom.files import write_json
from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.train.distributed.launch import launch_training
from stillroom.train.in_process import train_in_process
from stillroom.train.loop.session import TrainResult
from stillroom.train.loop.trackers import TrackedReporter, open_trackers


def train(
    workspace: Workspace, request: StartTraining, *, folder: Path, reporter: Reporter
) -> TrainResult:
    """Trains as config.yml describes, with checkpoints in the run's folder; returns the result."""
    plan = plan_request(workspace, request, run=RunFolder(folder))
    write_json(folder / "config.json", plan.config.model_dump(mode="json"))
    tracked = TrackedReporter(reporter, open_trackers(plan.config, folder))
    run = train_in_process if plan.config.launcher.kind == "local" else launch_training
    try:
        result = run(workspace, request, plan, folder=folder, reporter=tracked)
    finally:
        tracked.close()
    shown = workspace.shown(Path(result.checkpoint))
    return msgspec.structs.replace(result, checkpoint=shown)
