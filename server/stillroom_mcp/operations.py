"""Every operation once: its words, its request and result, what to do next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel

from stillroom import api
from stillroom.settings import Workspace
from stillroom_mcp import next_steps


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing a user can ask for."""

    name: str
    title: str
    description: str
    """One line: what it does and when to use it."""
    request: type[BaseModel]
    result: type[msgspec.Struct]
    call: Callable[[Workspace, Any], msgspec.Struct]
    next_step: Callable[[Any, Any], str]
    """From the request and the result to the next call to make."""
    positional: tuple[str, ...] = ()
    """The fields the command line takes without a flag, in order."""
    is_read_only: bool = False
    is_destructive: bool = False
    is_idempotent: bool = False
    is_open_world: bool = False
    """Whether it may reach beyond this machine (endpoints, model hub)."""
    starts_run: bool = False
    explained_by: type[BaseModel] | None = None
    """A request that another tool has: options that are the same are explained only there."""


OPERATIONS = (
    Operation(
        name="create_project",
        title="Create a project",
        description="Write a project folder: prompts, tools.py, rewards.py, configs. Start here.",
        request=api.CreateProject,
        result=api.ProjectResult,
        call=api.create_project,
        next_step=next_steps.after_create_project,
        positional=("path",),
    ),
    Operation(
        name="check_setup",
        title="Check the setup",
        description="What this machine has and lacks: extras, GPU, disk, teacher key, model.",
        request=api.CheckSetup,
        result=api.SetupReport,
        call=api.check_setup,
        next_step=next_steps.after_check_setup,
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        name="validate_dataset",
        title="Validate a dataset",
        description="List every problem of a data file with file:line and fix, then what it holds.",
        request=api.ValidateDataset,
        result=api.ValidationReport,
        call=api.validate_dataset,
        next_step=next_steps.after_validate_dataset,
        positional=("path",),
        is_idempotent=True,
    ),
    Operation(
        name="generate_rollouts",
        title="Generate rollouts",
        description="Let a teacher (or student) answer prompts with tools; starts a run. "
        "The same call again resumes: nothing finished is paid for twice.",
        request=api.GenerateRollouts,
        result=api.RunReport,
        call=api.generate_rollouts,
        next_step=next_steps.after_run,
        positional=("input",),
        is_open_world=True,
        starts_run=True,
    ),
    Operation(
        name="score_rollouts",
        title="Score rollouts again",
        description="Give finished rollouts new rewards (rewards.py, answer match or a judge); the "
        "teacher is not asked again. Starts a run.",
        request=api.ScoreRollouts,
        result=api.RunReport,
        call=api.score_rollouts,
        next_step=next_steps.after_run,
        positional=("input",),
        is_destructive=True,
        is_open_world=True,
        starts_run=True,
    ),
    Operation(
        name="sample_for_review",
        title="Sample rows for review",
        description="Draw rows by reward and category for a person to judge: JSONL and a page.",
        request=api.SampleForReview,
        result=api.ReviewSample,
        call=api.sample_for_review,
        next_step=next_steps.after_sample_for_review,
        positional=("input",),
        is_idempotent=True,
    ),
    Operation(
        name="filter_dataset",
        title="Filter rows",
        description="Keep the rollouts or SFT rows that pass every given filter; the rest goes to "
        "a side file with reasons.",
        request=api.FilterDataset,
        result=api.FilterResult,
        call=api.filter_dataset,
        next_step=next_steps.after_filter_dataset,
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
    ),
    Operation(
        name="convert_rollouts",
        title="Convert rollouts",
        description="Turn rollouts into supervised rows (messages, tools) for dataset_type sft.",
        request=api.ConvertRollouts,
        result=api.ConvertResult,
        call=api.convert_rollouts,
        next_step=next_steps.after_convert_rollouts,
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
    ),
    Operation(
        name="make_dpo_pairs",
        title="Make preference pairs",
        description="Pair better and worse rollouts of the same task for dataset_type dpo.",
        request=api.MakeDpoPairs,
        result=api.PairsResult,
        call=api.make_dpo_pairs,
        next_step=next_steps.after_make_dpo_pairs,
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
    ),
    Operation(
        name="inspect_examples",
        title="Inspect examples",
        description="Show rows as text; with model, mark exactly which tokens are trained.",
        request=api.InspectExamples,
        result=api.ExamplesPage,
        call=api.inspect_examples,
        next_step=next_steps.after_inspect_examples,
        positional=("path",),
        is_idempotent=True,
    ),
    Operation(
        name="plan_training",
        title="Plan training",
        description="Check all that start_training needs; tell memory, time, disk, what to change.",
        request=api.PlanTraining,
        explained_by=api.StartTraining,
        result=api.TrainingForecast,
        call=api.plan_training,
        next_step=next_steps.after_plan_training,
        positional=("config", "overrides"),
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    Operation(
        name="start_training",
        title="Start training",
        description="Train as config.yml says (sft, dpo, or distill: on-policy); starts a run.",
        request=api.StartTraining,
        result=api.RunReport,
        call=api.start_training,
        next_step=next_steps.after_run,
        positional=("config", "overrides"),
        is_open_world=True,
        starts_run=True,
    ),
    Operation(
        name="evaluate_model",
        title="Evaluate a model",
        description="Measure accuracy on held-out prompts with 95 % intervals, and the KL to a "
        "teacher; starts a run. More on its options: generate_rollouts.",
        request=api.EvaluateModel,
        explained_by=api.GenerateRollouts,
        result=api.RunReport,
        call=api.evaluate_model,
        next_step=next_steps.after_run,
        positional=("data",),
        is_open_world=True,
        starts_run=True,
    ),
    Operation(
        name="compare_evaluations",
        title="Compare evaluations",
        description="Paired difference of finished evaluations on the same tasks: is it better?",
        request=api.CompareEvaluations,
        result=api.ComparisonReport,
        call=api.compare_evaluations,
        next_step=next_steps.after_compare_evaluations,
        positional=("baseline", "candidates"),
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        name="export_model",
        title="Export a model",
        description="Write a trained model to a folder, with a model card; starts a run.",
        request=api.ExportModel,
        result=api.RunReport,
        call=api.export_model,
        next_step=next_steps.after_run,
        positional=("model", "output"),
        is_destructive=True,
        is_idempotent=True,
        is_open_world=True,
        starts_run=True,
    ),
    Operation(
        name="get_run",
        title="Look at a run",
        description="Status, progress with ETA, metrics, result or error; can wait for the run.",
        request=api.GetRun,
        result=api.RunReport,
        call=api.get_run,
        next_step=next_steps.after_run,
        positional=("run_id",),
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        name="list_runs",
        title="List runs",
        description="The runs of this workspace, newest first, also those of earlier sessions.",
        request=api.ListRuns,
        result=api.RunPage,
        call=api.list_runs,
        next_step=next_steps.after_list_runs,
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        name="get_run_logs",
        title="Read a run's log",
        description="The last lines of a run's log, or of its metrics and notes.",
        request=api.GetRunLogs,
        result=api.LogPage,
        call=api.get_run_logs,
        next_step=next_steps.after_get_run_logs,
        positional=("run_id",),
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        name="cancel_run",
        title="Cancel a run",
        description="Stop a run and keep what it has; again after 10 s kills what does not stop.",
        request=api.CancelRun,
        result=api.RunReport,
        call=api.cancel_run,
        next_step=next_steps.after_cancel_run,
        positional=("run_id",),
        is_destructive=True,
        is_idempotent=True,
    ),
    Operation(
        name="show_lineage",
        title="Show where it comes from",
        description="Back from a checkpoint or file to the prompts, hashes checked; why a row was "
        "kept or dropped.",
        request=api.ShowLineage,
        result=api.Lineage,
        call=api.show_lineage,
        next_step=next_steps.after_show_lineage,
        positional=("path",),
        is_idempotent=True,
    ),
)
