"""Finds the fastest way to run many sequences on a model: packed, padded rows, or one by one.

A layout is chosen only if it gives every sequence the logits of a plain forward pass, also beyond
every boundary in the configuration (window, chunk, original context). To keep that cheap, a small
copy of the model is tested.
"""

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from stillroom.errors import ModelError
from stillroom.models.batches import PassLayout, TokenSequence
from stillroom.models.kernels import (
    KernelCheck,
    KernelChoice,
    PackKernel,
    choose_kernel,
    enable_packing,
    relative_gap,
)
from stillroom.models.lm_head import HeadRunner
from stillroom.models.placement import input_device
from stillroom.models.small_copy import LONGEST_BOUNDARY, build_copy, small_configs

_SHORT = (7, 19, 30)
_LONG = (12, LONGEST_BOUNDARY + 20, 3, 25, 11, 1)
"""The number of tokens of a prefix, then of each sequence that continues it."""
# Rounding errors relative to the largest logit. Attending to another sequence's tokens would
# change the logits by far more.
_TOLERANCE = {torch.float32: 1e-3}
_SHORT_TOLERANCE = 8e-2
# The same for one attention call in bf16 or fp16: its output and its gradients.
_KERNEL_TOLERANCE = 5e-2
# The errors that a model may raise if it does not support a layout.
_UNSUPPORTED_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, StrictDataclassError,
)  # fmt: skip
_FALLBACKS: dict[PassLayout, str] = {
    "packed": "padded to the longest row of their pass (slower)",
    "padded": "run one by one (slower)",
}


def choose_passes(
    head: HeadRunner,
    *,
    device: torch.device | None = None,
    compute_dtype: torch.dtype | None = None,
    kernel: PackKernel | Literal["auto"] | None = "auto",
) -> None:
    """Sets the head's rules to the fastest ones that do not change its logits, and its notes.

    device: the device that the model will be moved to (sharded weights). compute_dtype: the dtype
    of matrix products on it, if it differs from the weights'. kernel: the attention kernel of
    packs; auto: by device; None: no packing. Raises ModelError if even single sequences get logits
    that differ from the model's own.
    """
    name, model, gap = type(head.base).__name__, head.base, 0.0
    current_device, dtype = input_device(model), compute_dtype or model.dtype
    device = current_device if device is None else device
    exact = _TOLERANCE[torch.float32]
    copies = (type(model.config.get_text_config()), *small_configs(model))
    gaps = _copy_gaps(*copies)
    head.accepts_embeddings = gaps.get("embedded", 0.0) <= exact
    head.notes.clear()
    layouts: list[PassLayout] = ["padded", "alone"]
    choice = choose_kernel(device, dtype) if kernel == "auto" else KernelChoice(kernel)
    if choice.kernel is not None and enable_packing(model):
        layouts = ["packed", *layouts]
    elif choice.reason and gaps.get("packed", math.inf) <= exact:
        head.notes.append(f"rows of {name} are {_FALLBACKS['packed']}: {choice.reason}")
    for layout in layouts:
        head.rules = replace(head.rules, layout=layout, kernel=choice.kernel or "spans")
        gap = gaps.get(layout, math.inf if layout == "packed" else 0.0)
        if gap <= exact and layout == "packed":
            # The copy lacks any patches that were made to the model itself.
            gap = _kernel_gap(head.rules.kernel, device, dtype, *copies) or _model_gap(
                head, dtype if device == current_device else None
            )
        if gap <= exact:
            if layout == "packed" and choice.kernel == "varlen":
                head.notes.append(f"rows of {name} are packed without padding (flash attention)")
            return
        if layout == "packed":
            model.set_attn_implementation("sdpa")
        if layout in _FALLBACKS:
            head.notes.append(
                f"rows of {name} are {_FALLBACKS[layout]}: {layout} rows are not exact "
                f"({_describe_gap(gap)})"
            )
    raise ModelError(
        f"Stillroom cannot run {name}: {_describe_gap(gap)}",
        "use a model of another family (Qwen, Llama, Mistral, Gemma, Phi are tested)",
    )


def _describe_gap(gap: float) -> str:
    """Describes an error of logits as a clause; `gap` is infinite if the forward pass failed."""
    if not math.isfinite(gap):
        return "the forward pass fails or gives logits that are not finite"
    return (
        "some logits differ from those of the model's own forward pass by "
        f"{gap:.1%} of the largest logit"
    )


def _model_gap(head: HeadRunner, dtype: torch.dtype | None) -> float:
    """Returns the model's error with packing: of its logits, or of `varlen` in its attention.

    0 if rounding explains it. Packs run span by span, and `varlen` is compared at each attention
    call. dtype: the dtype that the model computes in; None if it is not on its device yet: the
    pass then uses the dtype of its weights, and `varlen` is not compared.
    """
    weight_dtype: torch.dtype = head.base.dtype
    check = KernelCheck(dtype) if dtype is not None and head.rules.kernel == "varlen" else None
    dtype = weight_dtype if dtype is None else dtype
    chosen, head.rules = head.rules, replace(head.rules, kernel="spans")
    with torch.autocast(input_device(head.base).type, dtype=dtype, enabled=dtype != weight_dtype):
        gap = _Reference(head, _SHORT).gap(head, check=check)
    head.rules = chosen
    if gap > _TOLERANCE.get(dtype, _SHORT_TOLERANCE):
        return gap
    return check.gap if check is not None and check.gap > _KERNEL_TOLERANCE else 0.0


@functools.lru_cache(maxsize=32)
def _kernel_gap(
    kernel: PackKernel,
    device: torch.device,
    dtype: torch.dtype,
    config_class: type[PreTrainedConfig],
    *configs: str,
) -> float:
    """Returns a kernel's error in the small copy's attention; 0 if rounding explains it."""
    if kernel == "spans":
        return 0.0
    for config in configs:
        try:
            model = build_copy(config_class, config)
        except _UNSUPPORTED_ERRORS:
            continue
        if model is not None and enable_packing(model):
            head, check = HeadRunner(model.to(device)), KernelCheck(dtype)
            head.rules = replace(head.rules, layout="packed")
            if math.isfinite(_Reference(head, _LONG).gap(head, check=check)):
                return check.gap if check.gap > _KERNEL_TOLERANCE else 0.0
    return math.inf


@functools.lru_cache(maxsize=32)
def _copy_gaps(config_class: type[PreTrainedConfig], *configs: str) -> Mapping[str, float]:
    """Returns the error of the small copy with each layout, relative to the largest logit.

    The result is empty if no small copy of the model runs.
    """
    for config in configs:
        try:
            if (model := build_copy(config_class, config)) is not None:
                return _layout_gaps(HeadRunner(model))
        except _UNSUPPORTED_ERRORS:
            continue
    return {}


def _layout_gaps(head: HeadRunner) -> Mapping[str, float]:
    """Returns the error with each layout, and of a pass over embeddings (`embedded`)."""
    reference = _Reference(head, _LONG)
    gaps = {"padded": reference.gap(head)}
    gaps["embedded"] = reference.gap(head, head.base.get_input_embeddings())
    layouts: list[PassLayout] = ["packed"] if enable_packing(head.base) else []
    if gaps["padded"] > _TOLERANCE[torch.float32]:
        layouts.append("alone")
    for layout in layouts:
        head.rules = replace(head.rules, layout=layout)
        gaps[layout] = reference.gap(head)
    return gaps


class _Reference:
    """Test sequences, and the logits of each from a plain forward pass of its own."""

    @torch.no_grad()
    def __init__(self, head: HeadRunner, lengths: Sequence[int]) -> None:
        ids = _probe_ids(lengths, head.vocab_size)
        self._sequences = [TokenSequence(tokens, [True] * len(tokens)) for tokens in ids]
        with _eval_mode(head.base) as model:
            outputs = [
                model(input_ids=torch.tensor([tokens], device=input_device(model)), use_cache=False)
                for tokens in ids
            ]
        self._logits_NV = torch.cat([output.logits[0, :-1].float() for output in outputs])

    @torch.no_grad()
    def gap(
        self,
        head: HeadRunner,
        embed: Callable[[Tensor], Tensor] | None = None,
        *,
        check: KernelCheck | None = None,
    ) -> float:
        """Returns the largest error of a batch's logits, relative to the largest logit.

        It is infinite if the batch cannot run. check: also compares the attention kernels of packs.
        """
        try:
            with _eval_mode(head.base):
                batch = head.collate(self._sequences)
                for batch_pass in batch.passes:
                    if batch_pass.pack is not None:
                        batch_pass.pack.observer = check
                logits_NV = head.logits(head.batch_hidden(batch, embed))
        except _UNSUPPORTED_ERRORS:
            return math.inf
        return relative_gap(logits_NV, self._logits_NV)


@contextmanager
def _eval_mode(model: Any) -> Generator[Any]:
    """Switches the model to evaluation mode within the block."""
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def _probe_ids(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Returns the token ids of sequences that share a prefix, and of one that does not."""
    trunk, *leaves = lengths
    ids = [(index * 37 + 11) % vocabulary for index in range(sum(lengths))]
    sequences, start = list[list[int]](), trunk
    for length in leaves:
        sequences.append(ids[:trunk] + ids[start : start + length])
        start += length
    return [*sequences, ids[5 : 5 + 2 * trunk]]
