"""Adds defaults from the prompts' project to requests for rollouts and evaluations.

Both use the project's tools.py; rollouts also use the `rollout` section of config.yml, and
evaluations use rewards.py. Options of the request take precedence.
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
_IGNORED_KEYS = {
    "max_tool_response": "it counts tokens in config.yml, but characters in a request",
    "max_context_window": "it limits the student's conversations",
}
"""The keys of the section that have another meaning in a request."""
_Request = TypeVar("_Request", bound=RolloutOptions)


@dataclass(frozen=True, slots=True)
class CompletedRequest(Generic[_Request]):
    """A request with defaults from its prompts' project, and notes about them."""

    request: _Request
    notes: list[str]


def complete_rollouts(
    workspace: Workspace, request: GenerateRollouts
) -> CompletedRequest[GenerateRollouts]:
    """Returns a request for rollouts with defaults from its prompts' project.

    An output that exists already is continued with its earlier settings. Raises InputError if the
    `rollout` section of config.yml is malformed.
    """
    prompts = workspace.existing(request.input, label="input")
    requested, section = request.model_fields_set, _rollout_section(prompts.parent)
    notes = [*_provider_notes(request), *_difference_notes(request, prompts, section)]
    defaults = {name: value for name, value in _options(section) if name not in requested}
    if (
        "tools" not in requested
        and (tools := _project_file(workspace, prompts, TOOLS_FILE)) is not None
    ):
        defaults["tools"] = workspace.shown(tools)
    recorded = recorded_settings(workspace.output_file(request.output, label="output"))
    if recorded is not None:
        defaults = _compatible_defaults(defaults, request, recorded)
    if "tools" in defaults:
        notes.append(_use_note("tools", defaults["tools"], prompts))
    settings = [
        f"{name} {_shown_value(name, defaults[name])}" for name in defaults if name != "tools"
    ]
    if settings:
        settings = ", ".join(settings)
        notes.append(
            f"{_CONFIG} next to the prompts sets: {settings} (request options take precedence)"
        )
    notes += [
        f"{_CONFIG}: rollout.{key} is ignored, since {reason}"
        for key, reason in _IGNORED_KEYS.items()
        if key in section.model_fields_set and key not in requested
    ]
    return CompletedRequest(request.model_copy(update=defaults) if defaults else request, notes)


def complete_evaluation(
    workspace: Workspace, request: EvaluateModel
) -> CompletedRequest[EvaluateModel]:
    """Returns an evaluation request with the project's tools.py and rewards.py as defaults.

    If the request sets a judge, rewards.py is not added.
    """
    prompts = workspace.existing(request.data, label="data")
    defaults: dict[str, str] = {}
    notes = list(_provider_notes(request))
    for field, name in (("tools", TOOLS_FILE), ("rewards", _REWARDS_FILE)):
        file = _project_file(workspace, prompts, name)
        if field in request.model_fields_set or file is None:
            continue
        if field == "rewards" and request.judge != NO_FILE:
            notes.append(_REWARDS_NOT_USED)
            continue
        defaults[field] = workspace.shown(file)
        notes.append(_use_note(field, defaults[field], prompts))
    return CompletedRequest(request.model_copy(update=defaults) if defaults else request, notes)


def _project_file(workspace: Workspace, prompts: Path, name: str) -> Path | None:
    """Returns a file of the prompts' project; None if the project does not have it.

    The file is searched in the folder of the prompts and its parents within the workspace, since an
    import may have written the prompts to rollouts/. A folder with a config.yml is a project of its
    own, so its parents are not searched.
    """
    for folder in prompts.parents:
        if (folder / name).is_file():
            return folder / name
        if workspace.root not in folder.parents or (folder / _CONFIG).is_file():
            return None
    return None


def _use_note(field: str, file: str, prompts: Path) -> str:
    """Returns the note that a file of the project is used by default."""
    is_next_to_prompts = (prompts.parent / Path(file).name).is_file()
    location = "next to the prompts" if is_next_to_prompts else "of the prompts' project"
    return f"{file} {location} is used (set {field}: none to leave it out)"


_REWARDS_NOT_USED = (
    f"{_REWARDS_FILE} next to the prompts is not used (to use it, set rewards: {_REWARDS_FILE})"
)


def _difference_notes(
    request: GenerateRollouts, prompts: Path, section: RolloutSection
) -> Iterator[str]:
    """Yields notes on what differs from rnow, whose projects have the same files."""
    requested = request.model_fields_set
    if "rewards" not in requested and (prompts.parent / _REWARDS_FILE).is_file():
        yield _REWARDS_NOT_USED
    if request.n is not None and section.model_fields_set:
        yield (
            f"n={request.n} takes the first {request.n} prompts of the file; to choose others, set "
            "entries (e.g. 0,2,5-9)"
        )
    if request.system is not None:
        with contextlib.suppress(DataError):
            rows = itertools.islice(read_rows(prompts, RowFormat.PROMPTS), _ROWS_LOOKED_AT)
            if any(task_from_row(row).messages[0]["role"] == "system" for row in rows):
                yield "system replaces the system messages of the rows"


def _provider_notes(request: RolloutOptions) -> Iterator[str]:
    if request.is_provider_inferred:
        yield (
            f"provider {request.provider} was inferred from the model's name; set provider to "
            "choose another"
        )


def _rollout_section(folder: Path) -> RolloutSection:
    """Returns the `rollout` section of config.yml in a folder; an empty section if there is none.

    A config.yml of another program, which has no dataset_type, is ignored.
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
            "correct the section, or move the prompts to another folder: the config.yml next to "
            "prompts sets the options of their rollouts",
        ) from error


def _options(section: RolloutSection) -> Iterator[tuple[str, Any]]:
    """Yields the request options that the section sets, with their values."""
    for name in EpisodeOptions.model_fields:
        if name in section.model_fields_set:
            yield name, getattr(section, name)
    if section.mcp_servers:
        yield "mcp_servers", section.mcp_servers
    mode = section.reasoning_mode
    if mode not in (None, "enabled"):
        yield "reasoning_effort", _EFFORT.get(str(mode), mode)


def _compatible_defaults(
    defaults: Mapping[str, Any], request: GenerateRollouts, recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the defaults without those that differ from the settings of the existing output."""
    compatible = {k: v for k, v in defaults.items() if k not in recorded or recorded[k] == v}
    if recorded.get("tools_sha256") is None:
        compatible.pop("tools", None)
    if "mcp_servers" in defaults and recorded.get("mcp_servers"):
        compatible["mcp_servers"] = defaults["mcp_servers"]
    if request.model_copy(update=compatible).nudge_to_send != recorded.get("nudge"):
        compatible = {
            k: v for k, v in compatible.items() if k not in ("nudge", "termination_policy")
        }
    return compatible


def _shown_value(name: str, value: Any) -> str:
    """Returns the value of an option for a note."""
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{text} (assistant turns, the final answer included)" if name == "max_turns" else text
