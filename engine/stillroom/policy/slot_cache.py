"""The cache of a model, with one slot for each sequence in every layer.

Attention layers keep keys and values, each sequence at its own position; recurrent layers and short
convolutions keep a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

_GROWTH = 128


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The slots that the next forward pass runs, and the positions that it writes to."""

    slots_B: Tensor
    """The slot of each row, [B] int64."""
    positions_Bn: Tensor
    """The positions of each row's new tokens, [B, n] int64. Rows with fewer tokens are padded on
    the right; the next pass overwrites the padding's keys and values before any token may attend to
    them."""
    num_attended: int
    """The number of tokens attended to, T, which is above every position."""
    is_prefix: bool
    """Whether the rows are the slots 0 … B-1 in order, so that no copy is needed."""
    is_first: bool = False
    """Whether no row has any token in the cache yet."""
    fillers_F: Tensor | None = None
    """The slots that run without a new token, [F]; None if there are none."""
    idle_B: Tensor | None = None
    """Whether each row runs without a new token, [B]. Graphs use it instead of `fillers_F`, since
    its shape does not depend on which rows are idle."""


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer."""

    is_sliding = False

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.plan: ForwardPlan | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Sets the shapes and the dtype to those of the first keys and values."""
        shape = (self.num_slots, key_states.shape[1], 0)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values, [B, K, n, D]; returns all attended ones, [B, K, T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = cast("ForwardPlan", self.plan)
        self.reserve(plan.num_attended)
        keys, values = cast("Tensor", self.keys), cast("Tensor", self.values)
        rows_B1 = plan.slots_B[:, None]
        keys[rows_B1, :, plan.positions_Bn] = key_states.transpose(1, 2)
        values[rows_B1, :, plan.positions_Bn] = value_states.transpose(1, 2)
        size, length = plan.slots_B.shape[0], plan.num_attended
        if plan.is_prefix:
            return keys[:size, :, :length], values[:size, :, :length]
        return keys[plan.slots_B, :, :length], values[plan.slots_B, :, :length]

    @property
    def capacity(self) -> int:
        """The number of tokens that fit in each slot, C; 0 before the first pass."""
        return cast("Tensor", self.keys).shape[2] if self.is_initialized else 0

    def reserve(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens in every slot."""
        keys, values = cast("Tensor", self.keys), cast("Tensor", self.values)
        missing = capacity - keys.shape[2]
        if missing > 0:
            # The cache grows by half at least, so that a growing conversation copies it only a few
            # times.
            extra = -(-max(missing, keys.shape[2] // 2) // _GROWTH) * _GROWTH
            self.keys = torch.nn.functional.pad(keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(values, (0, 0, 0, extra))

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Sets the plan of the next forward pass."""
        self.plan = plan

    def end_pass(self, plan: ForwardPlan) -> None:
        """Does nothing: keys and values were written during the pass."""

    def copy_tokens(self, source: int, targets_B: Tensor, num_tokens: int) -> None:
        """Copies one slot's first tokens to other slots."""
        if self.is_initialized:
            keys, values = cast("Tensor", self.keys), cast("Tensor", self.values)
            # Cloned, because torch refuses to read and write the same memory if num_tokens is the
            # capacity.
            keys[targets_B, :, :num_tokens] = keys[source, :, :num_tokens].clone()
            values[targets_B, :, :num_tokens] = values[source, :, :num_tokens].clone()

    def get_seq_length(self) -> int:
        """Returns 0, which is unused: the model is given positions, and each slot has a length."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1, which means no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of tokens attended to, T, and the offset 0."""
        return cast("ForwardPlan", self.plan).num_attended, 0


_States = dict[int, Tensor | None]


class StateLayer(LinearAttentionLayer):
    """The states of one layer; transformers' own layer holds those of the current pass's rows.

    Models may change a state in place or return a new one. So the rows' states are views of the
    slots if the rows are the first slots, and otherwise copies that are written back after the
    pass.
    """

    def __init__(self, num_slots: int, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.num_slots = num_slots
        # The convolution and the recurrent states of all slots, by index.
        self._slot_states: tuple[_States, _States] = ({}, {})
        # States that the pass must not change: the tensor to restore, and its earlier values.
        self._saved: list[tuple[Tensor, Tensor]] = []

    @property
    def slot_bytes(self) -> int:
        """The size in bytes of one slot's states."""
        slot_states = [
            states for kind in self._slot_states for states in kind.values() if states is not None
        ]
        return sum(states.nbytes // self.num_slots for states in slot_states)

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Loads the states of the plan's rows, [B, ...]; in a first pass rows have none yet."""
        self._saved = []
        for slot_states, row_states, is_initialized in self._kinds():
            for index in range(self.number_of_states):
                states = None if plan.is_first else slot_states.get(index)
                is_initialized[index] = states is not None
                if states is None:
                    row_states[index] = None
                    continue
                if plan.fillers_F is not None:
                    self._saved.append((states, states[plan.fillers_F]))
                if plan.idle_B is not None:
                    first = states[: len(plan.slots_B)]
                    self._saved.append((first, first.clone()))
                is_view = plan.is_prefix
                row_states[index] = states[: len(plan.slots_B)] if is_view else states[plan.slots_B]
        has_states = not plan.is_first and any(map(bool, self._slot_states))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), has_states)

    def end_pass(self, plan: ForwardPlan) -> None:
        """Writes the rows' new states to their slots, and restores those of fillers."""
        for slot_states, row_states, _ in self._kinds():
            for index, states in row_states.items():
                if states is None:
                    continue
                slots = slot_states.get(index)
                if slots is None:
                    slots = slot_states[index] = states.new_zeros(self.num_slots, *states.shape[1:])
                if plan.is_first or not plan.is_prefix:
                    slots[plan.slots_B] = states
        for slots, earlier in self._saved:
            if plan.idle_B is None:
                slots[plan.fillers_F] = earlier
            else:
                idle_B = plan.idle_B.view(-1, *[1] * (slots.ndim - 1))
                slots.copy_(torch.where(idle_B, earlier, slots))
        self._saved = []

    def copy_tokens(self, source: int, targets_B: Tensor, num_tokens: int) -> None:
        """Copies one slot's states to other slots; they cover all of its tokens."""
        for slot_states, _, _ in self._kinds():
            for states in slot_states.values():
                if states is not None:
                    states[targets_B] = states[source].clone()

    def _kinds(self) -> tuple[tuple[_States, _States, dict[int, bool]], ...]:
        """Returns each kind's states: of all slots, of a pass's rows, and which of these exist."""
        conv, recurrent = self._slot_states
        return (
            (conv, self.conv_states, self.is_conv_states_initialized),
            (recurrent, self.recurrent_states, self.is_recurrent_states_initialized),
        )


class SlotStateLayer(StateLayer, SlotLayer):
    """A layer with both states and keys and values (Falcon-H1)."""

    def __init__(self, num_slots: int, number_of_states: int) -> None:
        SlotLayer.__init__(self, num_slots)
        StateLayer.__init__(self, num_slots, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Sets the sizes of keys and values (if given by position) or of states (by keyword)."""
        owner = SlotLayer if args else StateLayer
        owner.lazy_initialization(self, *args, **kwargs)

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Sets the plan of the next forward pass, and loads the states of its rows."""
        SlotLayer.begin_pass(self, plan)
        StateLayer.begin_pass(self, plan)

    def copy_tokens(self, source: int, targets_B: Tensor, num_tokens: int) -> None:
        """Copies one slot's first tokens and its states to other slots."""
        SlotLayer.copy_tokens(self, source, targets_B, num_tokens)
        StateLayer.copy_tokens(self, source, targets_B, num_tokens)


AnySlotLayer = SlotLayer | StateLayer

# Layers with keys and values only, or with nothing to cache; shared ones are stored once.
_KEY_VALUE_LAYERS = {
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    # For layers that store nothing; in transformers since 5.23.
    getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer),
}
_HYBRID_LAYERS = {
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
}


class SlotCache(Cache):
    """The slots of every layer of a model."""

    def __init__(self, layers: Sequence[AnySlotLayer]) -> None:
        self._slot_layers = list(layers)
        super().__init__(layers=cast("Any", self._slot_layers))
        self.is_recurrent = any(isinstance(layer, StateLayer) for layer in layers)
        """Whether some layers have states, which a token changes irreversibly."""

    @property
    def capacity(self) -> int:
        """The number of tokens that fit in each slot; keys and values move when it grows."""
        return max(
            (layer.capacity for layer in self._slot_layers if isinstance(layer, SlotLayer)),
            default=0,
        )

    @property
    def token_bytes(self) -> int:
        """The size in bytes of a token's keys and values in all layers; 0 before the first pass."""
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
        """The size in bytes of one slot's states in all layers; 0 before the first pass."""
        layers = [layer for layer in self._slot_layers if isinstance(layer, StateLayer)]
        return sum(layer.slot_bytes for layer in layers)

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Sets the plan of the next forward pass in every layer."""
        for layer in self._slot_layers:
            layer.begin_pass(plan)

    def end_pass(self, plan: ForwardPlan) -> None:
        """Ends the pass in every layer, keeping its tokens."""
        for layer in self._slot_layers:
            layer.end_pass(plan)

    def copy_tokens(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Copies one slot's first tokens to other slots in every layer.

        Where some layers have states, `num_tokens` must be the number of all the slot's tokens.
        """
        if not targets:
            return
        targets_B = torch.tensor(targets)
        for layer in self._slot_layers:
            layer.copy_tokens(source, targets_B, num_tokens)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns a layer's states for MiniMax's interface; None before a row's first token."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Sets a layer's states for MiniMax's interface."""
        self.update_recurrent_state(linear_cache, layer_idx)


def new_slot_cache(config: Any, *, num_slots: int) -> SlotCache | None:
    """Returns an empty cache for a model; None if a layer has a cache of an unsupported kind."""
    layers: list[AnySlotLayer] = []
    try:
        model_layers: list[Any] = DynamicCache(config=config).layers
    # The configuration may name layers that have no such cache.
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    for layer in model_layers:
        kind = type(layer)
        if kind in _KEY_VALUE_LAYERS:
            layers.append(SlotLayer(num_slots))
        elif kind is cache_utils.LinearAttentionLayer:
            layers.append(StateLayer(num_slots, layer.number_of_states))
        elif kind in _HYBRID_LAYERS:
            layers.append(SlotStateLayer(num_slots, layer.number_of_states))
        else:
            return None
    return SlotCache(layers)
