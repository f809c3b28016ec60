"""How much a model is asked to think, in the words that its own chat template knows."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from stillroom.errors import ConfigError, ModelError

ReasoningMode = Literal[
    "none", "disabled", "enabled", "minimal", "low", "medium", "high", "xhigh"
]  # fmt: skip
_OFF = frozenset({"none", "disabled"})
# Qwen, SmolLM and GLM; DeepSeek and Granite.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_LEVELS = {"minimal": "low", "xhigh": "high", "enabled": "medium"}
"""Levels that templates with efforts (gpt-oss) have not, and the nearest one that they have."""


def reasoning_variables(chat_template: str, mode: ReasoningMode | None) -> Mapping[str, Any]:
    """Returns what a chat template must be given for a mode; nothing for None.

    A level is told to templates that know levels; to those with a switch it means on.
    Raises ConfigError for a template that does not know what is asked of it, and ModelError for
    one that cannot be read.
    """
    if mode is None:
        return {}
    known = _variables_of(chat_template)
    if mode not in _OFF and _EFFORT in known:
        return {_EFFORT: _LEVELS.get(mode, mode)}
    for switch in _SWITCHES:
        if switch in known:
            return {switch: mode not in _OFF}
    if _EFFORT in known:
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
    """Returns what a template reads that it has not set itself."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
    # A tag of transformers', which says nothing of variables.
    plain = _GENERATION_TAGS.sub("", chat_template)
    try:
        return meta.find_undeclared_variables(environment.parse(plain))
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the model's chat template cannot be read: {error}", "mend chat_template.jinja"
        ) from error
