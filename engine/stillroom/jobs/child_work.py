"""The functions that operations run in child processes, because they load heavy libraries."""

import time
from pathlib import Path
from typing import Any

from stillroom.curate.convert import ConvertResult, ConvertRollouts, convert_rollouts
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.run import filter_dataset
from stillroom.data.inspect import InspectExamples, Inspection
from stillroom.data.inspect import inspect_examples as inspect_rows
from stillroom.data.token_counts import CountTokens, TokenCounts
from stillroom.data.token_counts import count_tokens as count_row_tokens
from stillroom.errors import missing_extra
from stillroom.jobs.child import report_progress
from stillroom.models.tokenizer import tokenizer_for
from stillroom.settings import Workspace
from stillroom.tools.user.pool import tools_named_in
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.forecast import TrainingForecast


def filter_rows(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Filters rows, on the request's Ray cluster if it has one, else in this process."""
    if request.ray_address is not None:
        from stillroom.curate.ray.filter import filter_on_ray

        return filter_on_ray(workspace, request)
    tokenizer = _tokenizer(workspace, request, "counting tokens")
    return filter_dataset(workspace, request, tokenizer=tokenizer)


def convert_rows(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Converts rollouts to supervised rows, on the request's Ray cluster or in this process."""
    if request.ray_address is not None:
        from stillroom.curate.ray.rollouts import convert_on_ray

        return convert_on_ray(workspace, request)
    return convert_rollouts(workspace, request)


def inspect_examples(workspace: Workspace, request: InspectExamples) -> Inspection:
    """Returns rows as text, with the mask of trained tokens if the request names a model."""
    tokenizer = _tokenizer(workspace, request, "showing a model's mask")
    named_tools = None
    if tokenizer is not None:
        named_tools = tools_named_in(workspace.existing(request.path, label="path"), workspace.root)
    return inspect_rows(workspace, request, tokenizer=tokenizer, named_tools=named_tools)


def count_tokens(workspace: Workspace, request: CountTokens) -> TokenCounts:
    """Returns the rows' token counts under the chat template of the request's model."""
    tokenizer = _tokenizer(workspace, request, "counting tokens")
    files = dict.fromkeys(Path(str(place[0])) for place in request.places)
    tools_of_files = (tools_named_in(file, workspace.root) for file in files)
    named_tools = next((tools for tools in tools_of_files if tools is not None), None)
    return count_row_tokens(request, tokenizer, named_tools=named_tools)


def plan_training(workspace: Workspace, request: PlanTraining) -> TrainingForecast:
    """Returns the memory, time and disk that a training run would need, and what to change.

    Raises an EngineError if the extra `train` is not installed.
    """
    # The forecast includes the time of these imports, which a run needs as well: for a small
    # training run, they may take most of it.
    started_at = time.monotonic()
    try:
        from stillroom.train.planning.plan import plan_training as forecast_training
    except ModuleNotFoundError as error:
        raise missing_extra("train", "planning a training run") from error
    return forecast_training(workspace, request, started=started_at, report=report_progress)


def _tokenizer(
    workspace: Workspace, request: FilterDataset | InspectExamples | CountTokens, purpose: str
) -> Any:
    """Returns the tokenizer of the request's model, if any; `purpose` is for error messages."""
    if request.model is None:
        return None
    return tokenizer_for(workspace, request.model, purpose, chat_template=request.chat_template)
