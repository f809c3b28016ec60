"""The request for an evaluation, and its plan, in which all names are resolved and checked."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stillroom.data.formats import Task
from stillroom.data.statistics import category_in, missing_field_note
from stillroom.errors import DataError, InputError
from stillroom.models.chat_template import TemplateSource
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.rollout.plan import RolloutPlan, plan_price, plan_rollouts
from stillroom.rollout.request import NO_FILE, RolloutOptions
from stillroom.settings import Workspace
from stillroom.teachers.pricing import Price
from stillroom.validation import PlacedRequest


class EvaluateModel(PlacedRequest, RolloutOptions):
    """The request of `evaluate_model`: a model, held-out prompts, and how answers are judged."""

    data: Annotated[str, Field(description="Held-out prompts (.jsonl)")]
    name: Annotated[str | None, Field(description="Label; default: the model")] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    group_by: Annotated[tuple[str, ...], Field(description="Metadata fields to split by")] = (
        "difficulty",
        "task_type",
    )
    teacher: Annotated[
        str | None,
        Field(description="In-process: also measure the KL per token to it"),
    ] = None
    kl_prompts: Annotated[int, Field(ge=2, description="Prompts for the KL")] = 90
    sampled_prompts: Annotated[
        int, Field(ge=0, description="Prompts also run at temperature 1")
    ] = 0
    guard: Annotated[
        str | None,
        Field(description="Prompts that need no tool: shows forgetting"),
    ] = None
    budget_usd: Annotated[float | None, Field(gt=0, description="Spending cap")] = None
    dry_run: Annotated[bool, Field(description="Only forecast calls, tokens and cost")] = False


@dataclass(frozen=True, slots=True)
class KLModels:
    """The two models of a KL measurement."""

    student: ModelLocation
    teacher: ModelLocation
    template: TemplateSource | None = None
    """The student's chat template; None: its own."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """A checked `EvaluateModel`: its rollouts, and the two models of the KL measurement."""

    request: EvaluateModel
    rollouts: RolloutPlan
    kl_models: KLModels | None
    """The two models of the KL measurement; None if the request has no teacher."""
    guard: RolloutPlan | None = None
    """The rollouts on the guard set, with the same tools and judged by expected answers alone."""
    price: Price | None = None
    """The price of the model's tokens; None if it is unknown."""

    @property
    def inputs(self) -> list[Path]:
        """The files and the folders of models that the evaluation depends on."""
        teacher = self.kl_models.teacher.inputs if self.kl_models is not None else []
        guard = [self.guard.prompts_file] if self.guard is not None else []
        return [*self.rollouts.inputs, *teacher, *guard]

    @property
    def num_sampled(self) -> int:
        """The number of prompts that are answered once more at temperature 1."""
        needed = self.request.kl_prompts if self.kl_models is not None else 0
        return max(needed, self.request.sampled_prompts)

    def load_guard(self) -> list[Task]:
        """Returns all tasks of the guard set; [] without a guard set."""
        return self.guard.load_tasks() if self.guard is not None else []


def _check_groups(request: EvaluateModel, rollouts: RolloutPlan) -> None:
    """Raises DataError for a field in `group_by` that no prompt has in its metadata."""
    if request.group_by == EvaluateModel.model_fields["group_by"].default:
        return
    rows = [task.metadata for task in rollouts.load_tasks()]
    for name in request.group_by:
        if all(category_in(metadata, name) is None for metadata in rows):
            fields = itertools.chain.from_iterable(rows)
            raise DataError(
                f"group_by: {missing_field_note(name, fields)} ({request.data})",
                "name one of these fields in group_by, or leave group_by out",
            )


def plan_evaluation(workspace: Workspace, request: EvaluateModel) -> EvaluationPlan:
    """Returns the plan of an evaluation, without loading a model.

    Raises EngineError for every error that can be found without loading a model.
    """
    data = workspace.existing(request.data, label="data")
    needs_keys = not request.dry_run
    rollouts = plan_rollouts(workspace, request, prompts=data, needs_keys=needs_keys)
    guard = None
    if request.guard is not None:
        # The task's rewards and judge were not written for these prompts.
        options = request.model_copy(
            update={"rewards": NO_FILE, "judge": NO_FILE, "n": None, "entries": None}
        )
        prompts = workspace.existing(request.guard, label="guard")
        guard = plan_rollouts(workspace, options, prompts=prompts, needs_keys=needs_keys)
    _check_groups(request, rollouts)
    price = plan_price(rollouts, has_budget=request.budget_usd is not None)
    if request.teacher is None:
        return EvaluationPlan(request, rollouts, None, guard, price)
    if not isinstance(rollouts.policy, ModelLocation):
        raise InputError(
            "teacher needs an in-process model: an endpoint's tokens cannot be scored",
            "leave teacher out, or evaluate the model's folder with provider hf",
        )
    teacher = locate_model(workspace, request.teacher)
    models = KLModels(rollouts.policy, teacher, rollouts.template)
    return EvaluationPlan(request, rollouts, models, guard, price)
