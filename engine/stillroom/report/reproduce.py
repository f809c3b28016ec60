"""The command line that starts a run again, made from its request."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from stillroom.curate.convert import ConvertRollouts
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.pairs import MakeDpoPairs
from stillroom.curate.review import SampleForReview
from stillroom.evaluate.request import EvaluateModel
from stillroom.export.request import ExportModel
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.score import ScoreRollouts
from stillroom.run_folder import RunRequest
from stillroom.train.config.request import StartTraining
from stillroom.types import RunKind

COMMANDS: Mapping[RunKind, tuple[str, type[BaseModel]]] = {
    RunKind.ROLLOUTS: ("generate-rollouts", GenerateRollouts),
    RunKind.SCORE: ("score-rollouts", ScoreRollouts),
    RunKind.FILTER: ("filter-dataset", FilterDataset),
    RunKind.CONVERT: ("convert-rollouts", ConvertRollouts),
    RunKind.PAIRS: ("make-dpo-pairs", MakeDpoPairs),
    RunKind.REVIEW: ("sample-for-review", SampleForReview),
    RunKind.SFT: ("start-training", StartTraining),
    RunKind.DPO: ("start-training", StartTraining),
    RunKind.DISTILL: ("start-training", StartTraining),
    RunKind.EVALUATE: ("evaluate-model", EvaluateModel),
    RunKind.EXPORT: ("export-model", ExportModel),
}
"""The command and the request of each kind of run that makes something."""


def command_of(request: RunRequest) -> str | None:
    """Returns the command that starts the run again; None for a kind that makes nothing."""
    if request.kind not in COMMANDS:
        return None
    name, model = COMMANDS[request.kind]
    words = [word for field in model.model_fields for word in _flags(model, field, request.request)]
    return shlex.join(["stillroom", name, *words])


def _flags(model: type[BaseModel], field: str, request: Mapping[str, Any]) -> Iterator[str]:
    value, default = request.get(field), model.model_fields[field].get_default()
    if (
        value is None
        or value == default
        or (isinstance(value, list) and value == list(default or ()))
    ):
        return
    flag = field.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
        return
    yield f"--{flag}"
    yield from map(str, value) if isinstance(value, list) else [str(value)]
