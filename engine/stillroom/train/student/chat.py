"""The student's tokenizer, with the chat template that config.yml names for it."""

import re
from pathlib import Path
from typing import Any

from stillroom.data.chat.template import PROBE, SENTINEL, ChatTemplate
from stillroom.errors import ConfigError, ModelError, RunError
from stillroom.models.load import load_tokenizer
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.train.config.chat_template import TemplateSource, template_source
from stillroom.train.config.sections import ModelSection

_ENDS = re.compile(r"end|eo[stm]\b|eo[stm]_|^</s>$", re.IGNORECASE)
_MAX_NAMED = 8


def student_tokenizer(
    workspace: Workspace,
    section: ModelSection,
    location: ModelLocation,
    *,
    resumed: Path | None = None,
) -> Any:
    """Returns the student's tokenizer; its checkpoints and exports get the same template.

    resumed: the checkpoint that a run is resumed from.
    Raises ConfigError if the template ends turns with text that is no token of the model, and
    RunError if the checkpoint has another template.
    """
    source = template_source(workspace, section.chat_template)
    if source is None:
        return load_tokenizer(location)
    tokenizer = load_tokenizer(location, chat_template=_template_text(source))
    _check_end_of_turn(tokenizer, source.name, section.path)
    if resumed is not None:
        earlier = load_tokenizer(ModelLocation(resumed.name, str(resumed), is_local=True))
        if earlier.chat_template != tokenizer.chat_template:
            raise RunError(
                f"the chat template {source.name!r} has changed since {resumed} was written",
                "restore it, or start a new run from that checkpoint without model.chat_template",
            )
    return tokenizer


def _template_text(source: TemplateSource) -> str:
    """Returns the Jinja text of a template. Raises ConfigError if a file is not UTF-8."""
    if isinstance(source.origin, ModelLocation):
        return load_tokenizer(source.origin).chat_template
    try:
        return source.origin.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"model.chat_template {source.name!r} is not UTF-8 text ({error.reason})",
            "give a file with a Jinja template",
        ) from error


def _check_end_of_turn(tokenizer: Any, name: str, model: str) -> None:
    """Raises ConfigError if no special token of the model ends an answer in the template."""
    template = ChatTemplate(tokenizer, include_thinking=False)
    answered = template.text([*PROBE, {"role": "assistant", "content": SENTINEL}], [])
    try:
        _ = template.end_of_turn
    except ModelError as error:
        end = answered.partition(SENTINEL)[2].strip()
        ends = [token for token in template.control_tokens if _ENDS.search(token)]
        shown = ", ".join((ends or template.control_tokens)[:_MAX_NAMED]) or "none"
        raise ConfigError(
            f"model.chat_template {name!r} ends an answer with {end[:80]!r}, which is no special "
            f"token of {model!r}, so the student could not learn to stop",
            f"use a template that ends answers with a token of the model: {shown}",
        ) from error
