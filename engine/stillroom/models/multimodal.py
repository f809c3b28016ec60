"""The text part of a multimodal checkpoint: its configuration, and the names of its weights.

Only the text part is loaded, trained and sampled. On text alone it gives the logits of the whole
model, in which embeddings of images and audio replace special tokens. Stillroom trains an adapter
of the text part alone; other libraries train an adapter of the whole multimodal model.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging

from stillroom.errors import ModelError
from stillroom.files import write_json
from stillroom.models.gguf.folder import pretrained_path
from stillroom.models.resolve import ModelLocation

# Text parts that transformers has no causal language model for, and equivalent model types: their
# three-dimensional positions are equal in all dimensions if there are no images.
_EQUIVALENT_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved", "type")
# Name prefixes of the text part's weights: in the files, and in a language model.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
KEY_MAPPING = {f"^{re.escape(prefix)}": new for prefix, new in _PREFIXES.items()}
"""Patterns of weight-name prefixes in a multimodal model, each with its replacement."""

# Multimodal models that contain a whole language model, including its head.
_HOLD_LANGUAGE_MODEL = ("llama4",)


def multimodal_config(location: ModelLocation) -> Any | None:
    """Returns the configuration of a multimodal checkpoint; None for a text-only model.

    A model that runs as a whole, but whose text part cannot run alone, counts as text-only.
    Raises OSError, ValueError or KeyError if the configuration cannot be read.
    """
    config: Any = AutoConfig.from_pretrained(pretrained_path(location))
    return config if _has_text_part(config) else None


def language_config(location: ModelLocation) -> Any:
    """Returns the configuration for AutoModelForCausalLM: the model's own, or its text part's.

    Raises ModelError if transformers has no causal language model for it, and the errors of
    `multimodal_config`.
    """
    config: Any = AutoConfig.from_pretrained(pretrained_path(location))
    language = _text_config(config) if _has_text_part(config) else config
    if type(language) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        part = "" if language is config else f", text part {language.model_type!r}"
        raise ModelError(
            f"transformers has no causal language model for {location.name!r} (model type "
            f"{config.model_type!r}{part})",
            "use a text-only language model, or a multimodal Qwen, Gemma, Mistral or Llama model",
        )
    return language


def text_options(location: ModelLocation) -> dict[str, Any]:
    """Returns `from_pretrained`'s options that load the text part; {} for a text-only model.

    Raises the errors of `language_config`.
    """
    config = language_config(location)
    is_part = multimodal_config(location) is not None
    return {"config": config, "key_mapping": KEY_MAPPING} if is_part else {}


def language_model_name(name: str) -> str:
    """Returns the name that a weight of a multimodal checkpoint has in a language model.

    Weights outside the text part keep their names.
    """
    for prefix, new_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return new_prefix + name.removeprefix(prefix)
    return name


def multimodal_name(name: str, model_type: str) -> str:
    """Returns the name that a text-part weight or module has in a loaded multimodal model."""
    if model_type in _HOLD_LANGUAGE_MODEL:
        return f"language_model.{name}"
    return f"model.language_model.{rest}" if (rest := name.removeprefix("model.")) != name else name


@contextmanager
def silence_unused_weights() -> Generator[None]:
    """Suppresses transformers' warnings about each unused weight outside the text part."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def is_multimodal(model: Any) -> bool:
    """Whether a loaded model is a whole multimodal model, as its text part could not run alone."""
    return hasattr(model.config, "text_config")


def make_standalone(model: Any) -> None:
    """Makes a loaded text part save as a standalone language model.

    transformers would save its weights under their names in the multimodal checkpoint, and keep
    tie_word_embeddings even where the files have a separate head.
    """
    conversions: Sequence[Any] = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [c for c in conversions if c.source_patterns[0] not in KEY_MAPPING]
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    model.config.tie_word_embeddings = head.weight is embeddings.weight


def _has_text_part(config: Any) -> bool:
    """Whether a configuration is that of a multimodal model whose text part can be loaded alone."""
    text = config.get_text_config()
    if text is config or not hasattr(config, "text_config"):
        return False
    runs_as_whole = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return type(_text_config(config)) in MODEL_FOR_CAUSAL_LM_MAPPING or not runs_as_whole


def _text_config(whole: Any) -> Any:
    """Returns the configuration of a model's text part as a causal language model."""
    text: Any = deepcopy(whole.get_text_config())
    if (equivalent_type := _EQUIVALENT_TYPES.get(text.model_type)) is not None:
        settings = {k: v for k, v in text.to_dict().items() if k != "model_type"}
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = {k: v for k, v in rope.items() if k not in _IMAGE_ROPE_KEYS}
        text = AutoConfig.for_model(equivalent_type, **settings)
    # These settings of the whole model take precedence over those of its text part.
    for name in ("tie_word_embeddings", "dtype", "quantization_config"):
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    return text


ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_MODULE_FILTERS = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""The adapter settings that exclude target modules; not needed with full module names."""


def weight_names(folder: Path) -> list[str]:
    """Returns the names of an adapter's weights; [] if it has no safetensors file.

    Raises SafetensorError if the file is damaged.
    """
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        return []
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def is_for_multimodal(names: Iterable[str]) -> bool:
    """Whether an adapter with these weight names is for a whole multimodal model."""
    return any(language_model_name(inner) != inner for inner in map(_wrapped_name, names))


def text_part_names(names: Iterable[str]) -> list[str]:
    """Returns an adapter's weight names on the text part, from those on the multimodal model.

    Weights outside the text part are left out.
    """
    wrapped = map(_wrapped_name, names)
    return [_PEFT_PREFIX + language_model_name(name) for name in wrapped if _is_in_text_part(name)]


def trained_weights_outside_text_part(folder: Path) -> list[str]:
    """Returns the names of adapter weights that were trained outside the text part.

    Empty for a text-only model.
    """
    names = weight_names(folder)
    if not is_for_multimodal(names):
        return []
    others = [n for n in names if not _is_in_text_part(_wrapped_name(n))]
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as weights:
        # A new LoRA adapter is a no-op: its second matrix is zero.
        return [n for n in others if ".lora_A." not in n and bool(weights.get_tensor(n).any())]


def renamed_settings(
    settings: dict[str, Any], names: Iterable[str], rename: Callable[[str], str]
) -> dict[str, Any]:
    """Returns the settings of an adapter that change when its weights are renamed to `names`.

    Every adapted module is named in full, because a vision tower may have modules with the same
    suffix. rename: returns the new name of one of the adapter's weights.
    """
    parameters: Collection[str] = settings.get("target_parameters") or ()
    wrapped = tuple(parameter.rpartition(".")[0] for parameter in parameters)
    modules = {_wrapped_name(name).partition(".lora_")[0] for name in names if ".lora_" in name}
    targets = {module.removesuffix(".base_layer") for module in modules}
    changed: dict[str, Any] = {name: None for name in _MODULE_FILTERS if settings.get(name)}
    changed["target_modules"] = sorted(m for m in targets if not m.endswith(wrapped or "/"))
    if parameters:
        changed["target_parameters"] = [rename(parameter) for parameter in parameters]
    for name in ("rank_pattern", "alpha_pattern"):
        patterns: dict[str, int] = settings.get(name) or {}
        changed[name] = {rename(pattern): value for pattern, value in patterns.items()}
    return changed


def expand_target_modules(folder: Path) -> None:
    """Rewrites adapter_config.json so that `target_modules` has full module names.

    For an adapter that was trained on the text part of a multimodal model. peft shortens long lists
    to common suffixes, which a vision tower may have too: on the whole model peft would add the
    adapter to the tower as well, without weights and with a warning at most. With full names it
    raises an error. Raises OSError or SafetensorError.
    """
    file = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(file.read_bytes())
    changed = renamed_settings(settings, weight_names(folder), lambda name: name)
    write_json(file, {**settings, **changed})


def convert_to_multimodal(folder: Path, model_type: str) -> None:
    """Rewrites the text-part adapter in a folder as an adapter of the whole multimodal model.

    model_type: the `model_type` of the multimodal model. Raises OSError or SafetensorError.
    """
    weights = load_file(folder / ADAPTER_WEIGHTS)
    renamed = {
        _PEFT_PREFIX + multimodal_name(_wrapped_name(name), model_type): t
        for name, t in weights.items()
    }
    file = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(file.read_bytes())
    changed = renamed_settings(settings, renamed, lambda name: multimodal_name(name, model_type))
    save_file(renamed, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_json(file, {**settings, **changed})


def _wrapped_name(name: str) -> str:
    """Returns a weight's name in the model that the adapter wraps."""
    return name.removeprefix(_PEFT_PREFIX)


def _is_in_text_part(name: str) -> bool:
    """Whether a weight with this name in the wrapped model belongs to its text part."""
    return language_model_name(name) != name or name.startswith("lm_head.")
