"""The model families that Stillroom converts to GGUF itself, and their hyperparameters.

Source of the keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterator, Mapping
from typing import Any

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""llama.cpp's name of each family, by the `model_type` in config.json."""
FAMILY_NAMES = "Llama (SmolLM2, Llama 3), Qwen2, Qwen3 and Gemma 3"
_ACTIVATIONS = {"gemma3_text": "gelu_pytorch_tanh"}
_SCALINGS = ("default", "linear", "llama3")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA_PATTERN = 6
"""llama.cpp lets every sixth layer of Gemma 3 attend to the whole context."""
_GEMMA_27B_LAYERS = 62

Value = int | float | str
Settings = Mapping[str, Any]


def text_settings(config: Settings) -> Settings:
    """Returns the settings of a model's text part from its config.json."""
    return config.get("text_config") or config


def find_unsupported(config: Settings) -> str | None:
    """Returns a setting that llama.cpp does not support for the model's family, if there is one.

    config: the complete configuration of a text model, defaults included.
    """
    if config["model_type"] not in ARCHITECTURES:
        return f"the model type {config['model_type']!r}"
    is_gemma = config["model_type"] == "gemma3_text"
    family_unsupported = _gemma_unsupported if is_gemma else _llama_qwen_unsupported
    return next(iter([*_common_unsupported(config), *family_unsupported(config)]), None)


def _common_unsupported(config: Settings) -> Iterator[str]:
    """Yields the unsupported settings that models of every family may have."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation != _ACTIVATIONS.get(config["model_type"], "silu"):
        yield f"the activation {activation!r}"
    if config.get("attention_bias") and config["model_type"] != "llama":
        yield "attention_bias"
    rope, local = rope_settings(config)
    scalings = _SCALINGS if config["model_type"] == "llama" else _SCALINGS[:2]
    if (kind := rope.get("rope_type", "default")) not in scalings:
        yield f"RoPE of type {kind!r}"
    if local.get("rope_type", "default") != "default":
        yield "scaled RoPE in sliding layers"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor"


def _llama_qwen_unsupported(config: Settings) -> Iterator[str]:
    """Yields the unsupported settings of Llama and Qwen models."""
    if _SLIDING in (config.get("layer_types") or []):
        yield "sliding windows"


def _gemma_unsupported(config: Settings) -> Iterator[str]:
    """Yields the unsupported settings of Gemma models."""
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if config.get(name):
            yield name
    kinds: list[str] = config["layer_types"]
    if any((kind == _FULL) != ((i + 1) % _GEMMA_PATTERN == 0) for i, kind in enumerate(kinds)):
        yield f"layer_types other than every {_GEMMA_PATTERN}th with full attention"
    is_27b = len(kinds) == _GEMMA_27B_LAYERS
    expected = (
        config["hidden_size"] / config["num_attention_heads"] if is_27b else head_size(config)
    )
    if config["query_pre_attn_scalar"] != expected:
        yield "query_pre_attn_scalar other than the head size"


def head_size(config: Settings) -> int:
    """Returns the number of dimensions of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_settings(config: Settings) -> tuple[Settings, Settings]:
    """Returns the RoPE settings of layers with full attention, and those of sliding layers."""
    rope: Settings = config["rope_parameters"]
    return (rope[_FULL], rope[_SLIDING]) if _FULL in rope else (rope, {})


def hyperparameters(config: Settings) -> dict[str, Value]:
    """Returns a model's hyperparameters by their GGUF keys, such as `llama.block_count`."""
    rope, local = rope_settings(config)
    size = head_size(config)
    values: dict[str, Value] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": size,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if local:
        values["rope.freq_base_swa"] = float(local["rope_theta"])
        values["attention.sliding_window"] = config["sliding_window"]
    if rope.get("rope_type") == "linear":
        values["rope.scaling.type"] = "linear"
        values["rope.scaling.factor"] = float(rope["factor"])
    architecture = ARCHITECTURES[config["model_type"]]
    return {f"{architecture}.{key}": value for key, value in values.items()}
