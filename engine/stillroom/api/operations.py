"""The table of all operations, from which the server's tools, the commands and the runs are made.

A new operation needs an entry here, its function, and its texts in
`server/stillroom_mcp/operations.py`.
"""

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
from stillroom.remote.machine_list import ListMachines, MachineList
from stillroom.report.request import WriteReport, WrittenReport
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts
from stillroom.trace.request import Lineage, ShowLineage
from stillroom.train.config.request import PlanTraining, StartTraining
from stillroom.train.planning.forecast import TrainingForecast
from stillroom.types import RunKind

_TEMPLATE_GB = 3.0
"""The memory for rendering with a chat template, which is code of the model's author."""
_LOOK_AT_RAY = "look at the cluster with `ray status`"

OPERATIONS = (
    Operation(
        name="create_project",
        request=CreateProject,
        result=ProjectResult,
        function="stillroom.projects.create:create_project",
    ),
    Operation(
        name="check_setup",
        request=CheckSetup,
        result=SetupReport,
        function="stillroom.api.machines:check_setup",
    ),
    Operation(
        name="list_machines",
        request=ListMachines,
        result=MachineList,
        function="stillroom.remote.machine_list:list_machines",
    ),
    Operation(
        name="validate_dataset",
        request=ValidateDataset,
        result=ValidationReport,
        function="stillroom.api.curation:validate_dataset",
        large=RunKind.VALIDATE,
        child=ChildWork(
            function="stillroom.jobs.child_work:count_tokens",
            timeout_s=60,
            action="counting tokens with the chat template of {model!r}",
            fix="leave model out, or check the tokenizer files of the model",
            memory_gb=_TEMPLATE_GB,
        ),
    ),
    Operation(
        name="generate_rollouts",
        request=GenerateRollouts,
        result=RunReport,
        function="stillroom.api.start_runs:generate_rollouts",
        run=RunWork(
            kinds=(RunKind.ROLLOUTS,),
            function="stillroom.rollout.run:generate_rollouts",
            on_ray="stillroom.rollout.ray.run:generate_on_ray",
            failure="stillroom.rollout.results:nothing_succeeded",
        ),
    ),
    Operation(
        name="import_rollouts",
        request=ImportRollouts,
        result=ImportResult,
        function="stillroom.api.curation:import_rollouts",
        large=RunKind.IMPORT,
        child=ChildWork(
            function="stillroom.importing.run:import_rollouts",
            timeout_s=6 * 3600,
            action="importing {input!r}",
            fix="import a part of the files first",
        ),
    ),
    Operation(
        name="score_rollouts",
        request=ScoreRollouts,
        result=RunReport,
        function="stillroom.api.start_runs:score_rollouts",
        run=RunWork((RunKind.SCORE,), "stillroom.rollout.rescore.score:score_rollouts"),
    ),
    Operation(
        name="sample_for_review",
        request=SampleForReview,
        result=ReviewSample,
        function="stillroom.api.curation:sample_for_review",
        large=RunKind.REVIEW,
    ),
    Operation(
        name="filter_dataset",
        request=FilterDataset,
        result=FilterResult,
        function="stillroom.api.curation:filter_dataset",
        large=RunKind.FILTER,
        child=ChildWork(
            function="stillroom.jobs.child_work:filter_rows",
            timeout_s=3600,
            action="filtering {input!r}",
            fix="filter a part of the rows first, and check the regular expressions; "
            f"with ray_address {_LOOK_AT_RAY}",
        ),
    ),
    Operation(
        name="convert_rollouts",
        request=ConvertRollouts,
        result=ConvertResult,
        function="stillroom.api.curation:convert_rollouts",
        large=RunKind.CONVERT,
        child=ChildWork(
            function="stillroom.curate.ray.rollouts:convert_on_ray",
            timeout_s=3600,
            action="converting on Ray",
            fix=_LOOK_AT_RAY,
        ),
    ),
    Operation(
        name="make_dpo_pairs",
        request=MakeDpoPairs,
        result=PairsResult,
        function="stillroom.api.curation:make_dpo_pairs",
        large=RunKind.PAIRS,
        child=ChildWork(
            function="stillroom.curate.ray.rollouts:pair_on_ray",
            timeout_s=3600,
            action="pairing on Ray",
            fix=_LOOK_AT_RAY,
        ),
    ),
    Operation(
        name="inspect_examples",
        request=InspectExamples,
        result=ExamplesPage,
        function="stillroom.api.curation:inspect_examples",
        large=RunKind.INSPECT,
        child=ChildWork(
            function="stillroom.jobs.child_work:inspect_examples",
            timeout_s=60,
            action="rendering with the chat template of {model!r}",
            fix="look at fewer rows, or check the tokenizer files of the model",
            memory_gb=_TEMPLATE_GB,
        ),
    ),
    Operation(
        name="plan_training",
        request=PlanTraining,
        result=TrainingForecast,
        function="stillroom.api.start_runs:plan_training",
        large=RunKind.PLAN,
        child=ChildWork(
            function="stillroom.remote.planning:plan_training",
            timeout_s=600,
            action="planning the training",
            fix="plan with fewer rows (a file of the first thousand), or start the training",
        ),
    ),
    Operation(
        name="start_training",
        request=StartTraining,
        result=RunReport,
        function="stillroom.api.start_runs:start_training",
        run=RunWork((RunKind.SFT, RunKind.DPO, RunKind.DISTILL), "stillroom.train.run:train"),
    ),
    Operation(
        name="evaluate_model",
        request=EvaluateModel,
        result=RunReport,
        function="stillroom.api.start_runs:evaluate_model",
        run=RunWork((RunKind.EVALUATE,), "stillroom.evaluate.run:evaluate_model"),
    ),
    Operation(
        name="compare_evaluations",
        request=CompareEvaluations,
        result=ComparisonReport,
        function="stillroom.api.evaluations:compare_evaluations",
    ),
    Operation(
        name="export_model",
        request=ExportModel,
        result=RunReport,
        function="stillroom.api.start_runs:export_model",
        run=RunWork((RunKind.EXPORT,), "stillroom.export.run:export_model"),
    ),
    Operation(
        name="get_run",
        request=GetRun,
        result=RunReport,
        function="stillroom.api.runs:get_run",
    ),
    Operation(
        name="list_runs",
        request=ListRuns,
        result=RunPage,
        function="stillroom.api.runs:list_runs",
    ),
    Operation(
        name="get_run_logs",
        request=GetRunLogs,
        result=LogPage,
        function="stillroom.api.runs:get_run_logs",
    ),
    Operation(
        name="cancel_run",
        request=CancelRun,
        result=RunReport,
        function="stillroom.api.runs:cancel_run",
    ),
    Operation(
        name="write_report",
        request=WriteReport,
        result=WrittenReport,
        function="stillroom.api.reports:write_report",
        child=ChildWork(
            function="stillroom.report.request:draw_page",
            timeout_s=90,
            action="drawing {page!r}",
            fix="the page itself is written: open it in a browser, or leave png out",
        ),
    ),
    Operation(
        name="show_lineage",
        request=ShowLineage,
        result=Lineage,
        function="stillroom.trace.show:show_lineage",
        large=RunKind.LINEAGE,
    ),
)
"""All operations, in the order in which the server and the command line list them."""


def operation_named(name: str) -> Operation:
    """Returns the operation with this name. Raises KeyError if there is none."""
    return {operation.name: operation for operation in OPERATIONS}[name]


def operation_of_run(kind: RunKind) -> Operation:
    """Returns the operation that starts runs of this kind."""
    return next(
        operation
        for operation in OPERATIONS
        if kind is operation.large or (operation.run is not None and kind in operation.run.kinds)
    )


def child_work(name: str) -> ChildWork:
    """Returns the work that a child process does for an operation.

    Raises KeyError if there is no such operation, or if it needs no child process.
    """
    work = operation_named(name).child
    if work is None:
        raise KeyError(name)
    return work
