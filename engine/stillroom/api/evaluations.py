"""The operation that compares finished evaluations."""

from typing import Annotated

import msgspec
from pydantic import Field

from stillroom.errors import InputError
from stillroom.evaluate.compare import Comparison, compare
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.files import read_json
from stillroom.run_folder import find_run
from stillroom.settings import Workspace
from stillroom.validation import StrictModel


class CompareEvaluations(StrictModel):
    """Ask for paired differences between evaluations of the same tasks."""

    baseline: Annotated[str, Field(description="Run id of a finished evaluation")]
    candidates: Annotated[
        tuple[str, ...], Field(min_length=1, description="Run ids to compare with it")
    ]


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison for each candidate."""

    comparisons: list[Comparison]


def compare_evaluations(workspace: Workspace, request: CompareEvaluations) -> ComparisonReport:
    """Returns each candidate's paired difference to the baseline, with its 95 % interval.

    Raises InputError if one of the runs is not a finished evaluation.
    """
    baseline = _evaluation(workspace, request.baseline)
    return ComparisonReport(
        comparisons=[compare(baseline, _evaluation(workspace, c)) for c in request.candidates]
    )


def _evaluation(workspace: Workspace, run_id: str) -> Evaluation:
    path = find_run(workspace, run_id).path / RESULT_FILE
    if not path.is_file():
        raise InputError(
            f"run {run_id!r} is not a finished evaluation (it has no {RESULT_FILE})",
            "give the run id of an evaluate_model run whose status is succeeded",
        )
    return read_json(path, Evaluation)
