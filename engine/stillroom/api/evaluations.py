"""The operation that compares finished evaluations."""

from typing import Annotated, Self

import msgspec
from pydantic import Field, model_validator

from stillroom.api.runs import MAX_WAIT_S
from stillroom.errors import InputError
from stillroom.evaluate.compare import Comparison, compare
from stillroom.evaluate.costs import CostComparison, compare_costs
from stillroom.evaluate.decision import Decision, decide, gap_closed
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.files import read_json
from stillroom.run_folder import find_run
from stillroom.settings import Workspace
from stillroom.types import RunKind
from stillroom.validation import StrictModel


class CompareEvaluations(StrictModel):
    """The request for paired differences between evaluations of the same tasks."""

    baseline: Annotated[str, Field(description="Run id of a finished evaluation")]
    candidates: Annotated[tuple[str, ...], Field(description="Run ids to compare with it")] = ()
    teacher: Annotated[
        str | None,
        Field(description="The teacher's evaluation: adds costs and whether to distil"),
    ] = None

    @model_validator(mode="after")
    def _check_has_comparison(self) -> Self:
        if not self.candidates and self.teacher is None:
            raise ValueError("set candidates, or the teacher's evaluation")
        return self


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison for each candidate, and with a teacher the decision and the costs."""

    comparisons: list[Comparison]
    decision: Decision | None = None
    """Whether the teacher is worth distilling; None without a teacher's evaluation."""
    costs: CostComparison | None = None
    """The cost of a task with the last candidate (else the baseline) and with the teacher."""


def compare_evaluations(workspace: Workspace, request: CompareEvaluations) -> ComparisonReport:
    """Returns each candidate's paired difference from the baseline, with its 95 % interval.

    Raises InputError if one of the runs is not a finished evaluation, or is the baseline itself.
    """
    baseline = read_evaluation(workspace, request.baseline)
    candidates = [read_evaluation(workspace, candidate) for candidate in request.candidates]
    if request.baseline in (*request.candidates, request.teacher):
        raise InputError(
            f"{request.baseline!r} would be compared with itself",
            "give the run id of another evaluation of the same prompts",
        )
    comparisons = [compare(baseline, candidate) for candidate in candidates]
    if request.teacher is None:
        return ComparisonReport(comparisons=comparisons)
    teacher = read_evaluation(workspace, request.teacher)
    return ComparisonReport(
        comparisons=[
            msgspec.structs.replace(
                comparison, gap_closed=gap_closed(comparison, candidate, teacher)
            )
            for comparison, candidate in zip(comparisons, candidates, strict=True)
        ],
        decision=decide(baseline, candidates, teacher),
        costs=compare_costs(workspace, [baseline, *candidates][-1].result, teacher.result),
    )


def read_evaluation(workspace: Workspace, run_id: str) -> Evaluation:
    """Returns the result of an evaluation. Raises InputError for any other run."""
    run = find_run(workspace, run_id)
    path = run.path / RESULT_FILE
    if not path.is_file():
        state = run.read()
        if state.kind is RunKind.EVALUATE and not state.status.is_final:
            raise InputError(
                f"the evaluation {run_id!r} has not finished",
                f"wait for it with get_run(run_id={run_id!r}, wait_s={MAX_WAIT_S:g}), then repeat "
                "this call",
            )
        raise InputError(
            f"run {run_id!r} is not a finished evaluation (it has no {RESULT_FILE})",
            "give the run id of an evaluate_model run whose status is succeeded",
        )
    return read_json(path, Evaluation)
