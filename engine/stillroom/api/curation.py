"""Operations on data files; they end at once or stream through a file in constant memory."""

import msgspec

from stillroom.curate.convert import convert_rollouts
from stillroom.curate.filters import filter_dataset
from stillroom.curate.pairs import make_dpo_pairs
from stillroom.data import inspect as inspection
from stillroom.data.inspect import ExamplesPage, InspectExamples
from stillroom.data.validate import validate_dataset
from stillroom.jobs.inline import inspect_with_model
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace

__all__ = [
    "convert_rollouts",
    "filter_dataset",
    "inspect_examples",
    "make_dpo_pairs",
    "validate_dataset",
]


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
    from stillroom.report.rows_page import write_rows_page

    write_rows_page(page, found, request)
    return msgspec.structs.replace(found.page, html=workspace.shown(page))
