"""The only door for server and command line: one typed function per operation.

Every function takes the workspace and a request model; importing this loads no heavy library.
"""

from stillroom.api.curation import (
    convert_rollouts,
    filter_dataset,
    inspect_examples,
    make_dpo_pairs,
    sample_for_review,
    validate_dataset,
)
from stillroom.api.evaluations import CompareEvaluations, ComparisonReport, compare_evaluations
from stillroom.api.reports import write_report
from stillroom.api.runs import (
    CancelRun,
    GetRun,
    GetRunLogs,
    ListRuns,
    LogPage,
    RunPage,
    RunReport,
    cancel_run,
    get_run,
    get_run_logs,
    list_runs,
)
from stillroom.api.start_runs import (
    evaluate_model,
    export_model,
    generate_rollouts,
    plan_training,
    score_rollouts,
    start_training,
)
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.review import ReviewSample, SampleForReview
from stillroom.data.inspect import ExamplesPage, InspectExamples
from stillroom.data.validate import ValidateDataset, ValidationReport
from stillroom.evaluate.request import EvaluateModel
from stillroom.export.request import ExportModel
from stillroom.projects.create import CreateProject, ProjectResult, create_project
from stillroom.projects.setup import CheckSetup, SetupReport, check_setup
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.score import ScoreRollouts
from stillroom.trace.request import Lineage, LineageNode, ShowLineage
from stillroom.trace.show import show_lineage
from stillroom.train.config.request import PlanTraining, StartTraining
from stillroom.train.planning.forecast import TrainingForecast

__all__ = [
    "CancelRun",
    "CheckSetup",
    "CompareEvaluations",
    "ComparisonReport",
    "ConvertResult",
    "ConvertRollouts",
    "CreateProject",
    "EvaluateModel",
    "ExamplesPage",
    "ExportModel",
    "FilterDataset",
    "FilterResult",
    "GenerateRollouts",
    "GetRun",
    "GetRunLogs",
    "InspectExamples",
    "Lineage",
    "LineageNode",
    "ListRuns",
    "LogPage",
    "MakeDpoPairs",
    "PairsResult",
    "PlanTraining",
    "ProjectResult",
    "ReviewSample",
    "RunPage",
    "RunReport",
    "SampleForReview",
    "ScoreRollouts",
    "SetupReport",
    "ShowLineage",
    "StartTraining",
    "TrainingForecast",
    "ValidateDataset",
    "ValidationReport",
    "cancel_run",
    "check_setup",
    "compare_evaluations",
    "convert_rollouts",
    "create_project",
    "evaluate_model",
    "export_model",
    "filter_dataset",
    "generate_rollouts",
    "get_run",
    "get_run_logs",
    "inspect_examples",
    "list_runs",
    "make_dpo_pairs",
    "plan_training",
    "sample_for_review",
    "score_rollouts",
    "show_lineage",
    "start_training",
    "validate_dataset",
    "write_report",
]
