"""The way in which a model is sampled, which a check of it decides."""

from typing import Any, Literal

from stillroom.models.placement import base_model
from stillroom.models.rope import rope_boundaries
from stillroom.policy.mamba import prepare_mamba
from stillroom.policy.passes import Passes, SlotPasses
from stillroom.policy.plain import PlainPasses
from stillroom.policy.slot_cache import slot_cache

SamplingMode = Literal["batched", "batched, given tokens singly", "row by row", "without a cache"]
"""Over the slots of one cache; the same, but given tokens after the first ones run one by one and
Mamba layers by transformers' formulas; each row over transformers' own cache; and each token by a
pass over the whole conversation. Each is slower than the one before it, and asks less of the
model."""
SLOWER_MODES: tuple[SamplingMode, ...] = (
    "batched, given tokens singly",
    "row by row",
    "without a cache",
)

_NAME = "stillroom_sampling_mode"


def set_sampling_mode(model: Any, mode: SamplingMode) -> None:
    """Sets how a model is sampled from now on."""
    # Kept on the model itself, which several engines sample one after the other.
    setattr(base_model(model), _NAME, mode)


def passes_for(model: Any, *, num_slots: int) -> Passes:
    """Returns the forward passes that sample a model in its mode."""
    prepare_mamba(model)
    mode: SamplingMode = getattr(base_model(model), _NAME, "batched")
    config = base_model(model).config
    cache = slot_cache(config, num_slots=num_slots) if mode.startswith("batched") else None
    # No family has both states and such boundaries, and their passes are split in different ways.
    if cache is not None and not (cache.is_recurrent and rope_boundaries(config)):
        is_usual = mode == "batched"
        return SlotPasses(model, cache, can_continue=is_usual, has_own_formulas=is_usual)
    return PlainPasses(model, keeps_cache=mode != "without a cache")
