"""model.path may be a list: one run for each of its models, one after the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stillroom.errors import ConfigError
from stillroom.settings import Workspace
from stillroom.train.config.file import read_config
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.forecast import TrainingForecast

_Request = TypeVar("_Request", bound=PlanTraining)


def one_for_each_model(workspace: Workspace, request: _Request) -> list[_Request]:
    """Returns the request, or where model.path is a list one for each, with it as an override.

    Raises ConfigError for a list that holds no names, or one twice.
    """
    config_file = workspace.existing(request.config, what="config")
    paths = _model_paths(config_file, request.overrides)
    if paths is None:
        return [request]
    overrides = [(*request.overrides, f"model.path={_as_yaml(path)}") for path in paths]
    return [request.model_copy(update={"overrides": each}) for each in overrides]


def _model_paths(config_file: Path, overrides: Sequence[str]) -> list[str] | None:
    """Returns the models of a list; None where model.path is none."""
    section: Any = read_config(config_file, overrides).get("model")
    given: Any = section.get("path") if isinstance(section, dict) else None
    if not isinstance(given, list):
        return None
    paths: list[Any] = given
    if not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            f"{config_file}: model.path is a list of {paths!r}, which are not models",
            "list hub ids or folders",
        )
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"{config_file}: model.path names a model twice: {', '.join(paths)}",
            "name each once; start_training again with another trainer.seed for another run",
        )
    return paths


def _as_yaml(path: str) -> str:
    return msgspec.json.encode(path).decode()


def planned_together(
    requests: Sequence[PlanTraining], forecasts: Sequence[TrainingForecast]
) -> TrainingForecast:
    """Returns the forecast of runs that follow one another: the one that needs most memory.

    Its disk and time are those of all, and its notes tell of each.
    """
    if len(forecasts) == 1:
        return forecasts[0]
    largest = max(forecasts, key=lambda one: (not one.fits, one.memory_gb))
    seconds = [one.seconds for one in forecasts if one.seconds is not None]
    notes = [
        f"{request.overrides[-1]}: {one.steps} steps, {one.memory_gb:.2f} GB"
        + (f", {one.seconds:.0f} s" if one.seconds is not None else "")
        + ("" if one.fits else ", does not fit")
        for request, one in zip(requests, forecasts, strict=True)
    ]
    return msgspec.structs.replace(
        largest,
        seconds=sum(seconds) if len(seconds) == len(forecasts) else None,
        disk_gb=sum(one.disk_gb for one in forecasts),
        fits=all(one.fits for one in forecasts),
        notes=[
            f"{len(forecasts)} runs, one after the other; told is the one that needs most memory",
            *notes,
            *largest.notes,
        ],
    )
