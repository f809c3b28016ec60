"""Samples one token for each row, from its logits and one uniform random number.

Shapes: B rows, V vocabulary, C blocks of consecutive tokens, R tokens of a block.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the usual alias)
from torch import Tensor

from stillroom.errors import ModelError
from stillroom.types import SamplingSettings

_BLOCK_SIZE = 256


def sample_tokens(
    logits_BV: Tensor,
    settings: Sequence[SamplingSettings],
    draws: Sequence[float],
    *,
    tokenizer_size: int | None = None,
) -> tuple[list[int], list[float]]:
    """Returns each row's token and its log-probability (nats) at temperature 1.

    `draws` are uniform in [0, 1), and a row's token depends only on its own draw and logits. A row
    with temperature 0 takes the most likely token. Ids from `tokenizer_size` on are padding of the
    vocabulary: they are never taken, but count in the log-probability, as they do in training.
    Raises ModelError if the model's logits are not finite.
    """
    # The sums are in float64, which Apple GPUs don't have.
    logits_BV = (logits_BV.cpu() if logits_BV.device.type == "mps" else logits_BV).float()
    size = logits_BV.shape[1] if tokenizer_size is None else tokenizer_size
    valid_BV, padding_BV = logits_BV[:, :size], logits_BV[:, size:]
    max_B1 = valid_BV.amax(dim=-1, keepdim=True)
    weights_BV = (valid_BV - max_B1).exp_()
    log_total_B = max_B1[:, 0] + weights_BV.sum(dim=-1).log()
    if padding_BV.shape[1]:
        log_total_B = torch.logaddexp(log_total_B, padding_BV.logsumexp(dim=-1))
    if all(row.temperature == 0 for row in settings):
        ids_B = valid_BV.argmax(dim=-1)
    else:
        ids_B = _draw(valid_BV, weights_BV, settings, draws)
    logprobs_B = valid_BV.gather(1, ids_B[:, None])[:, 0] - log_total_B
    # One tensor for all numbers, so that the GPU is synchronised once; float64 represents ids and
    # float32 exactly.
    columns = torch.stack([ids_B.double(), logprobs_B.double(), log_total_B.double()])
    ids, logprobs, log_totals = columns.tolist()
    if not all(map(math.isfinite, log_totals)):
        raise ModelError(
            "the model's logits are not finite",
            "load it with precision fp32; if that doesn't help, its weights are damaged",
        )
    return [int(token) for token in ids], logprobs


def _draw(
    logits_BV: Tensor,
    weights_BV: Tensor,
    settings: Sequence[SamplingSettings],
    draws: Sequence[float],
) -> Tensor:
    """Returns each row's token; `weights_BV` are unnormalised probabilities at temperature 1."""
    if any(row.temperature not in {0, 1} for row in settings):
        temperatures_B1 = logits_BV.new_tensor([[row.temperature or 1.0] for row in settings])
        max_B1 = logits_BV.amax(dim=-1, keepdim=True)
        weights_BV = ((logits_BV - max_B1) / temperatures_B1).exp_()
    if any(row.top_p < 1 for row in settings):
        top_p_B = logits_BV.new_tensor([row.top_p for row in settings])
        weights_BV = _apply_top_p(weights_BV / weights_BV.sum(dim=-1, keepdim=True), top_p_B)
    # 1 - draw is in (0, 1]. Since it is above 0, the token that is found has a probability above 0.
    shares_B1 = 1 - torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)[:, None]
    ids_B = _tokens_at(weights_BV, shares_B1)
    if all(row.temperature for row in settings):
        return ids_B
    greedy = logits_BV.new_tensor([row.temperature == 0 for row in settings], dtype=torch.bool)
    return torch.where(greedy, logits_BV.argmax(dim=-1), ids_B)


def _tokens_at(weights_BV: Tensor, shares_B1: Tensor) -> Tensor:
    """Returns the first token of each row where the running sum reaches the row's share, [B].

    The sums of blocks of tokens locate the token's block, so that only one block is summed token
    by token. The sums are in float64, so that rare tokens keep their probability.
    """
    vocabulary = weights_BV.shape[1]
    num_blocks, num_left = divmod(vocabulary, _BLOCK_SIZE)
    blocks_BCR = weights_BV[:, : num_blocks * _BLOCK_SIZE].unflatten(1, (num_blocks, _BLOCK_SIZE))
    left_B1 = weights_BV[:, vocabulary - num_left :].sum(dim=-1, keepdim=True)
    cumulative_BC = torch.cat([blocks_BCR.sum(dim=-1), left_B1], dim=1).double().cumsum(dim=-1)
    targets_B1 = shares_B1 * cumulative_BC[:, -1:]
    block_B1 = _first_at_least(cumulative_BC, targets_B1)
    bounds_BC = F.pad(cumulative_BC, (1, 0))
    before_B1, after_B1 = bounds_BC.gather(1, block_B1), bounds_BC.gather(1, block_B1 + 1)
    # Relative to the block's own sum, which is added up in another order and rounded differently.
    shares_B1 = ((targets_B1 - before_B1) / (after_B1 - before_B1)).clamp(max=1.0)
    tokens_BR = block_B1 * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=weights_BV.device)
    block_BR = weights_BV.gather(1, tokens_BR.clamp(max=vocabulary - 1)).double()
    cumulative_BR = block_BR.masked_fill_(tokens_BR >= vocabulary, 0.0).cumsum(dim=-1)
    ids_B1 = block_B1 * _BLOCK_SIZE + _first_at_least(
        cumulative_BR, shares_B1 * cumulative_BR[:, -1:]
    )
    return ids_B1[:, 0].clamp(max=vocabulary - 1)


def _first_at_least(sorted_BC: Tensor, targets_B1: Tensor) -> Tensor:
    """Returns each row's first index with at least its target, [B, 1]."""
    # With sums that are not finite, the index could be beyond the end.
    return torch.searchsorted(sorted_BC, targets_B1).clamp(max=sorted_BC.shape[1] - 1)


def _apply_top_p(probabilities_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Sets probabilities outside the smallest set of tokens with mass >= top_p to 0."""
    ordered_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
    before_BV = ordered_BV.cumsum(dim=-1) - ordered_BV
    # With top_p 1 every token is kept, though rounding may bring the sum to 1 before the last ones.
    is_kept_BV = (before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    kept_BV = torch.where(is_kept_BV, ordered_BV, 0.0)
    return torch.zeros_like(probabilities_BV).scatter(1, order_BV, kept_BV)
