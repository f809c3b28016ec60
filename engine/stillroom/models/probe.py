"""Finds out how a model may run many sequences at once: as a pack, as padded rows, or one by one.

A way is taken only if it gives every sequence the logits of a plain pass of its own, also beyond
every boundary that the configuration names (window, chunk, original context). To keep that cheap, a
small copy of the model is probed.
"""

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from stillroom.errors import ModelError
from stillroom.models.batches import PassLayout, TokenSequence
from stillroom.models.heads import OutputHead
from stillroom.models.packing import allow_packing, forbid_packing
from stillroom.models.small_copy import LONGEST_BOUNDARY, build_copy, small_configs

_SHORT = (7, 19, 30)
_LONG = (12, LONGEST_BOUNDARY + 20, 3, 25, 11, 1)
"""The tokens of a prefix and of the sequences that go on from it."""
# The differences, as shares of the largest logit, that rounding explains. Attending to another
# sequence's tokens would change the logits by far more.
_TOLERANCE = {torch.float32: 1e-3}
_SHORT_TOLERANCE = 8e-2
# A model that cannot be run in one of the ways may raise any of these.
_CANNOT = (
    TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, StrictDataclassError,
)  # fmt: skip
_INSTEAD: dict[PassLayout, str] = {
    "packed": "padded to the longest of their pass, which takes longer",
    "padded": "run one by one, which takes longer",
}


def choose_passes(head: OutputHead) -> None:
    """Sets the head's rules to the fastest that leave its logits as they are, and its notes.

    Raises ModelError if not even sequences that run alone have the model's own logits.
    """
    name, model, gap = type(head.base).__name__, head.base, 0.0
    exact = _TOLERANCE[torch.float32]
    gaps = _copy_gaps(type(model.config.get_text_config()), *small_configs(model))
    head.may_embed = gaps.get("embedded", 0.0) <= exact
    head.notes.clear()
    layouts: list[PassLayout] = ["padded", "alone"]
    # Packs are for main memory only: on a GPU one padded pass starts far fewer kernels.
    if head.by_hand is not None and allow_packing(model):
        layouts = ["packed", *layouts]
    for layout in layouts:
        head.rules = replace(head.rules, layout=layout)
        gap = gaps.get(layout, math.inf if layout == "packed" else 0.0)
        if gap <= exact and layout == "packed":
            # The copy has none of the changes that may have been made to this very model.
            own = _Reference(head, _SHORT).gap(head)
            gap = 0.0 if own <= _TOLERANCE.get(model.dtype, _SHORT_TOLERANCE) else own
        if gap <= exact:
            return
        if layout == "packed":
            forbid_packing(model)
        if layout in _INSTEAD:
            reason = f"{gap:.1%} of the largest" if math.isfinite(gap) else "an unknown amount"
            head.notes.append(
                f"rows of {name} are {_INSTEAD[layout]}: {layout}, some logits would be off by "
                f"{reason}"
            )
    raise ModelError(
        f"{name} forms its logits in a way that is not known here (they differ by {gap:.1%} of the "
        "largest)",
        "use a model of another family (Qwen, Llama, Mistral, Gemma, Phi are tested)",
    )


@functools.lru_cache(maxsize=32)
def _copy_gaps(config_class: type[PreTrainedConfig], *configs: str) -> Mapping[str, float]:
    """Returns how far each way of running the small copy is off, as a share of the largest logit.

    Nothing is returned for a model of which no small copy can be run.
    """
    for config in configs:
        try:
            if (model := build_copy(config_class, config)) is not None:
                return _gaps(OutputHead(model))
        except _CANNOT:
            continue
    return {}


def _gaps(head: OutputHead) -> Mapping[str, float]:
    reference = _Reference(head, _LONG)
    gaps = {"padded": reference.gap(head)}
    gaps["embedded"] = reference.gap(head, head.base.get_input_embeddings())
    layouts: list[PassLayout] = ["packed"] if allow_packing(head.base) else []
    if gaps["padded"] > _TOLERANCE[torch.float32]:
        layouts.append("alone")
    for layout in layouts:
        head.rules = replace(head.rules, layout=layout)
        gaps[layout] = reference.gap(head)
    return gaps


class _Reference:
    """Sequences, and the logits that plain passes give each of them alone."""

    @torch.no_grad()
    def __init__(self, head: OutputHead, lengths: Sequence[int]) -> None:
        ids = _ids(lengths, head.vocab_size)
        self._sequences = [TokenSequence(one, [True] * len(one)) for one in ids]
        with _evaluating(head.base) as model:
            alone = [
                model(input_ids=torch.tensor([one], device=model.device), use_cache=False)
                for one in ids
            ]
        self._logits_NV = torch.cat([output.logits[0, :-1].float() for output in alone])

    @torch.no_grad()
    def gap(self, head: OutputHead, embed: Callable[[Tensor], Tensor] | None = None) -> float:
        """Returns the largest difference of a batch's logits, as a share of the largest logit.

        It is infinite if the batch cannot be run.
        """
        try:
            with _evaluating(head.base):
                batch = head.collate(self._sequences)
                logits_NV = head.logits(head.batch_hidden(batch, embed))
        except _CANNOT:
            return math.inf
        gap = (logits_NV.to(self._logits_NV.device) - self._logits_NV).abs().max()
        return (gap / self._logits_NV.abs().max()).nan_to_num(nan=math.inf).item()


@contextmanager
def _evaluating(model: Any) -> Generator[Any]:
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def _ids(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Returns sequences that share a prefix, and one that does not."""
    trunk, *leaves = lengths
    ids = [(index * 37 + 11) % vocabulary for index in range(sum(lengths))]
    sequences, start = list[list[int]](), trunk
    for length in leaves:
        sequences.append(ids[:trunk] + ids[start : start + length])
        start += length
    return [*sequences, ids[5 : 5 + 2 * trunk]]
