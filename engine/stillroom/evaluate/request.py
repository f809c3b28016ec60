"""What an evaluation is asked to do."""

from typing import Annotated

from pydantic import Field

from stillroom.errors import InputError
from stillroom.models.resolve import locate_model
from stillroom.rollout.request import RolloutOptions, check_rollout_options, locate_policy
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS


class EvaluateModel(RolloutOptions):
    """Ask for an evaluation: the model answers held-out prompts, rewards say how well."""

    data: Annotated[str, Field(description="Held-out prompts (.jsonl) that nothing trained on")]
    name: Annotated[str | None, Field(description="Label in comparisons; default: the model")] = (
        None
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    group_by: Annotated[
        tuple[str, ...], Field(description="Metadata fields to break the accuracy down by")
    ] = ("difficulty", "task_type")
    teacher: Annotated[
        str | None,
        Field(description="In-process model: also measure the reverse KL per token to it"),
    ] = None
    kl_prompts: Annotated[int, Field(ge=2, description="Prompts sampled at T 1 for the KL")] = 90


def check_evaluation(workspace: Workspace, request: EvaluateModel) -> None:
    """Raises InputError for what can be known to be wrong before a process is started."""
    workspace.existing(request.data, what="data")
    check_rollout_options(workspace, request)
    if request.provider in IN_PROCESS:
        locate_policy(workspace, request)
    elif request.teacher is not None:
        raise InputError(
            "teacher needs an in-process model: an endpoint's tokens cannot be scored",
            "leave teacher out, or evaluate the model's folder with provider hf",
        )
    if request.teacher is not None:
        locate_model(workspace, request.teacher)
