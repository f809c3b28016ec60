"""Makes a small copy of a model: a few narrow layers of every type, with random weights.

The copy runs the same code as the model, and its windows, chunks and original context are so short
that a few dozen tokens cross all of them.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from stillroom.models.placement import base_model, body_of

LONGEST_BOUNDARY = 64
"""The longest boundary of a copy in tokens: a chunk of the gated delta rule, which is fixed."""

_WINDOW, _CHUNK, _CONTEXT = 8, 16, 24
_VOCABULARY, _WIDTH, _INNER, _HEADS, _HEAD_SIZE = 128, 64, 32, 4, 16
# The largest number of parameters that a copy may have.
_MAX_PARAMETERS = 250_000_000
_MAMBA_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
    ("num_heads", "head_dim", "n_groups"),
)
"""The setting names of a Mamba layer's number of heads, head size and number of groups."""
_MAX_VALUES = {
    "linear_num_heads": _HEADS,
    "linear_num_key_heads": _HEADS // 2,
    "linear_num_value_heads": _HEADS,
    "index_n_heads": _HEADS,
    "linear_head_dim": _HEAD_SIZE,
    "linear_key_head_dim": _HEAD_SIZE,
    "linear_value_head_dim": _HEAD_SIZE,
    "q_lora_rank": _INNER,
    "kv_lora_rank": _INNER,
}
"""The copy's maximum values of settings that do not depend on others."""
_BOUNDARIES = {
    "sliding_window": _WINDOW,
    "attention_window_size": _WINDOW,
    "index_topk": _WINDOW,
    "keep_window_size": _WINDOW,
    "attention_chunk_size": _CHUNK,
    "original_max_position_embeddings": _CONTEXT,
    "mamba_chunk_size": _CHUNK,
    "chunk_size": _CHUNK,
    "block_size": _CHUNK,
}


def small_configs(model: Any) -> list[str]:
    """Returns configurations of a copy as JSON, smallest first; some may fail to build."""
    text: Any = base_model(model).config.get_text_config()
    total = int(text.num_hidden_layers)
    cut = _lower_boundaries(_cut_to_layers(text.to_dict(), total, _num_leading_layers(model, text)))
    narrow = _narrow_layers(cut, text)
    candidates = (_reduce_heads(narrow), narrow, cut)
    return [json.dumps(config, sort_keys=True) for config in candidates]


def build_copy(config_class: type[PreTrainedConfig], config: str) -> Any:
    """Returns a model of this configuration with random weights on the CPU; None if too large.

    Errors of the model's own code are raised. The random state is left unchanged.
    """
    copied = config_class.from_dict(json.loads(config))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copied).parameters())
    if size > _MAX_PARAMETERS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copied, dtype=torch.float32).eval()


def _num_leading_layers(model: Any, text: Any) -> int:
    """Returns the number of leading layers that cover every layer type of the model."""
    total = int(text.num_hidden_layers)
    stacks = [m for m in body_of(model).modules() if isinstance(m, nn.ModuleList)]
    layers = next((stack for stack in stacks if len(stack) == total), None)
    if layers is None:
        return total
    kinds: Any = getattr(text, "layer_types", None) or [""] * total
    seen: dict[Any, int] = {}
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        parts = frozenset(type(module).__name__ for module in layer.modules())
        seen.setdefault((kind, parts), index)
    num = max(2, max(seen.values()) + 1)
    # The last layers may share keys and values with earlier ones.
    return min(total, 2 * num if getattr(text, "num_kv_shared_layers", 0) else num)


def _cut_to_layers(config: dict[str, Any], total: int, num: int) -> dict[str, Any]:
    """Returns the configuration with the first `num` layers, per-layer lists included."""

    def cut_off(value: Any) -> Any:
        if isinstance(value, list) and len(value) == total:
            return value[:num]
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            return {key: inner for key, inner in value.items() if int(key) < num}
        return value

    cut = {name: cut_off(value) for name, value in config.items()}
    cut["num_hidden_layers"] = num
    if config.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"] = num // 2
    return cut


def _lower_boundaries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with every boundary lowered to a few dozen tokens."""

    def lowered(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lowered(key, inner) for key, inner in value.items()}
        low = _BOUNDARIES.get(name)
        return low if low is not None and isinstance(value, int) and value > low else value

    result = {name: lowered(name, value) for name, value in config.items()}
    if "dynamic" in json.dumps(result.get("rope_parameters")):
        result["max_position_embeddings"] = _CONTEXT
    return result


def _narrow_layers(config: Mapping[str, Any], text: Any) -> dict[str, Any]:
    """Returns the configuration with narrow layers, a small vocabulary and larger random weights.

    The number and size of heads are unchanged, since other settings depend on them.
    """
    narrow = dict(config)
    heads = getattr(text, "num_attention_heads", None)
    if heads and not narrow.get("head_dim") and "kv_lora_rank" not in narrow:
        narrow["head_dim"] = text.hidden_size // heads
    narrow["hidden_size"] = min(_WIDTH, text.hidden_size)
    for name in [name for name in narrow if name.endswith("intermediate_size")]:
        narrow[name] = _cap(narrow[name], _INNER)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if name in narrow:
            narrow[name] = _cap(narrow[name], _VOCABULARY)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        narrow[name] = None
    # Large enough that attention to a token shows in the logits.
    narrow["initializer_range"] = 0.2
    return narrow


def _reduce_heads(narrow: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the narrow configuration with few heads; attention heads keep their size.

    Some families need other settings adapted to the number of heads.
    """
    few = dict(narrow)
    heads, kv_heads = few.get("num_attention_heads"), few.get("num_key_value_heads")
    if heads:
        few["num_attention_heads"] = min(_HEADS, heads)
    if kv_heads:
        few["num_key_value_heads"] = min(_HEADS if kv_heads == heads else _HEADS // 2, kv_heads)
    few |= {name: _cap(few[name], limit) for name, limit in _MAX_VALUES.items() if name in few}
    inner = int(few.get("mamba_expand") or few.get("expand") or 2) * int(few["hidden_size"])
    for num_heads, head_size, num_groups in _MAMBA_HEADS:
        if few.get(num_heads):
            few |= {num_heads: _HEADS, head_size: inner // _HEADS, num_groups: 1}
    if few.get("mamba_d_ssm"):
        few["mamba_d_ssm"] = inner
    if few.get("attention_hidden_size"):  # Zamba 2
        few |= {"attention_hidden_size": inner, "attention_head_dim": inner // _HEADS}
    return few


def _cap(value: Any, limit: int) -> Any:
    """Returns a number, or each number of a list, reduced to `limit`; other values unchanged."""
    if isinstance(value, list):
        return [_cap(item, limit) for item in value]
    return min(value, limit) if isinstance(value, int) else value
