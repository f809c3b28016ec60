"""Finds the chat template that a request or config.yml names for a student; loads no model."""

from dataclasses import dataclass
from pathlib import Path

from stillroom import bounds
from stillroom.data.chat.template import NAMED_TEMPLATES, template_file
from stillroom.errors import ConfigError, EngineError
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.settings import Workspace

_FIX = (
    f"give one of {', '.join(NAMED_TEMPLATES)}, a .jinja file, or a model whose template is to be "
    "used; paths are relative to the workspace"
)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Where a chat template comes from: a file or a model."""

    name: str
    """The template as the user named it."""
    option: str
    """The option that names it: `chat_template`, or `model.chat_template` in config.yml."""
    origin: Path | ModelLocation
    """The file, or the model whose template is taken."""

    @property
    def files(self) -> list[Path]:
        """The user's .jinja file, in a list; [] for a named template or a model's."""
        if self.name in NAMED_TEMPLATES or isinstance(self.origin, ModelLocation):
            return []
        return [self.origin]

    @property
    def models(self) -> list[str]:
        """The name of the model whose template is taken, in a list; [] for a file."""
        return [self.name] if isinstance(self.origin, ModelLocation) else []


def template_source(
    workspace: Workspace, name: str | None, *, option: str = "chat_template"
) -> TemplateSource | None:
    """Returns the source of the template that `option` names; None if it names none.

    Raises EngineError if there is no such template, file or model.
    """
    if name is None:
        return None
    if name in NAMED_TEMPLATES:
        return TemplateSource(name, option, template_file(name))
    if name.endswith(".jinja"):
        file = workspace.existing(name, label=option)
        if not file.is_file() or file.stat().st_size > bounds.INSTRUCTION.limit:
            raise ConfigError(
                f"{option} {name!r} is not a file of at most {bounds.INSTRUCTION.size}",
                _FIX,
            )
        return TemplateSource(name, option, file)
    try:
        return TemplateSource(name, option, locate_model(workspace, name))
    except EngineError as error:
        raise ConfigError(f"{option} {name!r}: {error.problem}", _FIX) from error
