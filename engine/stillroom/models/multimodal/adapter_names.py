"""The names of an adapter's weights: on a language model, and on a multimodal model around it.

In training an adapter lies on the text part, which is a language model of its own; others put it on
the whole multimodal model.
"""

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stillroom.files import write_json
from stillroom.models.multimodal.text_part import text_name, whole_name

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ROOT = "base_model.model."
_NARROWER = ("exclude_modules", "layers_to_transform", "layers_pattern")


def weight_names(folder: Path) -> list[str]:
    """Returns the names of an adapter's weights; [] if it has no safetensors file.

    Raises SafetensorError if the file is damaged.
    """
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        return []
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def is_on_whole(names: Iterable[str]) -> bool:
    """Whether weights of these names belong on a whole multimodal model."""
    return any(text_name(inner) != inner for inner in map(_inner, names))


def names_on_text_part(names: Iterable[str]) -> list[str]:
    """Returns the names on the text part of the weights of an adapter on a whole model.

    Weights on other parts are left out.
    """
    inner = [name for name in map(_inner, names) if text_name(name) != name or _is_head(name)]
    return [_ROOT + text_name(name) for name in inner]


def changed_other_parts(folder: Path) -> list[str]:
    """Returns the weights of an adapter on a whole model that change other parts than the text."""
    names = weight_names(folder)
    if not is_on_whole(names):
        return []
    others = [n for n in names if text_name(_inner(n)) == _inner(n) and not _is_head(_inner(n))]
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as weights:
        # A new LoRA adapter changes nothing: its second matrix is zero.
        return [n for n in others if ".lora_A." not in n and bool(weights.get_tensor(n).any())]


def settings_for(
    settings: dict[str, Any], names: Iterable[str], rename: Callable[[str], str]
) -> dict[str, Any]:
    """Returns the settings that change for another model, on which the weights have these names.

    Every adapted module is named in full, because a vision tower may have modules of equal names.
    rename: returns the name on that model of a weight of this one.
    """
    parameters: Collection[str] = settings.get("target_parameters") or ()
    wrapped = tuple(parameter.rpartition(".")[0] for parameter in parameters)
    modules = {_inner(name).partition(".lora_")[0] for name in names if ".lora_" in name}
    targets = {module.removesuffix(".base_layer") for module in modules}
    changed: dict[str, Any] = {name: None for name in _NARROWER if settings.get(name)}
    changed["target_modules"] = sorted(m for m in targets if not m.endswith(wrapped or "/"))
    if parameters:
        changed["target_parameters"] = [rename(parameter) for parameter in parameters]
    for name in ("rank_pattern", "alpha_pattern"):
        patterns: dict[str, int] = settings.get(name) or {}
        changed[name] = {rename(pattern): value for pattern, value in patterns.items()}
    return changed


def name_targets_in_full(folder: Path) -> None:
    """Names every layer of the adapter in a folder, which is one on a text part, in full.

    peft shortens long lists to common ends of names, which a vision tower may have as well: on the
    whole model such an adapter would be put on the tower, without its weights and with a warning at
    most. With full names it is refused. Raises OSError or SafetensorError.
    """
    file = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(file.read_bytes())
    changed = settings_for(settings, weight_names(folder), lambda name: name)
    write_json(file, {**settings, **changed})


def move_to_whole(folder: Path, model_type: str) -> None:
    """Rewrites the adapter in a folder, which is one on a text part, as one on the whole model.

    model_type: the multimodal model's. Raises OSError or SafetensorError.
    """
    weights = load_file(folder / ADAPTER_WEIGHTS)
    moved = {_ROOT + whole_name(_inner(name), model_type): t for name, t in weights.items()}
    file = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(file.read_bytes())
    changed = settings_for(settings, moved, lambda name: whole_name(name, model_type))
    save_file(moved, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_json(file, {**settings, **changed})


def _inner(name: str) -> str:
    return name.removeprefix(_ROOT)


def _is_head(name: str) -> bool:
    return name.startswith("lm_head.")
