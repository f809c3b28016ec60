"""The engine's public interface, which the server and the CLI use.

`OPERATIONS` is the table of all operations. Each operation is also a function here that takes a
workspace and a request model, for use as a library. Importing this module loads no heavy library.
"""
# pyright: reportUnusedImport=false
# This module only re-exports these names, so none of them is used here.

from stillroom.api.curation import (
    carry_out,
    convert_rollouts,
    filter_dataset,
    import_rollouts,
    inspect_examples,
    make_dpo_pairs,
    sample_for_review,
    validate_dataset,
    view_row,
)
from stillroom.api.evaluations import CompareEvaluations, ComparisonReport, compare_evaluations
from stillroom.api.operations import OPERATIONS, operation_named, operation_of_run
from stillroom.api.placement import check_setup
from stillroom.api.reports import command_of, write_report
from stillroom.api.runs import (
    CancelRun,
    GetRun,
    GetRunLogs,
    ListRuns,
    LogPage,
    RunMetrics,
    RunPage,
    RunReport,
    RunSummary,
    RunWatch,
    cancel_run,
    get_run,
    get_run_logs,
    list_runs,
    read_run_metrics,
)
from stillroom.api.spending import ShownPrices, UnlimitedSpending, show_prices, unlimited_spending
from stillroom.api.start_runs import (
    evaluate_model,
    export_model,
    generate_rollouts,
    plan_training,
    run_recipe,
    score_rollouts,
    start_training,
)
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.review import ReviewSample, SampleForReview
from stillroom.curate.sources import NEED_IMPORT
from stillroom.data.inspect import ExamplesPage, InspectExamples
from stillroom.data.validate import ValidateDataset, ValidationReport
from stillroom.evaluate.request import EvaluateModel
from stillroom.export.request import ExportModel
from stillroom.importing.input_files import with_standard_input
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.jobs.child import kill_children_on, report_progress_to
from stillroom.jobs.operations import Operation
from stillroom.projects.create import CreateProject, ProjectResult, create_project
from stillroom.projects.setup import CheckSetup, SetupReport
from stillroom.recipe.request import RecipeResult, RunRecipe
from stillroom.remote.machine_list import ListMachines, MachineList, list_machines
from stillroom.report.request import WriteReport, WrittenReport
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts
from stillroom.trace.request import Lineage, LineageNode, ShowLineage
from stillroom.trace.show import show_lineage
from stillroom.train.config.request import PlanTraining, StartTraining
from stillroom.train.planning.forecast import TrainingForecast
