"""The table of all operations, which defines the server's tools, the commands and the runs.

A new operation needs an entry here, its function, its next step in
`server/stillroom_mcp/next_steps.py`, and a set of `TOOLSETS` in `server/stillroom_mcp/commands.py`.
"""

from stillroom import bounds
from stillroom.api.evaluations import CompareEvaluations, ComparisonReport
from stillroom.api.runs import (
    CancelRun,
    GetRun,
    GetRunLogs,
    ListRuns,
    LogPage,
    RunPage,
    RunReport,
)
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.review import ReviewSample, SampleForReview
from stillroom.data.inspect import ExamplesPage, InspectExamples
from stillroom.data.validate import ValidateDataset, ValidationReport
from stillroom.evaluate.request import EvaluateModel
from stillroom.export.request import ExportModel
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.jobs.operations import ChildWork, Operation, RunWork
from stillroom.projects.create import CreateProject, ProjectResult
from stillroom.projects.setup import CheckSetup, SetupReport
from stillroom.recipe.request import RecipeResult, RunRecipe
from stillroom.remote.machine_list import ListMachines, MachineList
from stillroom.report.request import WriteReport, WrittenReport
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts
from stillroom.trace.request import Lineage, ShowLineage
from stillroom.train.config.request import PlanTraining, StartTraining
from stillroom.train.planning.forecast import TrainingForecast
from stillroom.types import RunKind

_TEMPLATE_GB = bounds.TEMPLATE_MEMORY.limit / 1e9
"""The memory limit for rendering chat templates, which are untrusted code."""
_CHECK_RAY = "check the cluster with `ray status`"

OPERATIONS = (
    Operation(
        function="stillroom.api.start_runs:run_recipe",
        request=RunRecipe,
        result=RunReport,
        title="Distil in one run",
        description=(
            "Distil a teacher or logs into a student: ask, check, train, evaluate, export; starts "
            "a run. The same call resumes it."
        ),
        positional=("input",),
        is_open_world=True,
        run=RunWork(
            (RunKind.RECIPE,), "stillroom.api.recipe.run:make_student", result=RecipeResult
        ),
    ),
    Operation(
        function="stillroom.projects.create:create_project",
        request=CreateProject,
        result=ProjectResult,
        title="Create a project",
        description="Write a project folder: prompts, tools.py, rewards.py, configs. Start here.",
        positional=("path",),
    ),
    Operation(
        function="stillroom.api.placement:check_setup",
        request=CheckSetup,
        result=SetupReport,
        title="Check the setup",
        description="Check a machine: extras, GPU, disk, teacher key, model.",
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    Operation(
        function="stillroom.remote.machine_list:list_machines",
        request=ListMachines,
        result=MachineList,
        title="List machines",
        description="Machines that `where` may name: state, GPUs, runs, what costs money now.",
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
    ),
    Operation(
        function="stillroom.api.curation:validate_dataset",
        request=ValidateDataset,
        result=ValidationReport,
        title="Validate a dataset",
        description="List every problem of a data file with file:line and fix; statistics of rows.",
        positional=("path",),
        is_idempotent=True,
        run_if_large=RunKind.VALIDATE,
        child=ChildWork(
            function="stillroom.jobs.child_work:count_tokens",
            timeout_s=bounds.TEMPLATE.limit,
            action="counting tokens with the chat template of {model!r}",
            fix="leave out model, or check the tokenizer files of the model",
            memory_gb=_TEMPLATE_GB,
            libraries="stillroom.models.load",
        ),
    ),
    Operation(
        function="stillroom.api.start_runs:generate_rollouts",
        request=GenerateRollouts,
        result=RunReport,
        title="Generate rollouts",
        description=(
            "Let a teacher or student answer prompts with tools; starts a run. The same "
            "call resumes it and pays nothing twice."
        ),
        positional=("input",),
        is_open_world=True,
        run=RunWork(
            kinds=(RunKind.ROLLOUTS,),
            function="stillroom.rollout.run:generate_rollouts",
            on_ray="stillroom.rollout.ray.run:generate_on_ray",
            failure="stillroom.rollout.results:no_success_error",
        ),
    ),
    Operation(
        function="stillroom.api.curation:import_rollouts",
        request=ImportRollouts,
        result=ImportResult,
        title="Import rollouts",
        description=(
            "Turn API logs, traces, sessions or datasets into rollouts; joins calls, removes "
            "secrets."
        ),
        positional=("input", "output"),
        is_destructive=True,
        is_idempotent=True,
        run_if_large=RunKind.IMPORT,
        child=ChildWork(
            function="stillroom.importing.run:import_rollouts",
            timeout_s=bounds.IMPORTING.limit,
            action="importing {input!r}",
            fix="import fewer files at a time",
        ),
    ),
    Operation(
        function="stillroom.api.start_runs:score_rollouts",
        request=ScoreRollouts,
        result=RunReport,
        title="Score rollouts again",
        description=(
            "Give finished rollouts new rewards (rewards.py, answer match or a judge); the "
            "teacher is not called again. Starts a run."
        ),
        positional=("input",),
        is_destructive=True,
        is_open_world=True,
        run=RunWork((RunKind.SCORE,), "stillroom.rollout.rescore.score:score_rollouts"),
    ),
    Operation(
        function="stillroom.api.curation:sample_for_review",
        request=SampleForReview,
        result=ReviewSample,
        title="Sample rows for review",
        description="Draw rows by reward and category for a person to judge: JSONL and a page.",
        positional=("input",),
        is_idempotent=True,
        run_if_large=RunKind.REVIEW,
    ),
    Operation(
        function="stillroom.api.curation:filter_dataset",
        request=FilterDataset,
        result=FilterResult,
        title="Filter rows",
        description=(
            "Keep rollouts or SFT rows that pass all given filters; others go to a side file "
            "with reasons."
        ),
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
        run_if_large=RunKind.FILTER,
        child=ChildWork(
            function="stillroom.jobs.child_work:filter_rows",
            timeout_s=bounds.FILTERING.limit,
            action="filtering {input!r}",
            fix="filter fewer rows at a time, and check the regular expressions; "
            f"if ray_address is set, also {_CHECK_RAY}",
        ),
    ),
    Operation(
        function="stillroom.api.curation:convert_rollouts",
        request=ConvertRollouts,
        result=ConvertResult,
        title="Convert rollouts",
        description="Turn rollouts into supervised rows (messages, tools) for dataset_type sft.",
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
        run_if_large=RunKind.CONVERT,
        child=ChildWork(
            function="stillroom.jobs.child_work:convert_rows",
            timeout_s=bounds.FILTERING.limit,
            action="converting {input!r}",
            fix="convert fewer rows at a time, and check the rewrite function; "
            f"if ray_address is set, also {_CHECK_RAY}",
        ),
    ),
    Operation(
        function="stillroom.api.curation:make_dpo_pairs",
        request=MakeDpoPairs,
        result=PairsResult,
        title="Make preference pairs",
        description="Pair better and worse rollouts of the same task for dataset_type dpo.",
        positional=("input",),
        is_destructive=True,
        is_idempotent=True,
        run_if_large=RunKind.PAIRS,
        child=ChildWork(
            function="stillroom.curate.ray.rollouts:pair_on_ray",
            timeout_s=bounds.FILTERING.limit,
            action="pairing on Ray",
            fix=_CHECK_RAY,
        ),
    ),
    Operation(
        function="stillroom.api.curation:inspect_examples",
        request=InspectExamples,
        result=ExamplesPage,
        title="Inspect examples",
        description="Show rows as text; with model, mark exactly which tokens are trained.",
        positional=("path",),
        is_idempotent=True,
        run_if_large=RunKind.INSPECT,
        child=ChildWork(
            function="stillroom.jobs.child_work:inspect_examples",
            timeout_s=bounds.TEMPLATE.limit,
            action="rendering with the chat template of {model!r}",
            fix="inspect fewer rows, or check the tokenizer files of the model",
            memory_gb=_TEMPLATE_GB,
            libraries="stillroom.models.load",
        ),
    ),
    Operation(
        function="stillroom.api.start_runs:plan_training",
        request=PlanTraining,
        result=TrainingForecast,
        title="Plan training",
        description="Check what start_training needs: memory, time, price, disk; suggest changes.",
        positional=("config", "overrides"),
        explained_by=StartTraining,
        is_read_only=True,
        is_idempotent=True,
        is_open_world=True,
        run_if_large=RunKind.PLAN,
        child=ChildWork(
            function="stillroom.remote.planning:plan_training",
            timeout_s=600,
            action="planning the training",
            fix="plan with fewer rows (a file with the first thousand), or start the training",
        ),
    ),
    Operation(
        function="stillroom.api.start_runs:start_training",
        request=StartTraining,
        result=RunReport,
        title="Start training",
        description="Train as config.yml says (sft, dpo, on-policy distill); starts a run.",
        positional=("config", "overrides"),
        is_open_world=True,
        run=RunWork((RunKind.SFT, RunKind.DPO, RunKind.DISTILL), "stillroom.train.run:train"),
    ),
    Operation(
        function="stillroom.api.start_runs:evaluate_model",
        request=EvaluateModel,
        result=RunReport,
        title="Evaluate a model",
        description=(
            "Measure accuracy on held-out prompts with 95 % intervals, cost per task, KL "
            "to a teacher; starts a run. Shared options: see generate_rollouts."
        ),
        positional=("data",),
        explained_by=GenerateRollouts,
        is_open_world=True,
        run=RunWork((RunKind.EVALUATE,), "stillroom.evaluate.run:evaluate_model"),
    ),
    Operation(
        function="stillroom.api.evaluations:compare_evaluations",
        request=CompareEvaluations,
        result=ComparisonReport,
        title="Compare evaluations",
        description="Paired differences of evaluations; whether a teacher is worth distilling.",
        positional=("baseline", "candidates"),
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        function="stillroom.api.start_runs:export_model",
        request=ExportModel,
        result=RunReport,
        title="Export a model",
        description="Write a trained model to a folder, with a model card; starts a run.",
        positional=("model", "output"),
        is_destructive=True,
        is_idempotent=True,
        is_open_world=True,
        run=RunWork((RunKind.EXPORT,), "stillroom.export.run:export_model"),
    ),
    Operation(
        function="stillroom.api.runs:get_run",
        request=GetRun,
        result=RunReport,
        title="Look at a run",
        description="Status, progress with ETA, metrics, result or error; can wait for the run.",
        positional=("run_id",),
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        function="stillroom.api.runs:list_runs",
        request=ListRuns,
        result=RunPage,
        title="List runs",
        description="List this workspace's runs, newest first, also from earlier sessions.",
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        function="stillroom.api.runs:get_run_logs",
        request=GetRunLogs,
        result=LogPage,
        title="Read a run's log",
        description="The last lines of a run's log, or of its metrics and notes.",
        positional=("run_id",),
        is_read_only=True,
        is_idempotent=True,
    ),
    Operation(
        function="stillroom.api.runs:cancel_run",
        request=CancelRun,
        result=RunReport,
        title="Cancel a run",
        description="Stop a run, keeping its work; again after 10 s kills it.",
        positional=("run_id",),
        is_destructive=True,
        is_idempotent=True,
    ),
    Operation(
        function="stillroom.api.reports:write_report",
        request=WriteReport,
        result=WrittenReport,
        title="Write the report",
        description="Write one HTML page about all runs for a person: curves, accuracy, costs.",
        positional=("output",),
        is_idempotent=True,
        child=ChildWork(
            function="stillroom.report.request:draw_page",
            timeout_s=90,
            action="drawing {page!r}",
            fix="open the HTML page, which was written, in a browser, or leave out png",
        ),
    ),
    Operation(
        function="stillroom.trace.show:show_lineage",
        request=ShowLineage,
        result=Lineage,
        title="Show lineage",
        description=(
            "Trace a checkpoint or file back to its prompts, checking hashes; why a row "
            "was kept or dropped."
        ),
        positional=("path",),
        is_idempotent=True,
        run_if_large=RunKind.LINEAGE,
    ),
)
"""All operations, in the order in which the server and the CLI list them."""


def operation_named(name: str) -> Operation:
    """Returns the operation with this name. Raises KeyError if there is none."""
    return {operation.name: operation for operation in OPERATIONS}[name]


def operation_of_run(kind: RunKind) -> Operation:
    """Returns the operation that starts runs of this kind."""
    return next(
        operation
        for operation in OPERATIONS
        if kind == operation.run_if_large
        or (operation.run is not None and kind in operation.run.kinds)
    )


def child_work(name: str) -> ChildWork:
    """Returns the work that a child process does for an operation.

    Raises KeyError if there is no such operation, or if it needs no child process.
    """
    work = operation_named(name).child
    if work is None:
        raise KeyError(name)
    return work
