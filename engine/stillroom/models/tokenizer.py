"""Loads the tokenizer of a model that a user named, for operations that need no weights."""

from typing import Any

from stillroom.errors import missing_extra
from stillroom.models.chat_template import template_source
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace


def tokenizer_for(
    workspace: Workspace, model: str, needed_by: str, *, chat_template: str | None = None
) -> Any:
    """Returns the tokenizer of the model that a user named, for the operation `needed_by`.

    chat_template: the name of a template that replaces the model's own. Raises MissingExtraError if
    transformers isn't installed, and the errors of `locate_model`, `template_source` and
    `load_tokenizer`.
    """
    try:
        from stillroom.models.load import load_tokenizer
    except ModuleNotFoundError as error:
        raise missing_extra("train", needed_by) from error
    template = template_source(workspace, chat_template)
    return load_tokenizer(locate_model(workspace, model), template=template)
