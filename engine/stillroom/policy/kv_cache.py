"""A key/value cache with one slot per sequence, each written at its own position.

transformers' own caches append to all rows at once, so their rows have one length. Here a row's
position and mask are always given to the model (decode.py), and a slot's tokens stay where they are
while other sequences join and leave.

Shapes: S slots, B rows of the present forward pass, K key/value heads, C capacity in tokens,
D head size, n new tokens of each row, T tokens that are attended to.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

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
    """The slots that are run along without a token of theirs, [F]; None: there is none."""
    idle_B: Tensor | None = None
    """Whether each row is run along without a token of its own, [B]: what a graph is given instead
    of `fillers_F`, since it has as many numbers whichever rows those are."""


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer."""

    is_sliding = False

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.plan: ForwardPlan | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Sets the sizes and the number format to those of the first keys and values."""
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
