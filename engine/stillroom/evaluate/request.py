"""The request for an evaluation, and its plan, in which all names are looked up and checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stillroom.errors import InputError
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.rollout.request import RolloutOptions, RolloutPlan, plan_rollouts
from stillroom.settings import Workspace


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
    kl_prompts: Annotated[
        int, Field(ge=2, description="Prompts sampled at temperature 1 for the KL")
    ] = 90


@dataclass(frozen=True, slots=True)
class KLModels:
    """The two models of a KL measurement."""

    student: ModelLocation
    teacher: ModelLocation


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """A checked `EvaluateModel`: its rollouts, and the two models of the KL measurement."""

    request: EvaluateModel
    rollouts: RolloutPlan
    kl_models: KLModels | None
    """The two models of the KL measurement; None if the request has no teacher."""

    @property
    def inputs(self) -> list[Path]:
        """The files and the folders of models that the evaluation depends on."""
        teacher = self.kl_models.teacher.inputs if self.kl_models is not None else []
        return [*self.rollouts.inputs, *teacher]


def plan_evaluation(workspace: Workspace, request: EvaluateModel) -> EvaluationPlan:
    """Returns the plan of an evaluation, without loading a model.

    Raises InputError for everything that can be found wrong before a process is started.
    """
    data = workspace.existing(request.data, label="data")
    rollouts = plan_rollouts(workspace, request, prompts=data)
    if request.teacher is None:
        return EvaluationPlan(request, rollouts, None)
    if not isinstance(rollouts.policy, ModelLocation):
        raise InputError(
            "teacher needs an in-process model: an endpoint's tokens cannot be scored",
            "leave teacher out, or evaluate the model's folder with provider hf",
        )
    models = KLModels(rollouts.policy, locate_model(workspace, request.teacher))
    return EvaluationPlan(request, rollouts, models)
