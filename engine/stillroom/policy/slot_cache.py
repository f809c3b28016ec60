"""The cache of a whole model, with slots in every layer, made from the kinds of its layers."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache

from stillroom.policy.kv_cache import ForwardPlan, SlotLayer
from stillroom.policy.states import SlotStateLayer, StateLayer

AnySlotLayer = SlotLayer | StateLayer

# Keys and values that other layers share are stored once; layers without any never ask.
_PLAIN = {
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    # Of layers that keep nothing; transformers has it since 5.23.
    getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer),
}
_BOTH = {
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
}


class SlotCache(Cache):
    """The slots of every layer of a model."""

    def __init__(self, layers: Sequence[AnySlotLayer]) -> None:
        self._slot_layers = list(layers)
        super().__init__(layers=cast("Any", self._slot_layers))
        self.is_recurrent = any(isinstance(layer, StateLayer) for layer in layers)
        """Whether some layers have states, which a token changes for good."""

    @property
    def capacity(self) -> int:
        """The number of tokens that fit in each slot; keys and values move when it grows."""
        return max(
            (layer.capacity for layer in self._slot_layers if isinstance(layer, SlotLayer)),
            default=0,
        )

    @property
    def token_bytes(self) -> int:
        """The bytes of each token's keys and values in all layers; known after the first pass."""
        each = [
            tensor.nbytes // (tensor.shape[0] * tensor.shape[2])
            for layer in self._slot_layers
            if isinstance(layer, SlotLayer) and layer.is_initialized
            for tensor in (layer.keys, layer.values)
            if tensor is not None and tensor.numel()
        ]
        return sum(each)

    @property
    def state_bytes(self) -> int:
        """The bytes of one slot's states in all layers; known after the first pass."""
        layers = [layer for layer in self._slot_layers if isinstance(layer, StateLayer)]
        return sum(layer.slot_bytes for layer in layers)

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Sets the plan of the next forward pass in every layer."""
        for layer in self._slot_layers:
            layer.begin_pass(plan)

    def end_pass(self, plan: ForwardPlan) -> None:
        """Keeps what the pass has added, in every layer."""
        for layer in self._slot_layers:
            layer.end_pass(plan)

    def copy_tokens(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Copies one slot's first tokens to other slots in every layer.

        Where some layers have states, `num_tokens` must be all tokens that the slot has run.
        """
        if not targets:
            return
        targets_B = torch.tensor(targets)
        for layer in self._slot_layers:
            layer.copy_tokens(source, targets_B, num_tokens)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns a layer's states as MiniMax asks for them; None before a row's first token."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Takes a layer's new states as MiniMax hands them over."""
        self.update_recurrent_state(linear_cache, layer_idx)


def slot_cache(config: Any, *, num_slots: int) -> SlotCache | None:
    """Returns an empty cache for a model; None if a layer of it keeps something unknown."""
    layers: list[AnySlotLayer] = []
    try:
        own_layers: list[Any] = DynamicCache(config=config).layers
    # The configuration may name layers that have no such cache.
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    for layer in own_layers:
        kind = type(layer)
        if kind in _PLAIN:
            layers.append(SlotLayer(num_slots))
        elif kind is cache_utils.LinearAttentionLayer:
            layers.append(StateLayer(num_slots, layer.number_of_states))
        elif kind in _BOTH:
            layers.append(SlotStateLayer(num_slots, layer.number_of_states))
        else:
            return None
    return SlotCache(layers)
