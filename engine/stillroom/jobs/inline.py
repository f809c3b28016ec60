"""Short work that needs heavy libraries or runs a model's chat template: in a child, at once.

The child reads the request from its standard input and writes the result to its standard output.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.run import filter_dataset
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.ray.convert import convert_on_ray
from stillroom.curate.ray.filter import filter_on_ray
from stillroom.curate.ray.pairs import pair_on_ray
from stillroom.data.inspect import InspectExamples, Inspection, inspect_examples
from stillroom.data.token_counts import CountTokens, TokenCounts, count_tokens
from stillroom.errors import EngineError, RunError, missing_extra
from stillroom.models.tokenizer import tokenizer_for
from stillroom.settings import Workspace, tool_environment, training_environment
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.forecast import TrainingForecast

INSPECT_TIMEOUT_S = 60.0
FILTER_TIMEOUT_S = 3600.0
PLAN_TIMEOUT_S = 600.0


class _Asked(msgspec.Struct):
    workspace: str
    operation: str
    request: dict[str, Any]


class _Failed(msgspec.Struct, tag="failed"):
    problem: str
    fix: str


class _Done(msgspec.Struct, tag="done"):
    result: msgspec.Raw


_Answer = _Failed | _Done


def inspect_with_model(workspace: Workspace, request: InspectExamples) -> Inspection:
    """Returns the rows with the model's mask, rendered in a child process with a deadline."""
    told = _in_child(
        workspace,
        "inspect",
        request,
        timeout_s=INSPECT_TIMEOUT_S,
        what=f"rendering with the chat template of {request.model!r}",
        fix="look at fewer rows, or check the tokenizer files of the model",
    )
    return msgspec.json.decode(told, type=Inspection)


def count_with_model(workspace: Workspace, request: CountTokens) -> TokenCounts:
    """Returns the rows' tokens for the model, counted in a child process with a deadline."""
    told = _in_child(
        workspace,
        "count",
        request,
        timeout_s=INSPECT_TIMEOUT_S,
        what=f"counting tokens with the chat template of {request.model!r}",
        fix="leave model out, or check the tokenizer files of the model",
    )
    return msgspec.json.decode(told, type=TokenCounts)


def filter_in_child(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Returns what filtering came to in a child process, whose memory goes when it is done."""
    if request.ray_address is not None:
        return msgspec.json.decode(_on_ray(workspace, "filter", request), type=FilterResult)
    told = _in_child(
        workspace,
        "filter",
        request,
        timeout_s=FILTER_TIMEOUT_S,
        what=f"filtering {request.input!r}",
        fix="filter a part of the rows first, and check the regular expressions",
    )
    return msgspec.json.decode(told, type=FilterResult)


def convert_in_child(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Returns what a conversion on a Ray cluster came to; its driver is a child process."""
    return msgspec.json.decode(_on_ray(workspace, "convert", request), type=ConvertResult)


def pair_in_child(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Returns what pairing on a Ray cluster came to; its driver is a child process."""
    return msgspec.json.decode(_on_ray(workspace, "pair", request), type=PairsResult)


def plan_in_child(
    workspace: Workspace, request: PlanTraining, *, environment: dict[str, str] | None = None
) -> TrainingForecast:
    """Returns what a training run would need, looked at in a child process.

    It has no secret unless the environment given has one.
    """
    told = _in_child(
        workspace,
        "plan",
        request,
        timeout_s=PLAN_TIMEOUT_S,
        what="planning the training",
        fix="plan with fewer rows (a file of the first thousand), or start the training",
        environment=environment,
    )
    return msgspec.json.decode(told, type=TrainingForecast)


def _on_ray(workspace: Workspace, operation: str, request: BaseModel) -> msgspec.Raw:
    return _in_child(
        workspace,
        operation,
        request,
        timeout_s=FILTER_TIMEOUT_S,
        what=f"{operation} on Ray",
        fix="look at the cluster with `ray status`",
        environment=tool_environment(),
    )


def _in_child(
    workspace: Workspace,
    operation: str,
    request: BaseModel,
    *,
    timeout_s: float,
    what: str,
    fix: str,
    environment: dict[str, str] | None = None,
) -> msgspec.Raw:
    """Returns the result as the child wrote it."""
    asked = _Asked(str(workspace.root), operation, request.model_dump(mode="json"))
    try:
        finished = subprocess.run(
            [sys.executable, "-P", "-m", "stillroom.jobs.inline"],
            input=msgspec.json.encode(asked),
            capture_output=True,
            timeout=timeout_s,
            env=environment or training_environment(),
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{what} took over {timeout_s:g} s", fix) from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:]
        raise RunError(f"{what} failed: {''.join(last)}", fix) from error
    answer = msgspec.json.decode(finished.stdout, type=_Answer)
    if isinstance(answer, _Failed):
        raise EngineError(answer.problem, answer.fix)
    return answer.result


def _answer(asked: _Asked) -> Any:
    workspace = Workspace(Path(asked.workspace))
    if asked.operation == "convert":
        return convert_on_ray(workspace, ConvertRollouts.model_validate(asked.request))
    if asked.operation == "pair":
        return pair_on_ray(workspace, MakeDpoPairs.model_validate(asked.request))
    if asked.operation == "filter":
        filtering = FilterDataset.model_validate(asked.request)
        if filtering.ray_address is not None:
            return filter_on_ray(workspace, filtering)
        tokenizer = _tokenizer(workspace, filtering.model, "counting tokens")
        return filter_dataset(workspace, filtering, tokenizer=tokenizer)
    if asked.operation == "plan":
        return _planned(workspace, PlanTraining.model_validate(asked.request))
    if asked.operation == "count":
        counting = CountTokens.model_validate(asked.request)
        return count_tokens(counting, _tokenizer(workspace, counting.model, "counting tokens"))
    inspecting = InspectExamples.model_validate(asked.request)
    tokenizer = _tokenizer(workspace, inspecting.model, "showing a model's mask")
    return inspect_examples(workspace, inspecting, tokenizer=tokenizer)


def _planned(workspace: Workspace, request: PlanTraining) -> TrainingForecast:
    try:
        from stillroom.train.planning.plan import plan_training
    except ModuleNotFoundError as error:
        raise missing_extra("train", "planning a training run") from error
    return plan_training(workspace, request)


def _tokenizer(workspace: Workspace, model: str | None, what: str) -> Any:
    return None if model is None else tokenizer_for(workspace, model, what)


def main() -> None:
    """Answers one request."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    # What workers and libraries print must not get into the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        answer = _Done(msgspec.Raw(msgspec.json.encode(_answer(asked))))
    except EngineError as error:
        answer = _Failed(error.problem, error.fix)
    with answers:
        answers.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
