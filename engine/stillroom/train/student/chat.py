"""The student's tokenizer, with the chat template that config.yml names for it."""

from pathlib import Path
from typing import Any

from stillroom.errors import RunError
from stillroom.models.chat_template import template_source
from stillroom.models.load import load_tokenizer
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.train.config.sections import ModelSection


def student_tokenizer(
    workspace: Workspace,
    section: ModelSection,
    location: ModelLocation,
    *,
    resumed: Path | None = None,
) -> Any:
    """Returns the student's tokenizer; its checkpoints and exports get the same template.

    resumed: the checkpoint that a run is resumed from.
    Raises the errors of `load_tokenizer`, and RunError if the checkpoint has another template.
    """
    template = template_source(workspace, section.chat_template, option="model.chat_template")
    tokenizer = load_tokenizer(location, template=template)
    if template is not None and resumed is not None:
        earlier = load_tokenizer(ModelLocation(resumed.name, str(resumed), is_local=True))
        if earlier.chat_template != tokenizer.chat_template:
            raise RunError(
                f"the chat template {template.name!r} has changed since {resumed} was written",
                "restore it, or start a new run from that checkpoint without model.chat_template",
            )
    return tokenizer
