"""Attention for sequences of unequal lengths, with the signature of torch's kernel, on any device.

A plain form of what flash attention computes on a GPU: one masked softmax for each sequence. The
last query is aligned with the last key, and a window counts the tokens on each side of a query.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Returns the attention of tokens, [T, h, d], to keys and values of some heads, [K, H, d].

    It refuses what the kernel refuses, or would compute wrongly without a word.
    """
    assert {query.dtype, key.dtype, value.dtype} <= {torch.bfloat16, torch.float16}
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert all(ends.dtype == torch.int32 and ends[0] == 0 for ends in (cu_seq_q, cu_seq_k))
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    queries, keys = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (queries[-1], keys[-1]) == (len(query), len(key))
    assert max_q == max(stop - start for start, stop in pairwise(queries))
    assert max_k == max(stop - start for start, stop in pairwise(keys))
    ends = queries, keys
    return _Attention.apply(query, key, value, ends, window_size, scale)


class _Attention(torch.autograd.Function):
    """Keeps its inputs for the backward pass, as the kernel does."""

    @staticmethod
    def forward(ctx, query, key, value, ends, window, scale):
        ctx.save_for_backward(query, key, value)
        ctx.options = ends, window, scale
        return _attention(query, key, value, ends, window, scale)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = _attention(*inputs, *ctx.options)
        return (*torch.autograd.grad(output, inputs, gradient), None, None, None)


def _attention(query, key, value, ends, window_size, scale) -> Tensor:
    queries, keys = ends
    left, right = window_size
    shared = query.shape[1] // key.shape[1]
    outputs: list[Tensor] = []
    for (q_start, q_stop), (k_start, k_stop) in zip(pairwise(queries), pairwise(keys), strict=True):
        # Flash attention adds up in fp32, and rounds the weights of values.
        q = query[q_start:q_stop].float().transpose(0, 1)
        k, v = (
            tensor[k_start:k_stop].float().repeat_interleave(shared, dim=1).transpose(0, 1)
            for tensor in (key, value)
        )
        scores = q @ k.transpose(1, 2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        place = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
        other = torch.arange(k.shape[1])
        is_seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if left >= 0:
            is_seen &= other >= place - left
        if right >= 0:
            is_seen &= other <= place + right
        weights = scores.masked_fill(~is_seen, -math.inf).softmax(-1)
        weights = weights.to(query.dtype).float()
        outputs.append((weights @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)
