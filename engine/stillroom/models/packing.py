"""Lets a model run packs: rows of many sequences, each of which attends only to itself.

Shapes: T tokens of the row, h heads, d size of a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stillroom.models.kernels import Pack, attend

PACKED_ATTENTION = "stillroom_packed"

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def allow_packing(model: Any) -> bool:
    """Lets the model run packs and returns True, unless its attention is of another kind.

    Other passes are unchanged. `models.probe` finds out whether packs change its logits.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attn_logit_softcapping", None) is not None or not kinds <= _KNOWN_LAYERS:
        return False
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(PACKED_ATTENTION)
    return model.config._attn_implementation == PACKED_ATTENTION


def forbid_packing(model: Any) -> None:
    """Takes back `allow_packing`."""
    model.set_attn_implementation("sdpa")


def packed_inputs(pack: Pack, positions_1T: Tensor) -> dict[str, Any]:
    """Returns the inputs that the model's body needs for a pack, next to its token ids."""
    # transformers forms a causal mask of T × T numbers itself, unless it is given one of four
    # dimensions, which it hands on as it is. The attention of a pack never looks at it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=positions_1T.device)
    return {
        "position_ids": positions_1T,
        "attention_mask": no_mask,
        "use_cache": False,
        "stillroom_pack": pack,
    }


def _attention(
    module: Any,
    query_1hTd: Tensor,
    key_1hTd: Tensor,
    value_1hTd: Tensor,
    attention_mask: Tensor | None,
    *,
    stillroom_pack: Pack | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of a pack, [1, T, h, d]; without one, what transformers returns."""
    if stillroom_pack is None:
        return sdpa_attention_forward(
            module, query_1hTd, key_1hTd, value_1hTd, attention_mask,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    output_1Thd = attend(
        stillroom_pack, query_1hTd, key_1hTd, value_1hTd,
        window=sliding_window, scale=kwargs.get("scaling"), dropout=kwargs.get("dropout", 0.0),
    )  # fmt: skip
    return output_1Thd, None


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
