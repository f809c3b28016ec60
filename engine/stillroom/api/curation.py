"""Operations on data files, which start no run: the caller waits until the work is done.

They are quick, or read a file as a stream in constant memory.
"""

import tempfile
from pathlib import Path

import msgspec

from stillroom.api.operations import child_work
from stillroom.curate import convert, pairs, review
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter import run as filters
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.review import ReviewSample, SampleForReview
from stillroom.data import inspect as inspection
from stillroom.data import validate as validation
from stillroom.data.chat.views import RowView
from stillroom.data.inspect import ExamplesPage, InspectExamples, Inspection
from stillroom.data.token_counts import CountTokens, TokenCounts
from stillroom.data.validate import ValidateDataset, ValidationReport
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.jobs.child import run_in_child
from stillroom.models.resolve import locate_model
from stillroom.outputs import check_page
from stillroom.settings import Workspace


def import_rollouts(workspace: Workspace, request: ImportRollouts) -> ImportResult:
    """Writes the rollouts that logs, traces, sessions or datasets of other systems hold.

    It runs in a child process, since some readers need heavy libraries.
    """
    # The child has no keys in its environment, and is to take them out of what it imports.
    keys = {f"SECRET_{n}": key for n, key in enumerate(workspace.redactor().secrets)}
    work = child_work("import_rollouts")
    return run_in_child(workspace, work, request, result=ImportResult, secrets=keys)


def filter_dataset(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Writes the rows that pass all filters, and the rest with reasons to a side file.

    Filters that need a heavy library or Ray, or take long for each row, run in a child process.
    """
    if not request.is_heavy:
        return filters.filter_dataset(workspace, request)
    workspace.existing(request.input, label="input")
    if request.model is not None:
        locate_model(workspace, request.model)
    return run_in_child(
        workspace,
        child_work("filter_dataset"),
        request,
        result=FilterResult,
    )


def convert_rollouts(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Writes rollouts as supervised rows; on a Ray cluster each Ray task converts one file."""
    if request.ray_address is None:
        return convert.convert_rollouts(workspace, request)
    return run_in_child(
        workspace,
        child_work("convert_rollouts"),
        request,
        result=ConvertResult,
    )


def make_dpo_pairs(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Writes pairs of better and worse rollouts of the same task.

    On a Ray cluster the work is split by file and task.
    """
    if request.ray_address is None:
        return pairs.make_dpo_pairs(workspace, request)
    return run_in_child(
        workspace,
        child_work("make_dpo_pairs"),
        request,
        result=PairsResult,
    )


def sample_for_review(workspace: Workspace, request: SampleForReview) -> ReviewSample:
    """Writes a sample of rows for a person to judge: a JSONL file, and a page for judging them."""
    from stillroom.report.data_pages import write_review_page

    sampled = review.sample_for_review(workspace, request)
    write_review_page(sampled)
    return sampled.result


def validate_dataset(workspace: Workspace, request: ValidateDataset) -> ValidationReport:
    """Returns a data file's problems and statistics of its rows, and writes a page about them.

    With a model it also counts the tokens of a sample of the rows, in a child process.
    """
    if request.model is not None:
        locate_model(workspace, request.model)
    checked = validation.validate_dataset(workspace, request)
    report, counts = checked.report, None
    if request.model is not None and report.good:
        places = tuple(msgspec.structs.astuple(place) for place in checked.statistics.places)
        counting = CountTokens(model=request.model, format=checked.row_format, places=places)
        counts = run_in_child(
            workspace, child_work("validate_dataset"), counting, result=TokenCounts
        )
        report = msgspec.structs.replace(
            report,
            tokens=counts.tokens,
            trained_tokens=counts.trained,
            token_rows=counts.rows,
            left_out=counts.left_out,
        )
    if checked.page is not None:
        from stillroom.report.data_pages import write_dataset_page

        write_dataset_page(checked.page, report, checked.statistics, counts)
    return report


def inspect_examples(workspace: Workspace, request: InspectExamples) -> ExamplesPage:
    """Returns rows as text, and writes a page of them if the request names one.

    With a model the rows show which tokens are trained, rendered in a child process.
    """
    page = workspace.output_file(request.html, label="html") if request.html else None
    if page is not None:
        check_page(page, overwrite=request.overwrite)
    workspace.existing(request.path, label="path")
    if request.model is None:
        inspected = inspection.inspect_examples(workspace, request)
    else:
        locate_model(workspace, request.model)
        inspected = run_in_child(
            workspace, child_work("inspect_examples"), request, result=Inspection
        )
    if page is None:
        return inspected.page
    # Imported here, so that the server loads the code that draws pages only when it needs it.
    from stillroom.report.data_pages import write_rows_page

    write_rows_page(page, inspected, request)
    return msgspec.structs.replace(inspected.page, html=workspace.shown(page))


def view_row(workspace: Workspace, where: str, data: bytes, *, model: str | None = None) -> RowView:
    """Returns one row for a page; with a model also its tokens, and which of them are trained.

    The tokens are rendered in a child process. Raises EngineError if the model has no tokenizer.
    """
    if model is None:
        return inspection.row_view(where, data)
    locate_model(workspace, model)
    with tempfile.TemporaryDirectory(prefix="stillroom-row-") as folder:
        file = Path(folder) / "row.jsonl"
        file.write_bytes(data + b"\n")
        # With html it shows as many tokens as a page can hold; no page is written here.
        request = InspectExamples(path=str(file), n=1, model=model, html="row.html")
        inspected = run_in_child(
            workspace, child_work("inspect_examples"), request, result=Inspection
        )
    return msgspec.structs.replace(inspected.rows[0], where=where)
