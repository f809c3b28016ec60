"""The tokenizer of a model that a user named, for stages that need no weights."""

from typing import Any

from stillroom.errors import missing_extra
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace


def tokenizer_for(workspace: Workspace, model: str, what: str) -> Any:
    """Returns the tokenizer of what a user wrote for a model; `what` needs it.

    Raises MissingExtraError where transformers isn't installed, and what `locate_model` and
    `load_tokenizer` raise.
    """
    try:
        from stillroom.models.load import load_tokenizer
    except ModuleNotFoundError as error:
        raise missing_extra("train", what) from error
    return load_tokenizer(locate_model(workspace, model))
