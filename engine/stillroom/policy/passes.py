"""Forward passes over the slots of one cache, for rows of unequal lengths.

Shapes: B rows of one forward pass, n new tokens of each, T tokens attended to, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from stillroom.models.lm_head import HeadRunner
from stillroom.models.placement import base_model, body_of, input_device
from stillroom.models.rope import rope_boundaries
from stillroom.policy.mamba import fast_formulas, prepare_mamba
from stillroom.policy.slot_cache import ForwardPlan, SlotCache, new_slot_cache


class CopyableCache(Protocol):
    """A cache whose tokens can be copied from slot to slot."""

    def copy_tokens(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Copies one slot's first tokens to other slots."""
        ...


class Passes(Protocol):
    """Runs a model over the tokens of several slots, and caches the state for later tokens."""

    @property
    def cache(self) -> CopyableCache:
        """The cache of the tokens that were run."""
        ...

    @property
    def can_copy(self) -> bool:
        """Whether a slot's tokens may be copied to another that continues differently."""
        ...

    @property
    def can_fill(self) -> bool:
        """Whether a pass may include rows without a new token, to use the cache in place."""
        ...

    @property
    def can_continue(self) -> bool:
        """Whether one pass may run several tokens after cached ones; else one token at a time."""
        ...

    @property
    def is_recurrent(self) -> bool:
        """Whether the rows of a pass must have the same number of new tokens, without padding.

        A slot's tokens can then be copied only all together.
        """
        ...

    def logits(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        new_tokens: Sequence[Sequence[int] | None],
    ) -> Tensor:
        """Returns the logits after each row's last new token, [B, V].

        The logits of a row without new tokens (None) are arbitrary.
        slots: the slot of each row, in ascending order. starts: the number of tokens that each
        slot's cache already has.
        """
        ...


class SlotPasses:
    """Runs all rows of a pass at once."""

    can_copy = can_fill = True

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        *,
        can_continue: bool = True,
        has_fast_formulas: bool = True,
    ) -> None:
        """has_fast_formulas: whether Mamba layers use the formulas of `policy.mamba`, instead of
        transformers'.
        """
        self.cache, self.can_continue = cache, can_continue
        self._formulas = fast_formulas if has_fast_formulas else nullcontext
        self.is_recurrent = cache.is_recurrent
        self._head = HeadRunner(model)
        self._device = input_device(base_model(model))
        self._dtype = model.dtype
        self._is_eager = model.config._attn_implementation == "eager"
        self._is_lightning = model.config.model_type == "minimax"
        self._masks = _Masks(model.config.get_text_config())
        parameters = inspect.signature(body_of(model).forward).parameters
        self._cache_name = cache_parameter(parameters)

    def logits(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        new_tokens: Sequence[Sequence[int] | None],
    ) -> Tensor:
        """Returns the logits after each row's last new token, [B, V].

        The logits of a filler (None) are arbitrary. The tokens of fillers, and padding, are written
        after a row's last token, where the next real token overwrites them.
        """
        rows = [new or [0] for new in new_tokens]
        num_new = max(map(len, rows))
        ids_Bn = torch.tensor(
            [[*new, *[0] * (num_new - len(new))] for new in rows], device=self._device
        )
        starts_B = torch.tensor(starts, device=self._device)
        steps_n = torch.arange(num_new, device=self._device)
        fillers = [slot for slot, new in zip(slots, new_tokens, strict=True) if new is None]
        plan = ForwardPlan(
            slots_B=torch.tensor(slots, device=self._device),
            positions_Bn=starts_B[:, None] + steps_n,
            num_attended=max(starts) + num_new,
            is_prefix=list(slots) == list(range(len(slots))),
            is_first=not any(starts),
            fillers_F=torch.tensor(fillers, device=self._device) if fillers else None,
        )
        last_B = torch.tensor([len(new) - 1 for new in rows], device=self._device)
        # Padding repeats the last position, since a position beyond the context might not exist.
        positions_Bn = starts_B[:, None] + steps_n.minimum(last_B[:, None])
        hidden_BnH = self._hidden(ids_Bn, positions_Bn, plan)
        rows_B = torch.arange(len(rows), device=self._device)
        return self._head.logits(hidden_BnH[rows_B, last_B])

    def step_logits(
        self, ids_B: Tensor, starts_B: Tensor, num_attended: int, idle_B: Tensor | None
    ) -> Tensor:
        """Returns the logits after one more token of the first B slots, [B, V].

        Nothing is copied from the GPU to the CPU. idle_B: which rows keep their states; None if no
        row does.
        """
        rows_B = torch.arange(len(ids_B), device=self._device)
        plan = ForwardPlan(rows_B, starts_B[:, None], num_attended, is_prefix=True, idle_B=idle_B)
        return self._head.logits(self._hidden(ids_B[:, None], starts_B[:, None], plan)[:, 0])

    def _hidden(self, ids_Bn: Tensor, positions_Bn: Tensor, plan: ForwardPlan) -> Tensor:
        """Runs the new tokens and adds them to the cache; returns hidden states, [B, n, H]."""
        self.cache.begin_pass(plan)
        # MiniMax uses any cache that it is given, but with use_cache it accepts only its own class.
        inputs: dict[str, Any] = {"input_ids": ids_Bn, "use_cache": not self._is_lightning}
        inputs[self._cache_name] = self.cache
        if self._masks.has_attention:
            inputs["position_ids"] = positions_Bn
            inputs["attention_mask"] = self._masks.of(
                positions_Bn, plan.num_attended, self._dtype if self._is_eager else None
            )
        with self._formulas():
            hidden_BnH = self._head.run_body(**inputs)
        self.cache.end_pass(plan)
        return hidden_BnH


class _Masks:
    """The attention masks of a model's layers, by layer type if they differ.

    transformers uses a 4-D mask unchanged. Otherwise it would build one from the cache's length,
    which is one number for all rows, while here each row has its own length.
    """

    def __init__(self, config: Any) -> None:
        types: list[str] = getattr(config, "layer_types", None) or []
        self._types = set(types)
        self.has_attention = not self._types or self._types != {"linear_attention"}
        # In Mistral, Mixtral and Phi a sliding window applies to every layer.
        slides = not self._types or "sliding_attention" in self._types
        self._window: int | None = getattr(config, "sliding_window", None) if slides else None
        self._chunk: int | None = getattr(config, "attention_chunk_size", None)

    def of(self, positions_Bn: Tensor, num_attended: int, dtype: torch.dtype | None) -> Any:
        """Returns the masks of new tokens, [B, 1, n, T]: boolean, or additive in `dtype`."""
        keys_T = torch.arange(num_attended, device=positions_Bn.device)
        queries_Bn1 = positions_Bn[:, None, :, None]
        full = near = keys_T <= queries_Bn1
        if self._window is not None:
            near = full & (keys_T > queries_Bn1 - self._window)
        if not self._types:
            return _as_mask(near, dtype)
        masks: dict[str, Tensor | None] = {"full_attention": _as_mask(full, dtype)}
        if self._window is not None:
            masks["sliding_attention"] = _as_mask(near, dtype)
        if "chunked_attention" in self._types and self._chunk is not None:
            is_same = keys_T // self._chunk == queries_Bn1 // self._chunk
            masks["chunked_attention"] = _as_mask(full & is_same, dtype)
        # Recurrent layers and convolutions are never given padding.
        return masks | {"linear_attention": None, "conv": None}


def _as_mask(allowed: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a boolean mask, or with a dtype the mask that is added to attention scores."""
    if dtype is None:
        return allowed
    # Eager attention adds its mask to the scores.
    return torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)


def cache_parameter(parameters: Any) -> str:
    """Returns the name of a model's cache parameter."""
    return "cache_params" if "cache_params" in parameters else "past_key_values"


class _RowCaches:
    """A separate transformers cache for each slot."""

    def __init__(self) -> None:
        self.caches: dict[int, Any] = {}

    def copy_tokens(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Moves a row's cache to another slot; it cannot be shared, see `can_copy`."""
        for target in targets:
            self.caches[target] = self.caches.pop(source, None)


class PlainPasses:
    """Runs each row of a pass separately."""

    can_copy = can_fill = is_recurrent = False
    can_continue = True

    def __init__(self, model: Any, *, keeps_cache: bool) -> None:
        """keeps_cache: whether each row keeps its cache; if not, every pass runs all its tokens."""
        self.cache = _RowCaches()
        self._keeps_cache = keeps_cache
        self._head = HeadRunner(model)
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
        # One by one: a matrix product of several rows rounds differently than one of a single row.
        return torch.cat([self._head.logits(hidden_H[None]) for hidden_H in hidden])

    def _last_hidden(self, slot: int, start: int, new: Sequence[int]) -> Tensor:
        """Runs the model on a row's new tokens, and returns the last hidden state, [H]."""
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


SamplingMode = Literal["batched", "batched, given tokens singly", "row by row", "without a cache"]
"""How a model is sampled, fastest first:

- batched: all rows share the slots of one cache.
- batched, given tokens singly: likewise, but prompt and reply tokens after the first ones run one
  by one, and Mamba layers use transformers' formulas.
- row by row: each row has transformers' own cache.
- without a cache: each token takes a forward pass over the whole conversation.
"""
SLOWER_MODES: tuple[SamplingMode, ...] = (
    "batched, given tokens singly",
    "row by row",
    "without a cache",
)

_MODE_ATTRIBUTE = "stillroom_sampling_mode"


def set_sampling_mode(model: Any, mode: SamplingMode) -> None:
    """Sets how a model is sampled from now on."""
    # Stored on the model itself, since several engines sample it one after the other.
    setattr(base_model(model), _MODE_ATTRIBUTE, mode)


def set_row_by_row_mode(model: Any) -> None:
    """Sets a sampling mode in which rows do not affect one another's results."""
    if getattr(base_model(model), _MODE_ATTRIBUTE, "batched") != "without a cache":
        set_sampling_mode(model, "row by row")


def passes_for(model: Any, *, num_slots: int) -> Passes:
    """Returns the forward passes for a model's sampling mode."""
    prepare_mamba(model)
    mode: SamplingMode = getattr(base_model(model), _MODE_ATTRIBUTE, "batched")
    config = base_model(model).config
    cache = new_slot_cache(config, num_slots=num_slots) if mode.startswith("batched") else None
    # Recurrent states and RoPE boundaries each split passes in their own way; no model family has
    # both.
    if cache is not None and not (cache.is_recurrent and rope_boundaries(config)):
        is_fastest = mode == "batched"
        return SlotPasses(model, cache, can_continue=is_fastest, has_fast_formulas=is_fastest)
    return PlainPasses(model, keeps_cache=mode != "without a cache")
