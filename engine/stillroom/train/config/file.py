"""Reads config.yml with its overrides; refuses keys that only other training systems support."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml
from pydantic import BaseModel, ValidationError

from stillroom.errors import ConfigError
from stillroom.models.pairing import OFF_POLICY_ROUTE
from stillroom.secrecy.readable import check_readable, parse_error_message
from stillroom.teachers.providers import PROVIDERS
from stillroom.train.config.schema import (
    CONFIGS,
    DistillConfig,
    TrainConfig,
    keys_of_other_types,
    section_of,
)
from stillroom.train.config.sections import TrainerSection
from stillroom.validation import UNKNOWN_KEY, describe_errors
from stillroom.yaml_text import read_yaml

# yaml parses dates, and raises ValueError for a day that does not exist.
_UNREADABLE = (yaml.YAMLError, msgspec.DecodeError, ValueError, RecursionError)

_CHAT_ONLY = [name for name, provider in PROVIDERS.items() if not provider.scores_tokens]

_NO_BILL = (
    "Stillroom does not bill training, so there is no limit in dollars",
    "leave it out: trainer.num_epochs limits a run (generate_rollouts has budget_usd)",
)

UNSUPPORTED: dict[str, tuple[str, str]] = {
    "max_billing": _NO_BILL,
    "trainer.max_billing": _NO_BILL,
    "data.packing": (
        "rows are packed wherever the model supports it, and never attend to each other",
        "leave it out",
    ),
    "packing": (
        "rows are packed wherever the model supports it, and never attend to each other",
        "leave it out",
    ),
    "trainer.gradient_accumulation_steps": (
        "data.batch_size counts the rows per optimiser step, split into as many passes as needed",
        "leave it out; model.microbatch_tokens makes the passes smaller",
    ),
    "wandb_project": ("it belongs to the section trainer", "write trainer.wandb_project"),
    "wandb_name": ("it belongs to the section trainer", "write trainer.wandb_name"),
}
"""The reason and the fix for each refused key, by dotted key; null, false and [] are
accepted."""

_EVAL_ID = "eval_id"
_HOSTED_EVAL = "it names an evaluation of a hosted service"
_HOSTED_EVAL_FIX = (
    "put its prompts next to config.yml, e.g. as heldout.jsonl, and write the entry as "
    "{name: heldout, step: 100} (pass1, pass4 and pass8 keep their meaning)"
)

WITHOUT_EFFECT: dict[str, str] = {
    "organization_id": "it names an account of a hosted service",
    "teacher.agentic": "tools.py and rollout.max_turns decide whether the student uses tools",
}
"""The reason for each key that is ignored with a note, since it has no effect in Stillroom."""

_NO_SCORES = (
    "its API does not return the log-probability of tokens that another model wrote",
    f"use provider vllm or sglang with an open-weight teacher, or {OFF_POLICY_ROUTE}",
)

REFUSED_VALUES: dict[tuple[str, str], tuple[str, str]] = {
    **{("teacher.provider", name): _NO_SCORES for name in _CHAT_ONLY},
    ("dataset_type", "rl"): (
        "Stillroom does not train from rewards alone",
        "use dataset_type distill with a teacher that scores tokens, or sft on filtered rollouts",
    ),
    ("dataset_type", "midtrain"): (
        "Stillroom does not train on plain text",
        "use dataset_type sft with rows of messages",
    ),
}
"""The reason and the fix for each refused value, by dotted key and value."""


_KEYS_OF_OTHER_TYPES: dict[str, str] = {
    "data.val_split": "distill is evaluated on a separate file of prompts: name it in evals",
    "trainer.max_steps": "it limits iterations; set trainer.num_epochs or trainer.max_minutes",
    "trainer.early_stop": (
        "early stopping needs val_loss, which distill does not compute: list prompts under evals"
    ),
    "model.system": (
        "supervised rows are trained on as they are; convert_rollouts(system=…) writes them with "
        "another system message"
    ),
    "teacher.system": "dpo has no teacher",
    "teacher.context_file": "dpo has no teacher",
    "curriculum": "it limits the student's rollouts",
    "cold_start": "it precedes the student's rollouts",
    "soft_targets": "it sets the loss of sft, or of distill's cold start",
}
"""The reason for each key that is refused for a dataset_type without it; other such keys are
ignored with a note, so that one config.yml may serve several types."""


def load_config(
    path: Path, overrides: Sequence[str] = (), *, source: Path | None = None
) -> TrainConfig:
    """Returns the validated configuration of a config.yml or config.json.

    overrides: `section.key=value` texts, with the value in YAML. source: a copy of the file to
    read in its place.
    Raises ConfigError, which names all refused settings, or else all wrong keys and, if a key is
    misspelt, the nearest known one.
    """
    raw = read_config(path, overrides, source=source)
    refusals = list(_refused_settings(raw))
    for dotted in (*UNSUPPORTED, *WITHOUT_EFFECT):
        _remove(raw, dotted)
    if refusals and raw.get("dataset_type") not in [*CONFIGS]:  # may be a list, without a hash
        raise _refusal_error(path, refusals)
    model = _config_class(raw, path)
    for dotted, owners in keys_of_other_types(raw["dataset_type"]).items():
        refusals += _refused_keys_of_other_types(raw, dotted, owners)
        _remove(raw, dotted)
    if refusals:
        raise _refusal_error(path, [*refusals, *_unknown_keys(raw, model)])
    if model is DistillConfig and not raw.get("teacher"):
        raise ConfigError(
            f"{path}: dataset_type distill needs teacher.path",
            "name the model that scores the student's tokens",
        )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {describe_errors(error, model)}",
            "correct the file, or override the key with section.key=value",
        ) from error


def _config_class(raw: Mapping[str, Any], path: Path) -> type[TrainConfig]:
    """Returns the class of a configuration's dataset_type. Raises ConfigError if it is unknown."""
    name = raw.get("dataset_type")
    if isinstance(name, str) and name in CONFIGS:
        return CONFIGS[name]
    shown = repr(name) if isinstance(name, str) else type(name).__name__
    problem = f"is {shown}" if "dataset_type" in raw else "is required"
    *others, last = CONFIGS
    raise ConfigError(
        f"{path}: dataset_type {problem}; it must be {', '.join(others)} or {last}",
        "write e.g. `dataset_type: sft`",
    )


_Refusal = tuple[str, str]
"""What is wrong with a setting that is refused, and the fix."""


def _refusal_error(path: Path, refusals: Sequence[_Refusal]) -> ConfigError:
    """Returns one error for all refused settings of a file."""
    if len(refusals) == 1:
        problem, fix = refusals[0]
        return ConfigError(f"{path}: {problem}", fix)
    fixes = dict.fromkeys(f"{problem.split()[0].rstrip(':')}: {fix}" for problem, fix in refusals)
    problems = "; ".join(problem for problem, _ in refusals)
    return ConfigError(f"{path}: {problems}", "; ".join(fixes))


def _unknown_keys(raw: Mapping[str, Any], model: type[TrainConfig]) -> list[_Refusal]:
    """Returns the unknown keys of a configuration as one refusal, without those of hosted evals."""
    try:
        model.model_validate(raw)
    except ValidationError as error:
        unknown = describe_errors(error, model, error_type=UNKNOWN_KEY)
        sentences = [part for part in unknown.split("; ") if f".{_EVAL_ID} " not in part]
        if sentences and unknown:
            return [("; ".join(sentences), "correct or remove it")]
    return []


def _refused_keys_of_other_types(
    raw: Mapping[str, Any], dotted: str, owners: list[str]
) -> Iterator[_Refusal]:
    """Yields a refusal for each key of other dataset_types that is set and cannot be ignored."""
    for key, reason in _KEYS_OF_OTHER_TYPES.items():
        is_same_key = key == dotted or key.rpartition(".")[0] == dotted
        if is_same_key and _is_set(key, _value_at(raw, key), CONFIGS[owners[0]]):
            yield (
                f"{key} is for dataset_type {' and '.join(owners)}: {reason}",
                f"leave it out, or set dataset_type to {' or '.join(owners)}",
            )


def _is_set(dotted: str, value: Any, model: type[BaseModel]) -> bool:
    """Returns whether a configuration's value differs from the key's default."""
    section, _, key = dotted.rpartition(".")
    parent = section_of(model, section) if section else model
    if isinstance(value, dict):
        inner = parent and section_of(parent, key)
        values = cast("dict[str, Any]", value).items()
        return inner is None or any(_is_set(name, each, inner) for name, each in values)
    field = parent and parent.model_fields.get(key)
    return value is not None and (field is None or value != field.get_default())


def _ignored_key_notes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yields a note for each key that only other dataset_types have."""
    for dotted, owners in keys_of_other_types(raw["dataset_type"]).items():
        if _is_set(dotted, _value_at(raw, dotted), CONFIGS[owners[0]]):
            yield f"{dotted} is ignored: it is for dataset_type {' and '.join(owners)}"


_REWARD_COEF = "algorithm.reward_coef"


def config_notes(
    path: Path, overrides: Sequence[str] = (), *, source: Path | None = None
) -> list[str]:
    """Returns notes for the user on keys that are ignored, and on defaults of a missing trainer."""
    raw, name = read_config(path, overrides, source=source), path.name
    notes = [
        f"{name}: {dotted} is ignored: {reason}"
        for dotted, reason in WITHOUT_EFFECT.items()
        if _value_at(raw, dotted) not in (None, "", False)
    ]
    notes += [f"{name}: {note}" for note in _ignored_key_notes(raw)]
    # With max_steps, the number of epochs follows from it.
    has_max_steps = _value_at(raw, "trainer.max_steps") is not None
    if _value_at(raw, "trainer.num_epochs") is None and not has_max_steps:
        fields = TrainerSection.model_fields
        shown = ("num_epochs", "learning_rate", "schedule", "save_step")
        defaults = ", ".join(
            f"{key} {fields[key].get_default()}"
            for key in shown
            if _value_at(raw, f"trainer.{key}") is None
        )
        missing = "trainer" if _value_at(raw, "trainer") is None else "trainer.num_epochs"
        notes.append(f"{name} has no {missing}; using the defaults: {defaults}")
    estimator = _value_at(raw, "algorithm.adv_estimator")
    if raw["dataset_type"] == "distill" and estimator and not _value_at(raw, _REWARD_COEF):
        notes.append(
            f"{name}: algorithm.adv_estimator is ignored: {_REWARD_COEF} is 0, so rewards are only "
            "tracked"
        )
    return notes


def read_config(
    path: Path, overrides: Sequence[str] = (), *, source: Path | None = None
) -> dict[str, Any]:
    """Returns a configuration's keys and values, unchecked. Raises ConfigError for bad syntax."""
    raw = _read_mapping(path, source or path)
    for override in overrides:
        _apply_override(raw, override)
    return raw


def _read_mapping(path: Path, source: Path) -> dict[str, Any]:
    """Returns the keys and values in `source`; errors name `path`."""
    check_readable(path)
    data = source.read_bytes()
    try:
        raw: Any = msgspec.json.decode(data) if path.suffix == ".json" else read_yaml(data)
    except _UNREADABLE as error:
        raise ConfigError(parse_error_message(path, error), "correct the syntax") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: must be a mapping of keys to values, not {type(raw).__name__}",
            "write e.g. `dataset_type: sft`",
        )
    # `rollout:` without keys is read as None and means the defaults.
    return {k: v for k, v in cast("dict[str, Any]", raw).items() if v is not None}


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets the key of a `section.key=value` override. Raises ConfigError if it is malformed."""
    dotted, equals, value_text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"override {override!r} is not section.key=value", "write e.g. trainer.num_epochs=3"
        )
    try:
        value: Any = read_yaml(value_text)
    except _UNREADABLE as error:
        raise ConfigError(f"override {override!r}: the value is not YAML", "quote it") from error
    container: Any = raw
    for depth, part in enumerate(parts):
        if not isinstance(container, dict | list):
            raise ConfigError(
                f"override {override!r}: {parts[depth - 1]!r} is a value, not a section",
                "check the key",
            )
        key = part if isinstance(container, dict) else _index(part, cast("list[Any]", container))
        if key is None:
            num = len(cast("list[Any]", container))
            raise ConfigError(
                f"override {override!r}: {parts[depth - 1]!r} has no entry {part!r}",
                f"give an index below {num}, counted from 0"
                if num
                else "the list is empty: add its entries in the file, or override the whole list",
            )
        if depth == len(parts) - 1:
            cast("Any", container)[key] = value
        elif isinstance(key, str):
            container = cast("dict[str, Any]", container).setdefault(key, {})
        else:
            container = container[key]


def _index(part: str, entries: list[Any]) -> int | None:
    """Returns the list index that a part of an override's key names; None if out of range."""
    return int(part) if part.isdecimal() and int(part) < len(entries) else None


def _refused_settings(raw: Mapping[str, Any]) -> Iterator[_Refusal]:
    """Yields a refusal for each setting that only other training systems support."""
    for dotted, (reason, fix) in UNSUPPORTED.items():
        if _value_at(raw, dotted) not in (None, [], False):
            yield f"{dotted} is not supported: {reason}", fix
    evals = raw.get("evals")
    for index, section in enumerate(cast("list[Any]", evals) if isinstance(evals, list) else []):
        if isinstance(section, dict) and _EVAL_ID in section:
            yield (
                f"evals.{index}.{_EVAL_ID} is not supported: {_HOSTED_EVAL}",
                _HOSTED_EVAL_FIX,
            )
    for (dotted, value), (reason, fix) in REFUSED_VALUES.items():
        if _value_at(raw, dotted) == value:
            yield f"{dotted}: {value} is not supported: {reason}", fix
    if isinstance(_value_at(raw, "model.path"), list):
        yield (
            "model.path is a list, but one run trains one model",
            "start one run for each with the override model.path=…",
        )


def _remove(raw: dict[str, Any], dotted: str) -> None:
    """Deletes a dotted key, if present."""
    section, _, key = dotted.rpartition(".")
    container = _value_at(raw, section) if section else raw
    if isinstance(container, dict):
        cast("dict[str, Any]", container).pop(key, None)


def _value_at(raw: Mapping[str, Any], dotted: str) -> Any:
    """Returns the value of a dotted key; None if it is missing."""
    value: Any = raw
    for part in dotted.split("."):
        value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
    return value
