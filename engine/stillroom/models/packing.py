"""Runs many sequences in one row; each attends only to itself, and shared prefixes are run once.

A pack is a row of spans. A span attends to itself and to the spans that it follows, and several
spans may follow the same one: the prefix that their sequences share. No mask of the whole row, of
T × T numbers, is ever formed; every span has an attention call of its own.
Shapes: T tokens of the row, h heads, d size of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "stillroom_packed"

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class PackSpan:
    """Tokens of a pack that stand together, and the indices of the earlier spans they follow."""

    length: int
    before: tuple[int, ...] = ()


@dataclass(slots=True)
class Pack:
    """The spans of a row, with the masks of their attention: each is formed once for all layers."""

    spans: Sequence[PackSpan]
    _masks: dict[tuple[int, int, int], Tensor] = field(
        default_factory=dict[tuple[int, int, int], Tensor]
    )

    @property
    def lengths(self) -> list[int]:
        """The spans' lengths, in their order."""
        return [span.length for span in self.spans]

    def mask(self, num_new: int, num_before: int, window: int, like: Tensor) -> Tensor:
        """Returns the attention mask of a span of `num_new` tokens that follow `num_before` others.

        The mask is added to the attention's scores: 0 or -inf, [num_new, num_before + num_new].
        """
        key = (num_new, num_before, window)
        if key not in self._masks:
            queries = torch.arange(num_before, num_before + num_new, device=like.device)[:, None]
            keys = torch.arange(num_before + num_new, device=like.device)
            seen = (keys <= queries) & (keys > queries - window)
            mask = torch.zeros(num_new, num_before + num_new, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~seen, float("-inf"))
        return self._masks[key]


def allow_packing(model: Any) -> bool:
    """Lets the model run packs and returns True, unless its attention is of another kind.

    Other passes go on as before. `models.probe` finds out whether packs change its logits.
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
    """Returns the inputs that the model's body needs for a pack beside its token ids."""
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
    """Returns the attention of a pack, span by span, [1, T, h, d]; else that of transformers."""
    if stillroom_pack is None:
        return sdpa_attention_forward(
            module, query_1hTd, key_1hTd, value_1hTd, attention_mask,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    # split instead of slices, as the gradient of a slice is a row of zeros as long as the whole
    # pack.
    lengths = stillroom_pack.lengths
    parts = [tensor.split(lengths, dim=2) for tensor in (query_1hTd, key_1hTd, value_1hTd)]
    attended: list[Tensor] = []
    for index, span in enumerate(stillroom_pack.spans):
        query, key, value = (part[index] for part in parts)
        if span.before:
            seen = (*span.before, index)
            key, value = (torch.cat([part[i] for i in seen], dim=2) for part in parts[1:])
        total = key.shape[2]
        num_before = total - span.length
        window = min(sliding_window or total, total)
        is_plain = num_before == 0 and window == total
        output = F.scaled_dot_product_attention(
            query, key, value,
            attn_mask=None if is_plain else stillroom_pack.mask(
                span.length, num_before, window, query
            ),
            is_causal=is_plain, scale=kwargs.get("scaling"), dropout_p=kwargs.get("dropout", 0.0),
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        attended.append(output.transpose(1, 2))
    return torch.cat(attended, dim=1), None


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
