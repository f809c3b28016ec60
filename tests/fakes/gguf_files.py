"""GGUF files of tiny models, written with gguf-py in the layout of llama.cpp's own converter."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from stillroom.models.load import LoadedModel

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_A_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_IN_A_GEMMA_LAYER = {
    **_IN_A_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    loaded: LoadedModel,
    *,
    quantized: gguf.GGMLQuantizationType | None = None,
    turn_end: str | None = None,
    changes: dict[str, Any] | None = None,
    extra_tensors: dict[str, Any] | None = None,
) -> Path:
    """Writes a model's file: F32, or with quantised matrices; `changes` replace metadata."""
    config: Any = loaded.model.config
    kind = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, kind)
    values = {**_metadata(config, kind), **(changes or {})}
    for key, value in values.items():
        _add(writer, key, value)
    _add_tokenizer(writer, loaded, values, turn_end)
    for name, data in _tensors(loaded.model, config, kind):
        is_matrix = data.ndim == 2 and data.shape[1] % 32 == 0
        if quantized is not None and is_matrix:
            writer.add_tensor(name, gguf.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, data)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_uint32(key, value)


def _metadata(config: Any, kind: str) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters
    theta = theta.get("full_attention", theta)["rope_theta"]
    values: dict[str, Any] = {
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": float(theta),
        "general.name": "Tiny",
        "general.license": "mit",
    }
    if kind == "llama":
        return {**values, "llama.rope.dimension_count": head_dim}
    lengths = {f"{kind}.attention.{n}_length": head_dim for n in ("key", "value")}
    if kind == "gemma3":
        lengths["gemma3.attention.sliding_window"] = config.sliding_window
    return {**values, **lengths}


def _add_tokenizer(
    writer: gguf.GGUFWriter, loaded: LoadedModel, values: dict[str, Any], turn_end: str | None
) -> None:
    tokenizer = loaded.tokenizer
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    is_gemma = loaded.model.config.model_type.startswith("gemma")
    if "tokenizer.ggml.model" not in values:
        writer.add_tokenizer_model("llama" if is_gemma else "gpt2")
    if "tokenizer.ggml.pre" not in values:
        writer.add_tokenizer_pre("default" if is_gemma else "gpt-2")
    numbers = sorted(by_id)
    writer.add_token_list([by_id[number] for number in numbers])
    kinds = [_kind_of(added.get(number)) for number in numbers]
    writer.add_token_types(kinds)
    if is_gemma:
        writer.add_token_scores([-float(number) for number in numbers])
        writer.add_unk_token_id(tokenizer.convert_tokens_to_ids("<unk>"))
    else:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if "tokenizer.ggml.add_bos_token" not in values:
        writer.add_add_bos_token(False)
    if turn_end is not None:
        writer.add_eot_token_id(tokenizer.convert_tokens_to_ids(turn_end))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _kind_of(added: Any) -> gguf.TokenType:
    if added is None:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED


def _tensors(model: Any, config: Any, kind: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields llama.cpp's name and numbers of each weight, as its converter writes them."""
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    inside = _IN_A_GEMMA_LAYER if kind == "gemma3" else _IN_A_LAYER
    heads = {
        "attn_q.weight": config.num_attention_heads,
        "attn_k.weight": config.num_key_value_heads,
    }
    for name, weight in model.state_dict().items():
        data = weight.detach().float().numpy().copy()
        if name in _TOP:
            stored = _TOP[name]
            if stored == "output.weight" and is_tied:
                continue
        else:
            _, _, number, rest = name.split(".", 3)
            part, _, ending = rest.rpartition(".")
            stored = f"blk.{number}.{inside[part]}.{ending}"
            if kind == "llama" and (num_heads := heads.get(stored.split(".", 2)[2])):
                data = _interleaved(data, num_heads)
        if kind == "gemma3" and "norm" in stored:
            data = data + 1
        yield stored, data


def _interleaved(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns a projection with each head's halves interleaved, as llama.cpp rotates them."""
    half = data.shape[0] // num_heads // 2
    return data.reshape(num_heads, 2, half, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
