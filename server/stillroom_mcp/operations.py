"""The table of offered operations: the texts, hints and next steps added to the engine's table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel

from stillroom import api
from stillroom.settings import Workspace
from stillroom_mcp import next_steps


@dataclass(frozen=True, slots=True)
class OfferedOperation:
    """An operation of the engine, offered as an MCP tool and as a command of the command line."""

    name: str
    """The operation's name in the engine's table."""
    title: str
    description: str
    """One line that says what the operation does and when to use it."""
    next_step: Callable[[Any, Any], str]
    """A function that returns the text suggesting the next call, given the request and result."""
    positional: tuple[str, ...] = ()
    """The request's fields that the command line takes without a flag, in order."""
    is_read_only: bool = False
    is_destructive: bool = False
    is_idempotent: bool = False
    is_open_world: bool = False
    """Whether the operation may reach beyond this machine, to endpoints or the model hub."""
    explained_by: type[BaseModel] | None = None
    """The request of another tool whose schema alone explains the options that both have.

    None if this tool explains all of its options itself.
    """

    @property
    def command(self) -> str:
        """The operation's name on the command line, with hyphens."""
        return self.name.replace("_", "-")

    @property
    def request(self) -> type[BaseModel]:
        """The pydantic model of the request, which defines the schema and checks the arguments."""
        return api.operation_named(self.name).request

    @property
    def result(self) -> type[msgspec.Struct]:
        """The type of the operation's result."""
        return api.operation_named(self.name).result

    @property
    def starts_run(self) -> bool:
        """Whether the operation starts a run, which continues after the call has returned."""
        return api.operation_named(self.name).run is not None

    @property
    def may_become_run(self) -> bool:
        """Whether the operation becomes a run if the files that it reads are large."""
        return api.operation_named(self.name).large is not None

    @property
    def has_child(self) -> bool:
        """Whether the operation may start a child process and wait for it."""
        return api.operation_named(self.name).child is not None

    def call(self, workspace: Workspace, request: BaseModel) -> msgspec.Struct:
        """Carries out the operation; returns its result, or the run that it has become."""
        return api.carry_out(workspace, api.operation_named(self.name), request)


OPERATIONS = (
    OfferedOperation(
        name="create_project",
        title="Create a project",
        description="Write a project folder: prompts, tools.py, rewards.py, configs. Start here.",
        next_step=next_steps.after_create_project,
        positional=("path",),
    ),
    OfferedOperation(
        name="check_setup",
        title="Check the setup",
        description="What a machine has and lacks: extras, GPU, disk, teacher key, model.",
        next_step=next_steps.after_check_setup,
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    OfferedOperation(
        name="list_machines",
        title="List machines",
        description="Machines that `where` may name: state, GPUs, runs there, what still costs.",
        next_step=next_steps.after_list_machines,
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    OfferedOperation(
        name="validate_dataset",
        title="Validate a dataset",
        description="List every problem of a data file with file:line and fix, then what it holds.",
        next_step=next_steps.after_validate_dataset,
        positional=("path",),
        is_idempotent=True,
    ),
    OfferedOperation(
        name="generate_rollouts",
        title="Generate rollouts",
        description="Let a teacher or student answer prompts with tools; starts a run. The same "
        "call resumes it and pays nothing twice.",
        next_step=next_steps.after_run,
        positional=("input",),
        is_open_world=True,
    ),
    OfferedOperation(
        name="import_rollouts",
        title="Import rollouts",
        description="Turn API logs, traces, agent sessions or datasets into rollouts: calls become "
        "conversations, secrets go.",
        next_step=next_steps.after_import_rollouts,
        positional=("input", "output"),
        is_destructive=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="score_rollouts",
        title="Score rollouts again",
        description="Give finished rollouts new rewards (rewards.py, answer match or a judge); the "
        "teacher is not asked again. Starts a run.",
        next_step=next_steps.after_run,
        positional=("input",),
        is_destructive=True,
        is_open_world=True,
    ),
    OfferedOperation(
        name="sample_for_review",
        title="Sample rows for review",
        description="Draw rows by reward and category for a person to judge: JSONL and a page.",
        next_step=next_steps.after_sample_for_review,
        positional=("input",),
        is_idempotent=True,
    ),
    OfferedOperation(
        name="filter_dataset",
        title="Filter rows",
        description="Keep the rollouts or SFT rows that pass every given filter; the rest goes to "
        "a side file with reasons.",
        next_step=next_steps.after_filter_dataset,
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="convert_rollouts",
        title="Convert rollouts",
        description="Turn rollouts into supervised rows (messages, tools) for dataset_type sft.",
        next_step=next_steps.after_convert_rollouts,
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="make_dpo_pairs",
        title="Make preference pairs",
        description="Pair better and worse rollouts of the same task for dataset_type dpo.",
        next_step=next_steps.after_make_dpo_pairs,
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="inspect_examples",
        title="Inspect examples",
        description="Show rows as text; with model, mark exactly which tokens are trained.",
        next_step=next_steps.after_inspect_examples,
        positional=("path",),
        is_idempotent=True,
    ),
    OfferedOperation(
        name="plan_training",
        title="Plan training",
        description="Check what start_training needs: memory, time, price, disk; suggest changes.",
        explained_by=api.StartTraining,
        next_step=next_steps.after_plan_training,
        positional=("config", "overrides"),
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    OfferedOperation(
        name="start_training",
        title="Start training",
        description="Train as config.yml says (sft, dpo, on-policy distill); starts a run.",
        next_step=next_steps.after_run,
        positional=("config", "overrides"),
        is_open_world=True,
    ),
    OfferedOperation(
        name="evaluate_model",
        title="Evaluate a model",
        description="Measure accuracy on held-out prompts with 95 % intervals, cost per task, KL "
        "to a teacher; starts a run. Shared options: see generate_rollouts.",
        explained_by=api.GenerateRollouts,
        next_step=next_steps.after_run,
        positional=("data",),
        is_open_world=True,
    ),
    OfferedOperation(
        name="compare_evaluations",
        title="Compare evaluations",
        description="Paired differences of evaluations: is it better, is a teacher worth it?",
        next_step=next_steps.after_compare_evaluations,
        positional=("baseline", "candidates"),
        is_read_only=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="export_model",
        title="Export a model",
        description="Write a trained model to a folder, with a model card; starts a run.",
        next_step=next_steps.after_run,
        positional=("model", "output"),
        is_destructive=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    OfferedOperation(
        name="get_run",
        title="Look at a run",
        description="Status, progress with ETA, metrics, result or error; can wait for the run.",
        next_step=next_steps.after_run,
        positional=("run_id",),
        is_read_only=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="list_runs",
        title="List runs",
        description="List this workspace's runs, newest first, those of earlier sessions too.",
        next_step=next_steps.after_list_runs,
        is_read_only=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="get_run_logs",
        title="Read a run's log",
        description="The last lines of a run's log, or of its metrics and notes.",
        next_step=next_steps.after_get_run_logs,
        positional=("run_id",),
        is_read_only=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="cancel_run",
        title="Cancel a run",
        description="Stop a run, keeping its work; again after 10 s kills it.",
        next_step=next_steps.after_cancel_run,
        positional=("run_id",),
        is_destructive=True,
        is_idempotent=True,
    ),
    OfferedOperation(
        name="write_report",
        title="Write the report",
        description="Write one HTML page about all runs for a person: curves, accuracy, costs.",
        next_step=next_steps.after_write_report,
        positional=("output",),
        is_idempotent=True,
    ),
    OfferedOperation(
        name="show_lineage",
        title="Show where it comes from",
        description="Trace a checkpoint or file back to its prompts, checking hashes; why a row "
        "was kept or dropped.",
        next_step=next_steps.after_show_lineage,
        positional=("path",),
        is_idempotent=True,
    ),
)
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def offered_operation(name: str) -> OfferedOperation:
    """Returns the operation with a name of the engine's table; every one of them is offered."""
    return _BY_NAME[name]
