"""The text part of a multimodal checkpoint: its configuration, and the names of its weights.

Only the text part is loaded, trained and sampled. On text alone it gives the logits of the whole
model, which takes pictures and sound as embeddings in place of special tokens.
"""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging

from stillroom.errors import ModelError
from stillroom.models.resolve import ModelLocation

# The text parts that are no causal language models in transformers, and the ones that compute the
# same: positions in three dimensions are equal in all three where there are no pictures.
_SAME_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_PICTURE_POSITIONS = ("mrope_section", "mrope_interleaved", "type")
# The beginnings of the names of the text part's weights: in the files, and in a language model.
_BEGINNINGS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
KEY_MAPPING = {f"^{re.escape(begin)}": end for begin, end in _BEGINNINGS.items()}
"""From the beginnings of names in a multimodal model to those in a language model, as patterns."""

# The multimodal models that hold a whole language model, head included.
_HOLD_LANGUAGE_MODEL = ("llama4",)


def whole_config(location: ModelLocation) -> Any | None:
    """Returns the configuration of a multimodal checkpoint; None for a model of text only.

    A model whose text part cannot be run alone, but which runs as a whole, counts as one of text.
    Raises OSError, ValueError or KeyError if the configuration cannot be read.
    """
    config: Any = AutoConfig.from_pretrained(location.location)
    return config if _has_text_part(config) else None


def language_config(location: ModelLocation) -> Any:
    """Returns the configuration with which AutoModelForCausalLM makes the model, or its text part.

    Raises ModelError if transformers has no causal language model for it, and what `whole_config`
    does.
    """
    config: Any = AutoConfig.from_pretrained(location.location)
    language = _text_config(config) if _has_text_part(config) else config
    if type(language) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        part = "" if language is config else f", with a text part of type {language.model_type!r}"
        raise ModelError(
            f"{location.name!r} is a model of type {config.model_type!r}{part}, and transformers "
            "has no causal language model of that type",
            "use a language model, or a multimodal one of Qwen, Gemma, Mistral or Llama",
        )
    return language


def text_options(location: ModelLocation) -> dict[str, Any]:
    """Returns `from_pretrained`'s options that load the text part; {} for a model of text only.

    Raises what `language_config` does.
    """
    config = language_config(location)
    is_part = whole_config(location) is not None
    return {"config": config, "key_mapping": KEY_MAPPING} if is_part else {}


def text_name(name: str) -> str:
    """Returns the name in a language model of a weight in a multimodal checkpoint's files.

    Weights of other parts keep their names.
    """
    for begin, end in _BEGINNINGS.items():
        if name.startswith(begin):
            return end + name.removeprefix(begin)
    return name


def whole_name(name: str, model_type: str) -> str:
    """Returns the name in a loaded multimodal model of a weight or module of its text part."""
    if model_type in _HOLD_LANGUAGE_MODEL:
        return f"language_model.{name}"
    return f"model.language_model.{rest}" if (rest := name.removeprefix("model.")) != name else name


@contextmanager
def quiet_about_other_parts() -> Generator[None]:
    """Keeps transformers from listing each weight of the other parts as unexpected."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def is_whole(model: Any) -> bool:
    """Whether a loaded model is a multimodal one, whose text part could not be loaded alone."""
    return hasattr(model.config, "text_config")


def be_language_model(model: Any) -> None:
    """Makes a loaded text part be saved as a language model of its own.

    transformers would give its weights the names that they have in the multimodal checkpoint, and
    keep a setting that ties the head to the embeddings where the files hold both.
    """
    used: Sequence[Any] = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [c for c in used if c.source_patterns[0] not in KEY_MAPPING]
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    model.config.tie_word_embeddings = head.weight is embeddings.weight


def _has_text_part(config: Any) -> bool:
    text = config.get_text_config()
    if text is config or not hasattr(config, "text_config"):
        return False
    runs_as_whole = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return type(_text_config(config)) in MODEL_FOR_CAUSAL_LM_MAPPING or not runs_as_whole


def _text_config(whole: Any) -> Any:
    text: Any = deepcopy(whole.get_text_config())
    if (same := _SAME_AS.get(text.model_type)) is not None:
        settings = {k: v for k, v in text.to_dict().items() if k != "model_type"}
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = {k: v for k, v in rope.items() if k not in _PICTURE_POSITIONS}
        text = AutoConfig.for_model(same, **settings)
    # These settings of the whole count, also where its text part says otherwise or nothing.
    for name in ("tie_word_embeddings", "dtype", "quantization_config"):
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    return text
