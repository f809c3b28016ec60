"""The states of recurrent layers and short convolutions, one for each slot of the cache.

Keys and values grow with a sequence, and any prefix of them can be used. A state has one size and
holds the sequence up to its last token only: it cannot be cut back, and every token that a layer
runs changes it, padding too.

Shapes: S slots, B rows of the present forward pass, F fillers among them.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from stillroom.policy.kv_cache import ForwardPlan, SlotLayer

_States = dict[int, Tensor | None]


class StateLayer(LinearAttentionLayer):
    """The states of one layer: transformers' own layer, with the states of a pass's rows in it.

    Models change a state in place, or hand in a new one, as they like. So the rows' states are
    views of the slots where the rows are the first slots, and copies that are written back after
    the pass where they are not.
    """

    def __init__(self, num_slots: int, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.num_slots = num_slots
        self._held: tuple[_States, _States] = ({}, {})
        self._saved: list[tuple[Tensor, Tensor]] = []

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot's states."""
        held = [states for kind in self._held for states in kind.values() if states is not None]
        return sum(states.nbytes // self.num_slots for states in held)

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Puts the states of the plan's rows in place, [B, ...]; first rows have none yet."""
        self._saved = []
        for held, rows, is_initialized in self._kinds():
            for index in range(self.number_of_states):
                states = None if plan.is_first else held.get(index)
                is_initialized[index] = states is not None
                if states is None:
                    rows[index] = None
                    continue
                if plan.fillers_F is not None:
                    self._saved.append((states, states[plan.fillers_F]))
                if plan.idle_B is not None:
                    first = states[: len(plan.slots_B)]
                    self._saved.append((first, first.clone()))
                is_view = plan.is_prefix
                rows[index] = states[: len(plan.slots_B)] if is_view else states[plan.slots_B]
        has_states = not plan.is_first and any(map(bool, self._held))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), has_states)

    def end_pass(self, plan: ForwardPlan) -> None:
        """Writes the rows' new states to their slots, and gives fillers their old ones back."""
        for held, rows, _ in self._kinds():
            for index, states in rows.items():
                if states is None:
                    continue
                slots = held.get(index)
                if slots is None:
                    slots = held[index] = states.new_zeros(self.num_slots, *states.shape[1:])
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
        """Copies one slot's states to other slots; they hold all tokens that the slot has run."""
        for held, _, _ in self._kinds():
            for states in held.values():
                if states is not None:
                    states[targets_B] = states[source].clone()

    def _kinds(self) -> tuple[tuple[_States, _States, dict[int, bool]], ...]:
        """Returns each kind's states of all slots and of the rows, and which of them exist."""
        convolved, recurrent = self._held
        return (
            (convolved, self.conv_states, self.is_conv_states_initialized),
            (recurrent, self.recurrent_states, self.is_recurrent_states_initialized),
        )


class SlotStateLayer(StateLayer, SlotLayer):
    """A layer with both states and keys and values (Falcon-H1)."""

    def __init__(self, num_slots: int, number_of_states: int) -> None:
        SlotLayer.__init__(self, num_slots)
        StateLayer.__init__(self, num_slots, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Sets the sizes of keys and values, given by place, or of states, given by name."""
        owner = SlotLayer if args else StateLayer
        owner.lazy_initialization(self, *args, **kwargs)

    def begin_pass(self, plan: ForwardPlan) -> None:
        """Sets the plan of the next forward pass, and puts the states of its rows in place."""
        SlotLayer.begin_pass(self, plan)
        StateLayer.begin_pass(self, plan)

    def copy_tokens(self, source: int, targets_B: Tensor, num_tokens: int) -> None:
        """Copies one slot's first tokens and its states to other slots."""
        SlotLayer.copy_tokens(self, source, targets_B, num_tokens)
        StateLayer.copy_tokens(self, source, targets_B, num_tokens)
