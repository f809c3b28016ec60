"""Translates a reasoning mode into the variables that a model's own chat template reads."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from stillroom.errors import ConfigError, ModelError

ReasoningMode = Literal[
    "none", "disabled", "enabled", "minimal", "low", "medium", "high", "xhigh"
]  # fmt: skip
_OFF = frozenset({"none", "disabled"})
# The first is read by templates of Qwen, SmolLM and GLM, the second by DeepSeek and Granite.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_LEVELS = {"minimal": "low", "xhigh": "high", "enabled": "medium"}
"""The nearest effort level for modes that templates with such levels (gpt-oss) do not know."""


def reasoning_variables(chat_template: str, mode: ReasoningMode | None) -> Mapping[str, Any]:
    """Returns the chat template's variables for a reasoning mode; no variables if it is None.

    A template with effort levels receives the level. For a template with a switch, any level means
    on. Raises ConfigError if the template has no such choice, and ModelError if it cannot be read.
    """
    if mode is None:
        return {}
    variables = _variables_of(chat_template)
    if mode not in _OFF and _EFFORT in variables:
        return {_EFFORT: _LEVELS.get(mode, mode)}
    for switch in _SWITCHES:
        if switch in variables:
            return {switch: mode not in _OFF}
    if _EFFORT in variables:
        raise ConfigError(
            f"rollout.reasoning_mode: {mode}: this model always thinks; its chat template knows "
            "only how much",
            "set low, medium or high, or leave it out",
        )
    raise ConfigError(
        f"rollout.reasoning_mode: {mode}: this model's chat template has no such choice (it reads "
        f"none of {', '.join((*_SWITCHES, _EFFORT))})",
        "leave it out, or use a model whose template has it",
    )


def _variables_of(chat_template: str) -> set[str]:
    """Returns the variables that a template reads and does not set itself."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
    # These tags are an extension of transformers that plain jinja2 does not know. They read no
    # variables, so they can be left out.
    plain = _GENERATION_TAGS.sub("", chat_template)
    try:
        return meta.find_undeclared_variables(environment.parse(plain))
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the model's chat template cannot be read: {error}", "mend chat_template.jinja"
        ) from error
