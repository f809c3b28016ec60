"""What generate_rollouts and evaluate_model take from the files beside their prompts, as training
does: tools.py, for rollouts the `rollout` section of config.yml, and for evaluations rewards.py.
Options that the request names win."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stillroom.data.formats import RowFormat, read_rows, task_from_row
from stillroom.errors import ConfigError, DataError, InputError
from stillroom.evaluate.request import EvaluateModel
from stillroom.rollout.journal.journal import begun_settings
from stillroom.rollout.request import NO_FILE, GenerateRollouts, RolloutOptions, nudge_for
from stillroom.settings import Workspace
from stillroom.teachers.providers import provider_of
from stillroom.tools.user.named import TOOLS_FILE
from stillroom.train.config.distill_sections import RolloutSection
from stillroom.train.config.file import read_config
from stillroom.validation import describe_errors

_CONFIG, _REWARDS_FILE = "config.yml", "rewards.py"
_ROWS_LOOKED_AT = 50
_SAME_NAME = (
    "max_turns",
    "max_tokens",
    "browse",
    "browse_allow",
    "termination_policy",
    "nudge",
    "include_thinking",
    "tool_timeout",
    "reward_timeout",
    "rollout_timeout",
)
_EFFORT = {"disabled": "none", "xhigh": "high"}
_NOT_TAKEN = {
    "max_tool_response": "it counts tokens there and characters here",
    "max_context_window": "it bounds the student's conversations",
}
"""The keys whose numbers mean something else here."""


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """A request with what was found beside its prompts, and notes that say so."""

    request: GenerateRollouts
    notes: list[str]


def complete_request(workspace: Workspace, request: GenerateRollouts) -> CompletedRequest:
    """Returns the request with options that it does not name taken from beside its prompts.

    An output that has been begun goes on as it was begun. Raises InputError if the `rollout`
    section of config.yml cannot be read.
    """
    prompts = workspace.existing(request.input, label="input")
    folder = prompts.parent
    section = _section(folder)
    notes = [*_provider_notes(request), *_difference_notes(request, prompts, section)]
    found = dict(_found(workspace, request, folder, section))
    recorded = begun_settings(workspace.output_file(request.output, label="output"))
    if recorded is not None:
        found = _as_begun(found, request, recorded)
    if "tools" in found:
        notes.append(_used("tools", found["tools"]))
    taken = {name: value for name, value in found.items() if name != "tools"}
    if taken:
        shown = ", ".join(f"{name} {_shown(name, value)}" for name, value in taken.items())
        notes.append(f"{_CONFIG} beside the prompts says: {shown} (options that are given win)")
        notes += [
            f"{_CONFIG}: rollout.{key} is not taken: {reason}"
            for key, reason in _NOT_TAKEN.items()
            if key in section.model_fields_set and key not in request.model_fields_set
        ]
    return CompletedRequest(request.model_copy(update=found) if found else request, notes)


@dataclass(frozen=True, slots=True)
class CompletedEvaluation:
    """A request to evaluate with what was found beside its prompts, and notes that say so."""

    request: EvaluateModel
    notes: list[str]


def complete_evaluation(workspace: Workspace, request: EvaluateModel) -> CompletedEvaluation:
    """Returns the request with tools.py and rewards.py beside its prompts if it names none.

    A judge that the request names is not set aside by a rewards.py that it does not name.
    """
    folder = workspace.existing(request.data, label="data").parent
    found: dict[str, str] = {}
    notes = list(_provider_notes(request))
    for field, name in (("tools", TOOLS_FILE), ("rewards", _REWARDS_FILE)):
        if field in request.model_fields_set or not (folder / name).is_file():
            continue
        if field == "rewards" and request.judge != NO_FILE:
            notes.append(_not_used_rewards())
            continue
        found[field] = workspace.shown(folder / name)
        notes.append(_used(field, found[field]))
    return CompletedEvaluation(request.model_copy(update=found) if found else request, notes)


def _used(field: str, shown: str) -> str:
    return f"{shown} beside the prompts is used ({field}: none leaves it out)"


def _not_used_rewards() -> str:
    return f"{_REWARDS_FILE} beside the prompts is not used (rewards: {_REWARDS_FILE} does)"


def _difference_notes(
    request: GenerateRollouts, prompts: Path, section: RolloutSection
) -> Iterator[str]:
    """Yields notes on what other systems do otherwise with the same options."""
    given = request.model_fields_set
    if "rewards" not in given and (prompts.parent / _REWARDS_FILE).is_file():
        yield _not_used_rewards()
    if request.n is not None and section.model_fields_set:
        yield f"n takes the first {request.n} prompts, in the file's order; entries chooses others"
    if request.system is not None:
        with contextlib.suppress(DataError):
            rows = itertools.islice(read_rows(prompts, RowFormat.PROMPTS), _ROWS_LOOKED_AT)
            if any(task_from_row(row).messages[0]["role"] == "system" for row in rows):
                yield "system takes the place of the rows' own system messages"


def _provider_notes(request: RolloutOptions) -> Iterator[str]:
    is_inferred = "provider" not in request.model_fields_set and request.base_url is None
    if is_inferred and provider_of(request.model) is not None:
        yield f"provider {request.provider}, as the model's name says (provider names another)"


def _found(
    workspace: Workspace, request: GenerateRollouts, folder: Path, section: RolloutSection
) -> Iterator[tuple[str, Any]]:
    given, tools = request.model_fields_set, folder / TOOLS_FILE
    if "tools" not in given and tools.is_file():
        yield "tools", workspace.shown(tools)
    for name in _SAME_NAME:
        if name in section.model_fields_set and name not in given:
            yield name, getattr(section, name)
    if "mcp_servers" not in given and section.mcp_servers:
        yield "mcp_servers", section.mcp_servers
    mode = section.reasoning_mode
    if mode not in (None, "enabled") and "reasoning_effort" not in given:
        yield "reasoning_effort", _EFFORT.get(str(mode), mode)


def _section(folder: Path) -> RolloutSection:
    """Returns the `rollout` section of config.yml in a folder; an empty one without such a file.

    Another program's config.yml, which has no dataset_type, is not read.
    """
    path = folder / _CONFIG
    raw: Any = {}
    with contextlib.suppress(ConfigError):
        raw = read_config(path) if path.is_file() else {}
    section: Any = raw.get("rollout")
    if "dataset_type" not in raw or not isinstance(section, dict):
        return RolloutSection()
    try:
        return RolloutSection.model_validate(section)
    except ValidationError as error:
        raise InputError(
            f"{path}: rollout: {describe_errors(error, RolloutSection)}",
            "mend the section, or take the prompts out of its folder",
        ) from error


def _as_begun(
    found: Mapping[str, Any], request: GenerateRollouts, recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what was found without all that would change an output that has been begun."""
    kept = {k: v for k, v in found.items() if k not in recorded or recorded[k] == v}
    if recorded.get("tools_sha256") is None:
        kept.pop("tools", None)
    if "mcp_servers" in found and recorded.get("mcp_servers"):
        kept["mcp_servers"] = found["mcp_servers"]
    policy = kept.get("termination_policy", request.termination_policy)
    if nudge_for(policy, kept.get("nudge", request.nudge)) != recorded.get("nudge"):
        kept = {k: v for k, v in kept.items() if k not in ("nudge", "termination_policy")}
    return kept


def _shown(name: str, value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{text} (the assistant's, the last answer among them)" if name == "max_turns" else text
