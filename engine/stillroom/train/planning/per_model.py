"""Splits a request with a list in model.path into one for each model, and joins their forecasts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stillroom.errors import ConfigError
from stillroom.settings import Workspace
from stillroom.train.config.file import read_config
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.forecast import TrainingForecast
from stillroom.train.planning.hardware import sums_on_machines

_Request = TypeVar("_Request", bound=PlanTraining)


def requests_per_model(workspace: Workspace, request: _Request) -> list[_Request]:
    """Returns the request alone, or one request for each model if model.path is a list.

    Each of several requests names its model in an override. Raises ConfigError for a list that
    holds anything but names, or a name twice.
    """
    config_file = workspace.existing(request.config, label="config")
    paths = _model_paths(config_file, request.overrides)
    if paths is None:
        return [request]
    overrides = [(*request.overrides, f"model.path={_as_yaml(path)}") for path in paths]
    return [request.model_copy(update={"overrides": each}) for each in overrides]


def _model_paths(config_file: Path, overrides: Sequence[str]) -> list[str] | None:
    """Returns the models in model.path, or None if model.path is not a list."""
    section: Any = read_config(config_file, overrides).get("model")
    value: Any = section.get("path") if isinstance(section, dict) else None
    if not isinstance(value, list):
        return None
    paths: list[Any] = value
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


def combined_forecast(
    requests: Sequence[PlanTraining], forecasts: Sequence[TrainingForecast]
) -> TrainingForecast:
    """Returns one forecast for runs that follow one another.

    Its memory is that of the run that needs most, its disk and time are the sums over all runs, and
    its notes name each run.
    """
    if len(forecasts) == 1:
        return forecasts[0]
    largest = max(forecasts, key=lambda forecast: (not forecast.fits, forecast.memory_gb))
    seconds = [each.seconds for each in forecasts if each.seconds is not None]
    notes = [
        f"{request.overrides[-1]}: {each.steps} steps, {each.memory_gb:.2f} GB"
        + (f", {each.seconds:.0f} s" if each.seconds is not None else "")
        + ("" if each.fits else ", does not fit")
        for request, each in zip(requests, forecasts, strict=True)
    ]
    return msgspec.structs.replace(
        largest,
        seconds=sum(seconds) if len(seconds) == len(forecasts) else None,
        start_s=sum(each.start_s or 0.0 for each in forecasts),
        disk_gb=sum(each.disk_gb for each in forecasts),
        fits=all(each.fits for each in forecasts),
        machines=sums_on_machines([each.machines for each in forecasts]),
        notes=[
            f"{len(forecasts)} runs, one after another; memory is that of the run that needs most",
            *notes,
            *largest.notes,
        ],
    )
