"""The chat templates that come with Stillroom, for base models, which have none."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"
NAMED_TEMPLATES = ("chatml", "gemma", "llama3")
"""chatml and llama3 write tool calls in the way of Hermes and Llama 3; gemma takes no tools."""


def template_file(name: str) -> Path:
    """Returns the file of a template that comes with Stillroom."""
    return _FOLDER / f"{name}.jinja"
