"""Operations on data files; they end at once or stream through a file in constant memory."""

import msgspec

from stillroom.curate import convert, pairs, review
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter import run as filters
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.review import ReviewSample, SampleForReview
from stillroom.data import inspect as inspection
from stillroom.data import validate as validation
from stillroom.data.inspect import ExamplesPage, InspectExamples
from stillroom.data.token_counts import CountTokens
from stillroom.data.validate import ValidateDataset, ValidationReport
from stillroom.jobs.inline import (
    convert_in_child,
    count_with_model,
    filter_in_child,
    inspect_with_model,
    pair_in_child,
)
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace

__all__ = [
    "convert_rollouts",
    "filter_dataset",
    "inspect_examples",
    "make_dpo_pairs",
    "sample_for_review",
    "validate_dataset",
]


def filter_dataset(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Writes the rows that pass; filters that are more than a look at each row run in a child."""
    if not request.is_heavy:
        return filters.filter_dataset(workspace, request)
    workspace.existing(request.input, what="input")
    if request.model is not None:
        locate_model(workspace, request.model)
    return filter_in_child(workspace, request)


def convert_rollouts(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Writes the supervised rows of rollouts; with a Ray cluster a file a task."""
    if request.ray_address is None:
        return convert.convert_rollouts(workspace, request)
    return convert_in_child(workspace, request)


def make_dpo_pairs(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Writes the pairs of rollouts; with a Ray cluster split by file and task."""
    if request.ray_address is None:
        return pairs.make_dpo_pairs(workspace, request)
    return pair_in_child(workspace, request)


def sample_for_review(workspace: Workspace, request: SampleForReview) -> ReviewSample:
    """Writes rows for a person to judge: a file to fill in, and a page that fills it in."""
    from stillroom.report.pages.review import write_review_page

    sampled = review.sample_for_review(workspace, request)
    write_review_page(sampled)
    return sampled.result


def validate_dataset(workspace: Workspace, request: ValidateDataset) -> ValidationReport:
    """Returns all problems of a data file and what it holds, and writes them as a page.

    With a model the tokens of a sample are counted, in a child process.
    """
    if request.model is not None:
        locate_model(workspace, request.model)
    found = validation.validate_dataset(workspace, request)
    report, counts = found.report, None
    if request.model is not None and report.good:
        places = tuple(msgspec.structs.astuple(place) for place in found.statistics.places)
        asked = CountTokens(model=request.model, format=found.row_format, places=places)
        counts = count_with_model(workspace, asked)
        report = msgspec.structs.replace(
            report,
            tokens=counts.tokens,
            trained_tokens=counts.trained,
            token_rows=counts.rows,
            left_out=counts.left_out,
        )
    if found.page is not None:
        from stillroom.report.pages.dataset import write_dataset_page

        write_dataset_page(found.page, report, found.statistics, counts)
    return report


def inspect_examples(workspace: Workspace, request: InspectExamples) -> ExamplesPage:
    """Returns rows as text, and writes a page of them if asked.

    With a model they come with its token mask, rendered in a child process.
    """
    page = workspace.output_file(request.html, what="html") if request.html else None
    workspace.existing(request.path, what="path")
    if request.model is None:
        found = inspection.inspect_examples(workspace, request)
    else:
        locate_model(workspace, request.model)
        found = inspect_with_model(workspace, request)
    if page is None:
        return found.page
    # Only an operation that draws a page loads what draws it.
    from stillroom.report.pages.rows import write_rows_page

    write_rows_page(page, found, request)
    return msgspec.structs.replace(found.page, html=workspace.shown(page))
