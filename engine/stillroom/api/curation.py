"""Operations on data files; they end at once or stream through a file in constant memory."""

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
    """Returns rows as text; with a model its token mask, rendered in a child process."""
    if request.model is None:
        return inspection.inspect_examples(workspace, request)
    workspace.existing(request.path, what="path")
    locate_model(workspace, request.model)
    return inspect_with_model(workspace, request)
