"""Many sequences in one row: attention stays within each, and what they share is computed once.

A pack is a row of spans. A span attends to itself and to the spans it follows, which other spans
may follow too: the beginning that several sequences have in common. No mask of the whole row is
ever formed; every span has an attention call of its own.
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
_PROBE = (7, 19, 30)
# Of the largest hidden state: rounding, where another sequence's tokens would change it altogether.
_TOLERANCE = {torch.float32: 1e-3}
_SHORT_TOLERANCE = 8e-2


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of the row that stand together, and the earlier spans that they follow."""

    length: int
    before: tuple[int, ...] = ()


@dataclass(slots=True)
class Pack:
    """The spans of a row, and the masks their attention needs, each formed once for all layers."""

    spans: Sequence[Span]
    _masks: dict[tuple[int, int, int], Tensor] = field(
        default_factory=dict[tuple[int, int, int], Tensor]
    )

    @property
    def lengths(self) -> list[int]:
        """The spans' lengths, in their order."""
        return [span.length for span in self.spans]

    def mask(self, own: int, given: int, window: int, like: Tensor) -> Tensor:
        """Returns what `own` tokens after `given` ones attend to, as numbers that are added."""
        key = (own, given, window)
        if key not in self._masks:
            queries = torch.arange(given, given + own, device=like.device)[:, None]
            keys = torch.arange(given + own, device=like.device)
            seen = (keys <= queries) & (keys > queries - window)
            mask = torch.zeros(own, given + own, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~seen, float("-inf"))
        return self._masks[key]


def allow_packing(model: Any) -> bool:
    """Lets the model run packs, if it can; other passes go on as before.

    A model that can't (attention of another kind, or a pack that changes what it computes) is left
    as it is.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if model.config._attn_implementation != "sdpa" or not kinds <= _KNOWN_LAYERS:
        return False
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return False
    model.set_attn_implementation(PACKED_ATTENTION)
    if _is_true_to_single_passes(model):
        return True
    model.set_attn_implementation("sdpa")
    return False


def can_pack(model: Any) -> bool:
    """Whether the model runs packs."""
    return model.config._attn_implementation == PACKED_ATTENTION


def packed_inputs(pack: Pack, positions_1T: Tensor) -> dict[str, Any]:
    """Returns the body's inputs beside the ids."""
    # A mask with four dimensions is taken as given; the attention of a pack never looks at it.
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
    **more: Any,
) -> tuple[Tensor, None]:
    """Attends span by span; without a pack as transformers does. Returns [1, T, h, d]."""
    if stillroom_pack is None:
        return sdpa_attention_forward(
            module, query_1hTd, key_1hTd, value_1hTd, attention_mask,
            sliding_window=sliding_window, **more,
        )  # fmt: skip
    # split, not slices: the gradient of a slice is a row of zeros as long as the whole pack.
    lengths = stillroom_pack.lengths
    parts = [tensor.split(lengths, dim=2) for tensor in (query_1hTd, key_1hTd, value_1hTd)]
    attended: list[Tensor] = []
    for index, span in enumerate(stillroom_pack.spans):
        query, key, value = (part[index] for part in parts)
        if span.before:
            seen_by = (*span.before, index)
            key, value = (torch.cat([p[i] for i in seen_by], dim=2) for p in parts[1:])
        total = key.shape[2]
        given = total - span.length
        window = min(sliding_window or total, total)
        is_plain = given == 0 and window == total
        output = F.scaled_dot_product_attention(
            query, key, value,
            attn_mask=None if is_plain else stillroom_pack.mask(span.length, given, window, query),
            is_causal=is_plain, scale=more.get("scaling"), dropout_p=more.get("dropout", 0.0),
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        attended.append(output.transpose(1, 2))
    return torch.cat(attended, dim=1), None


@torch.no_grad()
def _is_true_to_single_passes(model: Any) -> bool:
    """Whether a small pack gives every sequence the hidden states that it has alone."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    trunk, *leaves = _PROBE
    ids_T = (torch.arange(sum(_PROBE), device=model.device) * 37 + 11) % vocabulary
    starts = [trunk, trunk + leaves[0]]
    singles = [
        torch.cat([ids_T[:trunk], ids_T[start : start + length]])
        for start, length in zip(starts, leaves, strict=True)
    ]
    positions = [*range(trunk), *(trunk + i for length in leaves for i in range(length))]
    positions_1T = torch.tensor([positions], device=model.device)
    pack = Pack([Span(trunk), *(Span(length, before=(0,)) for length in leaves)])
    body, was_training = model.get_decoder(), model.training
    model.eval()
    try:
        packed = body(input_ids=ids_T[None], **packed_inputs(pack, positions_1T))
        alone = [body(input_ids=ids[None], use_cache=False) for ids in singles]
    # A body that knows nothing of packs, or whose layers don't hand them on, says so in many ways.
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    finally:
        model.train(was_training)
    expected = torch.cat(
        [alone[0].last_hidden_state[0], alone[1].last_hidden_state[0, trunk:]]
    ).float()
    gap = (packed.last_hidden_state[0].float() - expected).abs().max().item()
    tolerance = _TOLERANCE.get(model.dtype, _SHORT_TOLERANCE)
    return gap <= tolerance * expected.abs().max().item()


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
