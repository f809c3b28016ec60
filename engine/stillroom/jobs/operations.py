"""From a run's request to the stage that does it; heavy libraries load only in here."""

import functools
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from stillroom.evaluate.request import EvaluateModel
from stillroom.export.request import ExportModel
from stillroom.reporting import Reporter
from stillroom.rollout.request import GenerateRollouts
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.types import RunKind


def run_operation(folder: RunFolder, reporter: Reporter) -> Any:
    """Does what the run was asked to do and returns its result."""
    asked = folder.read_request()
    workspace = Workspace(Path(asked.workspace))
    match asked.kind:
        case RunKind.ROLLOUTS:
            from stillroom.rollout.ray.run import generate_on_ray
            from stillroom.rollout.run import generate_rollouts

            rollouts = GenerateRollouts.model_validate(asked.request)
            generate = generate_on_ray if rollouts.ray_address else generate_rollouts
            work = functools.partial(generate, folder=folder.path, reporter=reporter)
            return _run_async(work, workspace, rollouts)
        case RunKind.EVALUATE:
            from stillroom.evaluate.run import evaluate_model

            evaluation = EvaluateModel.model_validate(asked.request)
            work = functools.partial(evaluate_model, folder=folder.path, reporter=reporter)
            return _run_async(work, workspace, evaluation)
        case RunKind.SCORE:
            from stillroom.rollout.rescore.score import ScoreRollouts, score_rollouts

            scoring = ScoreRollouts.model_validate(asked.request)
            work = functools.partial(score_rollouts, folder=folder.path, reporter=reporter)
            return _run_async(work, workspace, scoring)
        case RunKind.EXPORT:
            from stillroom.export.run import export_model

            export = ExportModel.model_validate(asked.request)
            return export_model(workspace, export, folder=folder.path, reporter=reporter)
        case RunKind.SFT | RunKind.DPO | RunKind.DISTILL:
            from stillroom.train.run import train

            training = StartTraining.model_validate(asked.request)
            return train(workspace, training, folder=folder.path, reporter=reporter)


def _run_async(work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Runs a stage that waits for much at once, on the faster event loop where it is there."""
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(work, *arguments, backend_options={"use_uvloop": has_uvloop})
