"""The attention of packs: span by span on any device, or all spans in one kernel on a GPU.

A pack is a row of spans. A span attends to itself and to the spans before it in its sequence;
several spans may follow the same one, the prefix that their sequences share. No mask of the whole
row, of T × T numbers, is ever allocated.
Shapes: T tokens of the row, K keys of all spans together, h heads, d size of a head, S spans.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812 (the usual alias)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PackKernel = Literal["spans", "varlen"]
"""spans: a call of torch's attention for each span; varlen: flash attention over all spans."""

_HALF = (torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)
"""The oldest compute capability (Ampere) that flash attention supports."""


@dataclass(frozen=True, slots=True)
class PackSpan:
    """Consecutive tokens of a pack, and the indices of the earlier spans that they attend to."""

    length: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """A pack as input of variable-length attention (varlen), with each span as one sequence."""

    query_ends_S: Tensor
    """Cumulative query lengths of the spans, [S + 1] int32, starting with 0."""
    key_ends_S: Tensor
    """Cumulative key lengths of the spans, [S + 1] int32, starting with 0."""
    keys_K: Tensor | None
    """The index of the token of each key; None: all tokens in order, as no prefix is shared."""
    max_queries: int
    max_keys: int


@dataclass(slots=True)
class Pack:
    """The spans of a row, with the masks and layouts of their attention, cached for all layers."""

    spans: Sequence[PackSpan]
    kernel: PackKernel = "spans"
    observer: "KernelCheck | None" = None
    """Called with the inputs of every attention call, to compare kernels; None: not compared."""
    _masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict[tuple[Any, ...], Tensor])
    _layouts: dict[torch.device, KernelLayout] = field(
        default_factory=dict[torch.device, KernelLayout]
    )

    @property
    def lengths(self) -> list[int]:
        """The spans' lengths, in their order."""
        return [span.length for span in self.spans]

    def mask(self, num_new: int, num_before: int, window: int, like: Tensor) -> Tensor:
        """Returns the additive mask of a span of `num_new` tokens after `num_before` others.

        Its values are 0 or -inf, [num_new, num_before + num_new].
        """
        # Layers may be on several devices, and a teacher's pass may have another dtype.
        key = (num_new, num_before, window, like.device, like.dtype)
        if key not in self._masks:
            queries = torch.arange(num_before, num_before + num_new, device=like.device)[:, None]
            keys = torch.arange(num_before + num_new, device=like.device)
            is_visible = (keys <= queries) & (keys > queries - window)
            mask = torch.zeros(num_new, num_before + num_new, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~is_visible, float("-inf"))
        return self._masks[key]

    def layout(self, device: torch.device) -> KernelLayout:
        """Returns the pack as input of the varlen kernel."""
        if device not in self._layouts:
            self._layouts[device] = _layout(self.spans, device)
        return self._layouts[device]


def attend(
    pack: Pack,
    query_1hTd: Tensor,
    key_1hTd: Tensor,
    value_1hTd: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Returns the causal attention of a pack, [1, T, h, d], by the pack's kernel.

    window: the size of the sliding window, including the token itself; None: full attention.
    """
    if pack.observer is not None:
        pack.observer.compare(pack, (query_1hTd, key_1hTd, value_1hTd), window=window, scale=scale)
    # The varlen kernel does not support dropout.
    if pack.kernel == "varlen" and not dropout:
        return _attend_varlen(pack, query_1hTd, key_1hTd, value_1hTd, window=window, scale=scale)
    return _attend_by_span(
        pack, query_1hTd, key_1hTd, value_1hTd, window=window, scale=scale, dropout=dropout
    )


@dataclass(slots=True)
class KernelCheck:
    """Compares varlen with span-by-span attention at each attention call of a model."""

    dtype: torch.dtype
    """The dtype that `varlen` computes in."""
    gap: float = 0.0
    """The largest error so far of an output or gradient, relative to its largest element."""

    @torch.enable_grad()
    def compare(
        self, pack: Pack, inputs: Sequence[Tensor], *, window: int | None, scale: float | None
    ) -> None:
        """Compares both kernels on one call and keeps the largest relative difference in `gap`.

        Raises ValueError or RuntimeError if `varlen` does not support the call.
        """
        # Both get rounded inputs, since only the error of the kernel itself counts.
        rounded = [tensor.detach().to(self.dtype).requires_grad_() for tensor in inputs]
        exact = [tensor.detach().float().requires_grad_() for tensor in rounded]
        with torch.autocast(rounded[0].device.type, enabled=False):
            output = _attend_varlen(pack, *rounded, window=window, scale=scale)
            expected = _attend_by_span(pack, *exact, window=window, scale=scale, dropout=0.0)
            results = [output, *torch.autograd.grad(output.float().sum(), rounded)]
            references = [expected, *torch.autograd.grad(expected.sum(), exact)]
        for result, reference in zip(results, references, strict=True):
            self.gap = max(self.gap, relative_gap(result.float(), reference))


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute error divided by the largest expected value; inf for NaN."""
    gap = (actual.to(expected.device) - expected).abs().max() / expected.abs().max()
    return gap.nan_to_num(nan=math.inf).item()


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The attention kernel for packs on a device; None with a reason if packing is not faster."""

    kernel: PackKernel | None
    reason: str = ""


def choose_kernel(device: torch.device, dtype: torch.dtype) -> KernelChoice:
    """Returns the attention kernel for packs on a device, where attention computes in `dtype`.

    `models.probe` tests whether the kernel supports the model's attention heads.
    """
    # On CUDA a call for each span would start far more kernels than one padded pass does.
    if device.type != "cuda":
        return KernelChoice("spans")
    if dtype not in _HALF:
        return KernelChoice(None, "torch's variable-length attention needs bf16 or fp16")
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return KernelChoice(
            None,
            f"torch's variable-length attention needs a GPU of compute capability "
            f"{_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} or later",
        )
    if _varlen_attention() is None:
        return KernelChoice(
            None, f"torch {torch.__version__} has no variable-length attention with windows"
        )
    return KernelChoice("varlen")


def _attend_by_span(
    pack: Pack,
    query_1hTd: Tensor,
    key_1hTd: Tensor,
    value_1hTd: Tensor,
    *,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Returns the attention of a pack, [1, T, h, d], by one call for each span."""
    # split instead of slices: the gradient of a slice is a tensor of zeros as long as the whole
    # pack.
    parts = [tensor.split(pack.lengths, dim=2) for tensor in (query_1hTd, key_1hTd, value_1hTd)]
    attended: list[Tensor] = []
    for index, span in enumerate(pack.spans):
        query, key, value = (part[index] for part in parts)
        if span.before:
            attended_to = (*span.before, index)
            key, value = (torch.cat([part[i] for i in attended_to], dim=2) for part in parts[1:])
        total = key.shape[2]
        num_before = total - span.length
        reach = min(window or total, total)
        is_plain = num_before == 0 and reach == total
        output = F.scaled_dot_product_attention(
            query, key, value,
            attn_mask=None if is_plain else pack.mask(span.length, num_before, reach, query),
            is_causal=is_plain, scale=scale, dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        attended.append(output.transpose(1, 2))
    return torch.cat(attended, dim=1)


def _attend_varlen(
    pack: Pack,
    query_1hTd: Tensor,
    key_1hTd: Tensor,
    value_1hTd: Tensor,
    *,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Returns the attention of a pack, [1, T, h, d], by one kernel over all spans.

    Raises ValueError for a dtype or head size that the kernel does not support.
    """
    attention = _varlen_attention()
    device = query_1hTd.device
    # Under autocast torch's own attention would cast all three; norms may have left them in fp32.
    is_cast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_cast else value_1hTd.dtype
    if attention is None or dtype not in _HALF:
        raise ValueError(f"variable-length attention does not support {dtype}")
    if query_1hTd.shape[-1] != value_1hTd.shape[-1]:
        raise ValueError("variable-length attention needs keys as wide as values")
    query_Thd, key_Khd, value_Khd = (
        tensor[0].transpose(0, 1).to(dtype) for tensor in (query_1hTd, key_1hTd, value_1hTd)
    )
    layout = pack.layout(device)
    keys_K = layout.keys_K
    reach = -1 if window is None or window >= layout.max_keys else window - 1

    def attended(query_Thd: Tensor, key_Khd: Tensor, value_Khd: Tensor) -> Tensor:
        if keys_K is not None:
            key_Khd = key_Khd.index_select(0, keys_K)
            value_Khd = value_Khd.index_select(0, keys_K)
        # The last query of a span is aligned with its last key, so that it attends to the prefix.
        return attention(
            query_Thd, key_Khd, value_Khd, layout.query_ends_S, layout.key_ends_S,
            layout.max_queries, layout.max_keys,
            window_size=(reach, 0), scale=scale, enable_gqa=query_Thd.shape[1] != key_Khd.shape[1],
        )  # fmt: skip

    inputs = (query_Thd, key_Khd, value_Khd)
    if keys_K is None or not torch.is_grad_enabled():
        return attended(*inputs)[None]
    # A prefix's keys and values are copied for each span that follows it. A hundred copies of a
    # long prompt, kept for every layer, would not fit: the backward pass recomputes them.
    output = checkpoint(attended, *inputs, use_reentrant=False, preserve_rng_state=False)
    return cast("Tensor", output)[None]


def _layout(spans: Sequence[PackSpan], device: torch.device) -> KernelLayout:
    """Returns the layout of spans for the varlen kernel, as tensors on a device."""
    starts = [0, *accumulate(span.length for span in spans)]
    keys: list[int] = []
    key_ends = [0]
    for index, span in enumerate(spans):
        for attended in (*span.before, index):
            keys += range(starts[attended], starts[attended + 1])
        key_ends.append(len(keys))
    is_shared = any(span.before for span in spans)
    return KernelLayout(
        query_ends_S=torch.tensor(starts, dtype=torch.int32, device=device),
        key_ends_S=torch.tensor(key_ends, dtype=torch.int32, device=device),
        keys_K=torch.tensor(keys, device=device) if is_shared else None,
        max_queries=max(span.length for span in spans),
        max_keys=max(end - start for start, end in pairwise(key_ends)),
    )


@functools.cache
def _varlen_attention() -> Callable[..., Any] | None:
    """Returns torch's variable-length attention; None if it lacks sliding windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has_windows = "window_size" in inspect.signature(varlen_attn).parameters
    return varlen_attn if has_windows else None


PACKED_ATTENTION = "stillroom_packed"

_PACKED_LAYERS = {"full_attention", "sliding_attention"}


def enable_packing(model: Any) -> bool:
    """Switches the model to packed attention; False if its attention is not supported.

    Passes without packs are unchanged. `models.probe` tests whether packs change the logits.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attn_logit_softcapping", None) is not None or not kinds <= _PACKED_LAYERS:
        return False
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(PACKED_ATTENTION)
    return model.config._attn_implementation == PACKED_ATTENTION


def packed_inputs(pack: Pack, positions_1T: Tensor) -> dict[str, Any]:
    """Returns the inputs that the model's body needs for a pack, in addition to the token ids."""
    # transformers builds a causal mask of T × T numbers unless it is given a mask of four
    # dimensions, which it passes on unchanged. Packed attention ignores it.
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of a pack, [1, T, h, d]; without a pack, transformers' own result."""
    if stillroom_pack is None:
        return sdpa_attention_forward(
            module, query_1hTd, key_1hTd, value_1hTd, attention_mask,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    output_1Thd = attend(
        stillroom_pack, query_1hTd, key_1hTd, value_1hTd,
        window=sliding_window, scale=kwargs.get("scaling"), dropout=kwargs.get("dropout", 0.0),
    )  # fmt: skip
    return output_1Thd, None


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
