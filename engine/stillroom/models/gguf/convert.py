"""Writes a GGUF file's model as a Hugging Face folder: configuration, weights and tokenizer.

transformers can load such files too, but it replaces sizes that the file states with defaults, and
silently leaves out weights.
"""

import contextlib
import errno
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from stillroom.errors import ModelError
from stillroom.models.gguf.header import HF_FORMAT_FIX, GgufHeader, StoredTensor, read_header
from stillroom.models.gguf.tokenizer import build_tokenizer, check_saved_tokenizer, special_ids

_DTYPES = {"F32": torch.float32, "F16": torch.float16}
"""The dtype of the converted weights by `number_format`; bf16 for all other formats."""
_SPARE_BYTES = 64 << 20
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The names of weights in llama.cpp, each with its name in transformers: outside of layers, in a
layer, and in a layer of Gemma."""
_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}
_ROPE_FACTORS = "rope_freqs.weight"
# The RoPE scaling of Llama 3.1 and later; only the factor differs between model sizes.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 16.0, 32.0)
_GEMMA3_27B_LAYERS = 62


def write_folder(path: Path, target: Path) -> None:
    """Writes the model of a GGUF file to the folder `target`, from which transformers loads it.

    Raises ModelError if the file lacks a weight of its model, or has an unknown weight.
    """
    header = read_header(path)
    dtype = _DTYPES.get(header.number_format, torch.bfloat16)
    _require_space(target, header.loaded_bytes())
    transformers.utils.logging.disable_progress_bar()
    # A run must draw the same random numbers whether or not the folder was cached.
    with torch.random.fork_rng(), contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = build_tokenizer(header)
            model = _load(header, dtype)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ModelError(
                f"{path} cannot be converted: {type(error).__name__}: {error}", HF_FORMAT_FIX
            ) from error
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
        check_saved_tokenizer(tokenizer, target, header)


def _load(header: GgufHeader, dtype: torch.dtype) -> Any:
    """Returns the model with the file's weights."""
    config = _config(header)
    # The meta device allocates no weights; the file's weights are assigned below.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = {name: tensor.to(dtype) for name, tensor in _weights(header)}
    report = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    if missing := sorted({*report.missing_keys} - tied):
        raise ModelError(
            f"{header.path} lacks {len(missing)} of its model's weights, e.g. {missing[0]}",
            HF_FORMAT_FIX,
        )
    if unknown := report.unexpected_keys:
        raise ModelError(
            f"{header.path} has {len(unknown)} weights that a {header.architecture} model in "
            f"transformers does not have, e.g. {unknown[0]}",
            HF_FORMAT_FIX,
        )
    special = special_ids(header)
    model.generation_config = GenerationConfig(
        bos_token_id=special.bos, eos_token_id=special.eos, pad_token_id=special.pad
    )
    return model


def _weights(header: GgufHeader) -> Iterator[tuple[str, Tensor]]:
    """Yields each weight with its name and its layout in transformers."""
    kind = header.architecture
    layer_names = _GEMMA_LAYER_NAMES if kind == "gemma3" else _LAYER_NAMES
    heads = {
        "attn_q": header.setting("attention.head_count"),
        "attn_k": header.setting("attention.head_count_kv"),
    }
    for stored, tensor in header.tensors.items():
        if stored == _ROPE_FACTORS:
            continue
        part, _, ending = stored.rpartition(".")
        *layer, part = part.split(".")
        # A weight with an unknown name keeps its name, and is reported as unexpected.
        name = _MODEL_NAMES.get(part) if not layer else layer_names.get(part)
        data = _read_tensor(header, tensor)
        if kind == "llama" and part in heads:
            data = _deinterleave_heads(data, heads[part])
        if kind == "gemma3" and part.endswith("norm"):
            # llama.cpp stores 1 + weight, the factor by which Gemma's norms multiply.
            data -= 1
        prefix = f"model.layers.{layer[1]}." if layer[:1] == ["blk"] else ""
        yield (f"{prefix}{name}.{ending}" if name else stored), data


def _read_tensor(header: GgufHeader, tensor: StoredTensor) -> Tensor:
    """Returns the weights of a tensor in float32, dequantized."""
    import gguf

    start = header.weights_start + tensor.offset
    data = np.fromfile(header.path, np.uint8, count=tensor.num_bytes, offset=start)
    rows = data.reshape(*tensor.shape[:-1], -1)
    kind = gguf.GGMLQuantizationType(tensor.kind)
    floats = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    numbers = rows.view(floats[kind]) if kind in floats else gguf.dequantize(rows, kind)
    return torch.from_numpy(numbers.astype(np.float32))


def _deinterleave_heads(data: Tensor, num_heads: int) -> Tensor:
    """Returns a projection with the halves of each head one after the other, not interleaved."""
    half = data.shape[0] // num_heads // 2
    return data.reshape(num_heads, half, 2, *data.shape[1:]).transpose(1, 2).reshape(data.shape)


def _config(header: GgufHeader) -> Any:
    """Returns the configuration in the file, with llama.cpp's defaults for what it omits."""

    def required(key: str) -> Any:
        if (value := header.setting(key)) is None:
            raise ValueError(f"its metadata has no {header.architecture}.{key}")
        return value

    width, heads = required("embedding_length"), required("attention.head_count")
    head_dim_keys = ("attention.key_length", "rope.dimension_count")
    head_dim = next((n for key in head_dim_keys if (n := header.setting(key))), width // heads)
    special = special_ids(header)
    settings: dict[str, Any] = {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.setting("attention.head_count_kv") or heads,
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
    }
    base = header.setting("rope.freq_base") or 10_000.0
    theta = {"rope_type": "default", "rope_theta": base}
    has_bias = "blk.0.attn_q.bias" in header.tensors
    match header.architecture:
        case "qwen2":
            specific = {"rope_parameters": theta}
        case "gemma3":
            is_largest = required("block_count") == _GEMMA3_27B_LAYERS
            specific = {
                "head_dim": head_dim,
                "sliding_window": required("attention.sliding_window"),
                "query_pre_attn_scalar": width // heads if is_largest else head_dim,
                # Sliding-window layers have their own RoPE base, which GGUF files do not state.
                "rope_parameters": {
                    "full_attention": theta,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            }
        case _:
            specific = {"rope_parameters": theta, "head_dim": head_dim, "attention_bias": has_bias}
    config = _CONFIGS[header.architecture](**settings, **specific)
    if _ROPE_FACTORS in header.tensors:
        _set_llama3_rope(config, header)
    return config


def _set_llama3_rope(config: Any, header: GgufHeader) -> None:
    """Sets the RoPE scaling of Llama 3 that gives the frequency factors in the file."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = _read_tensor(header, header.tensors[_ROPE_FACTORS]).double()
    theta, dimension = config.rope_parameters["rope_theta"], config.head_dim
    unscaled = 1.0 / theta ** (torch.arange(0, dimension, 2, dtype=torch.float64) / dimension)
    for factor in _LLAMA3_FACTORS:
        config.rope_parameters = {"rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if torch.allclose(unscaled / scaled.double(), stored, rtol=1e-3):
            return
    raise ModelError(
        f"{header.path} uses a RoPE scaling that matches no Llama 3 release, so it cannot be "
        "converted",
        HF_FORMAT_FIX,
    )


def _require_space(target: Path, num_bytes: int) -> None:
    """Raises OSError unless the disk of `target` has room for `num_bytes` and a reserve."""
    free, needed = shutil.disk_usage(target).free, num_bytes + _SPARE_BYTES
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the converted model needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            "free",
        )
