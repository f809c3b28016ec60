"""Rotary embeddings and query scales that depend on the length of the forward pass.

Longrope (Phi-3, Phi-4-mini) has one set of frequencies for passes within the original context and
another for longer ones; dynamic NTK (some Llamas) has different frequencies for each longer
length. A sequence that shares a pass with one of another length class would get the wrong ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_PATCHED_MARK = "stillroom_resets_frequencies"


@dataclass(frozen=True, slots=True)
class RopeBoundary:
    """A pass length beyond which the rotary frequencies change."""

    original: int
    """The maximum length of a pass that uses the original frequencies."""
    is_per_length: bool = False
    """Whether each longer length has its own frequencies (dynamic NTK), instead of one set."""

    def length_class(self, length: int) -> int:
        """Returns a number that is equal for two lengths with the same frequencies."""
        if length <= self.original:
            return 0
        return length if self.is_per_length else 1


def rope_boundaries(config: Any) -> tuple[RopeBoundary, ...]:
    """Returns the boundaries in a model's configuration; () for almost every model."""
    text = config.get_text_config()
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    # A model with frequencies per layer type has a dictionary for each type.
    parameter_sets = [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]
    return tuple(dict.fromkeys(_boundaries(text, parameter_sets)))


def length_class(boundaries: Iterable[RopeBoundary], length: int) -> tuple[int, ...]:
    """Returns a key that is equal for lengths that may share a pass."""
    return tuple(boundary.length_class(length) for boundary in boundaries)


def reset_dynamic_frequencies(body: nn.Module) -> None:
    """Resets dynamic NTK frequencies before each pass, so that passes are independent.

    transformers keeps the frequencies of the longest pass so far until a pass within the original
    context.
    """
    for module in body.modules():
        types: Any = getattr(module, "rope_type", None)
        names = types.values() if isinstance(types, Mapping) else [types]
        if any("dynamic" in str(name) for name in names) and not hasattr(module, _PATCHED_MARK):
            module.register_forward_pre_hook(_reset_frequencies)
            setattr(module, _PATCHED_MARK, True)


def scale_by_positions(body: nn.Module) -> None:
    """Makes layers that scale queries by position (Llama 4) use the given position ids.

    transformers counts the tokens before a pass instead, which is wrong for rows at different
    positions, and for the second sequence of a pack.
    """
    for layer in body.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            layer.register_forward_pre_hook(_keep_positions, with_kwargs=True)
            attention.q_proj.register_forward_hook(partial(_scale_queries, attention))


def _keep_positions(layer: Any, _inputs: Any, options: Mapping[str, Any]) -> None:
    """Stores a pass's position ids on the attention module, for `_scale_queries`."""
    layer.self_attn.positions_BT = options["position_ids"]


def _scale_queries(attention: Any, _module: Any, _inputs: Any, query_BTH: Tensor) -> Tensor:
    """Returns a pass's queries, each multiplied by the scale of its position.

    Source: transformers' Llama4TextAttention; arXiv 2501.19399.
    """
    steps_BT = torch.floor((attention.positions_BT.float() + 1.0) / attention.floor_scale)
    factor_BT = torch.log1p(steps_BT) * attention.attn_scale + 1.0
    return (query_BTH * factor_BT[..., None]).to(query_BTH.dtype)


def _boundaries(text: Any, parameter_sets: Iterable[Mapping[str, Any]]) -> Iterable[RopeBoundary]:
    """Yields the boundary of each set of RoPE parameters that has one."""
    for parameters in parameter_sets:
        kind = str(parameters.get("rope_type", parameters.get("type", "")))
        if "dynamic" in kind:
            # transformers reads the original context of dynamic frequencies here.
            yield RopeBoundary(int(text.max_position_embeddings), is_per_length=True)
        elif kind == "longrope" or "long_mscale" in parameters:
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            yield RopeBoundary(int(original or text.max_position_embeddings))


def _reset_frequencies(module: nn.Module, _inputs: Any) -> None:
    """Restores the frequencies of the original context in a rotary embedding module."""
    for name in [name for name in dir(module) if name.endswith("original_inv_freq")]:
        current = name.replace("original_inv_freq", "inv_freq")
        original: Any = getattr(module, name)
        setattr(module, current, original.to(getattr(module, current).device))
        longest = name.replace("original_inv_freq", "max_seq_len_cached")
        setattr(module, longest, module.original_max_seq_len)
