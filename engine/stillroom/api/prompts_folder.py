"""Completes a request with the files of its prompts' project, as training does.

Both generate_rollouts and evaluate_model take tools.py; rollouts also the `rollout` section of
config.yml, and evaluations rewards.py. Options that the request names win.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from stillroom.data.formats import RowFormat, read_rows, task_from_row
from stillroom.errors import ConfigError, DataError, InputError
from stillroom.evaluate.request import EvaluateModel
from stillroom.rollout.journal.journal import recorded_settings
from stillroom.rollout.request import NO_FILE, EpisodeOptions, GenerateRollouts, RolloutOptions
from stillroom.settings import Workspace
from stillroom.tools.user.pool import TOOLS_FILE
from stillroom.train.config.distill_sections import RolloutSection
from stillroom.train.config.file import read_config
from stillroom.validation import describe_errors

_CONFIG, _REWARDS_FILE = "config.yml", "rewards.py"
_ROWS_LOOKED_AT = 50
_EFFORT = {"disabled": "none", "xhigh": "high"}
_NOT_TAKEN = {
    "max_tool_response": "it counts tokens in config.yml and characters in a request",
    "max_context_window": "it bounds the student's conversations",
}
"""The keys of the section whose numbers mean something else in a request."""
_Request = TypeVar("_Request", bound=RolloutOptions)


@dataclass(frozen=True, slots=True)
class Completed(Generic[_Request]):
    """A request with what was found in the folder of its prompts, and notes that say so."""

    request: _Request
    notes: list[str]


def complete_rollouts(
    workspace: Workspace, request: GenerateRollouts
) -> Completed[GenerateRollouts]:
    """Returns a request for rollouts, completed from the folder of its prompts.

    An output that was begun continues as it was begun. Raises InputError if the `rollout` section
    of config.yml is malformed.
    """
    prompts = workspace.existing(request.input, label="input")
    given, section = request.model_fields_set, _section(prompts.parent)
    notes = [*_provider_notes(request), *_difference_notes(request, prompts, section)]
    found = {name: value for name, value in _options(section) if name not in given}
    if "tools" not in given and (tools := _of_project(workspace, prompts, TOOLS_FILE)) is not None:
        found["tools"] = workspace.shown(tools)
    recorded = recorded_settings(workspace.output_file(request.output, label="output"))
    if recorded is not None:
        found = _as_begun(found, request, recorded)
    if "tools" in found:
        notes.append(_used("tools", found["tools"], prompts))
    shown = [f"{name} {_shown(name, found[name])}" for name in found if name != "tools"]
    if shown:
        said = ", ".join(shown)
        notes.append(f"{_CONFIG} next to the prompts sets: {said} (options that are given win)")
        notes += [
            f"{_CONFIG}: rollout.{key} is not taken: {reason}"
            for key, reason in _NOT_TAKEN.items()
            if key in section.model_fields_set and key not in given
        ]
    return Completed(request.model_copy(update=found) if found else request, notes)


def complete_evaluation(workspace: Workspace, request: EvaluateModel) -> Completed[EvaluateModel]:
    """Returns a request to evaluate, with tools.py and rewards.py if it names none.

    A judge that the request names is not replaced by a rewards.py that it does not name.
    """
    prompts = workspace.existing(request.data, label="data")
    found: dict[str, str] = {}
    notes = list(_provider_notes(request))
    for field, name in (("tools", TOOLS_FILE), ("rewards", _REWARDS_FILE)):
        file = _of_project(workspace, prompts, name)
        if field in request.model_fields_set or file is None:
            continue
        if field == "rewards" and request.judge != NO_FILE:
            notes.append(_REWARDS_NOT_USED)
            continue
        found[field] = workspace.shown(file)
        notes.append(_used(field, found[field], prompts))
    return Completed(request.model_copy(update=found) if found else request, notes)


def _of_project(workspace: Workspace, prompts: Path, name: str) -> Path | None:
    """Returns a file of the prompts' project; None if it has none.

    It is in the folder of the prompts, or in one above it within the workspace: prompts that an
    import wrote to rollouts/ belong to the project around that. A folder with a config.yml is a
    project of its own, and nothing above it is taken.
    """
    for folder in prompts.parents:
        if (folder / name).is_file():
            return folder / name
        if workspace.root not in folder.parents or (folder / _CONFIG).is_file():
            return None
    return None


def _used(field: str, shown: str, prompts: Path) -> str:
    is_next = (prompts.parent / Path(shown).name).is_file()
    place = "next to the prompts" if is_next else "of the prompts' project"
    return f"{shown} {place} is used (set {field}: none to leave it out)"


_REWARDS_NOT_USED = (
    f"{_REWARDS_FILE} next to the prompts is not used (to use it, set rewards: {_REWARDS_FILE})"
)


def _difference_notes(
    request: GenerateRollouts, prompts: Path, section: RolloutSection
) -> Iterator[str]:
    """Yields notes on options that mean something else in other systems."""
    given = request.model_fields_set
    if "rewards" not in given and (prompts.parent / _REWARDS_FILE).is_file():
        yield _REWARDS_NOT_USED
    if request.n is not None and section.model_fields_set:
        yield f"n takes the first {request.n} prompts, in the file's order; entries chooses others"
    if request.system is not None:
        with contextlib.suppress(DataError):
            rows = itertools.islice(read_rows(prompts, RowFormat.PROMPTS), _ROWS_LOOKED_AT)
            if any(task_from_row(row).messages[0]["role"] == "system" for row in rows):
                yield "system takes the place of the rows' own system messages"


def _provider_notes(request: RolloutOptions) -> Iterator[str]:
    if request.is_provider_inferred:
        yield f"provider {request.provider}, by the model's name (set provider for another one)"


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
            "correct the section, or move the prompts to another folder",
        ) from error


def _options(section: RolloutSection) -> Iterator[tuple[str, Any]]:
    """Yields the options of a request that a section sets, with their values."""
    for name in EpisodeOptions.model_fields:
        if name in section.model_fields_set:
            yield name, getattr(section, name)
    if section.mcp_servers:
        yield "mcp_servers", section.mcp_servers
    mode = section.reasoning_mode
    if mode not in (None, "enabled"):
        yield "reasoning_effort", _EFFORT.get(str(mode), mode)


def _as_begun(
    found: Mapping[str, Any], request: GenerateRollouts, recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what was found, without all that would change an output that was begun."""
    kept = {k: v for k, v in found.items() if k not in recorded or recorded[k] == v}
    if recorded.get("tools_sha256") is None:
        kept.pop("tools", None)
    if "mcp_servers" in found and recorded.get("mcp_servers"):
        kept["mcp_servers"] = found["mcp_servers"]
    if request.model_copy(update=kept).nudge_to_send != recorded.get("nudge"):
        kept = {k: v for k, v in kept.items() if k not in ("nudge", "termination_policy")}
    return kept


def _shown(name: str, value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{text} (assistant turns, the final answer included)" if name == "max_turns" else text
