"""Forward passes one row at a time over transformers' own caches, for models of any kind.

It is slower than `SlotPasses`, and right wherever transformers' own step-by-step sampling is.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stillroom.models.heads import OutputHead
from stillroom.models.placement import base_model, body_of, input_device
from stillroom.policy.passes import cache_parameter


class _RowCaches:
    """The cache of each slot's row, which only its own row can use."""

    def __init__(self) -> None:
        self.caches: dict[int, Any] = {}

    def copy_tokens(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Moves a row to another slot."""
        for target in targets:
            self.caches[target] = self.caches.pop(source, None)


class PlainPasses:
    """Runs each row of a pass alone."""

    can_copy = can_fill = is_recurrent = False
    can_continue = True

    def __init__(self, model: Any, *, keeps_cache: bool) -> None:
        """`keeps_cache`: whether rows keep their caches; else all their tokens run each time."""
        self.cache = _RowCaches()
        self._keeps_cache = keeps_cache
        self._head = OutputHead(model)
        self._body = body_of(model)
        self._device = input_device(base_model(model))
        parameters = inspect.signature(self._body.forward).parameters
        self._cache_name = cache_parameter(parameters)
        self._takes_positions = "position_ids" in parameters

    def logits(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        new_tokens: Sequence[Sequence[int] | None],
    ) -> Tensor:
        """Returns the logits after each row's last new token, [B, V]."""
        rows = zip(slots, starts, new_tokens, strict=True)
        hidden = [self._last_hidden(slot, start, new or []) for slot, start, new in rows]
        return self._head.logits(torch.stack(hidden))

    def _last_hidden(self, slot: int, start: int, new: Sequence[int]) -> Tensor:
        caches = self.cache.caches
        if start == 0:
            caches.pop(slot, None)
        if not self._keeps_cache:
            # The slot's cache is the tokens themselves.
            caches[slot] = [*caches.get(slot, []), *new]
            ids_1T = torch.tensor([caches[slot]], device=self._device)
            return self._head.hidden(ids_1T)[0, -1]
        ids_1n = torch.tensor([list(new)], device=self._device)
        inputs: dict[str, Any] = {"input_ids": ids_1n, "use_cache": True}
        inputs[self._cache_name] = caches.get(slot)
        if self._takes_positions:
            # Some models would count a continuation's positions from 0.
            inputs["position_ids"] = torch.arange(start, start + len(new), device=self._device)[
                None
            ]
        output = self._body(**inputs)
        caches[slot] = getattr(output, self._cache_name)
        return output.last_hidden_state[0, -1]
