"""Sampling with one given random number per row.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stillroom.errors import ModelError
from stillroom.types import SamplingSettings


def sample_tokens(
    logits_BV: Tensor,
    settings: Sequence[SamplingSettings],
    draws: Sequence[float],
    *,
    num_known: int | None = None,
) -> tuple[list[int], list[float]]:
    """Returns each row's token and its log-probability (nats) at temperature 1.

    `draws` are uniform in [0, 1): a row's token depends on its own draw and logits alone. A row
    with temperature 0 takes the most likely token. Ids from `num_known` on are padding of the
    vocabulary: never taken, but counted in the log-probability, as a trainer counts them.
    Raises ModelError if the model's logits are not finite.
    """
    logits_BV = logits_BV.float()
    known_BV = logits_BV[:, :num_known]
    if all(row.temperature == 0 for row in settings):
        ids_B = known_BV.argmax(dim=-1)
    else:
        ids_B = _draw(known_BV, settings, draws)
    # What is not finite might make an id that no row has.
    chosen_B1 = ids_B[:, None].clamp(max=known_BV.shape[1] - 1)
    logprobs_B = logits_BV.gather(1, chosen_B1)[:, 0] - logits_BV.logsumexp(dim=-1)
    is_finite_B = torch.isfinite(logits_BV).all(dim=-1)
    # One tensor, so that a GPU is waited for once; float64 holds ids and float32 exactly.
    told = torch.stack([ids_B.double(), logprobs_B.double(), is_finite_B.double()]).tolist()
    ids, logprobs, is_finite = told
    if not all(is_finite):
        raise ModelError(
            "the model's logits are not finite",
            "load it with precision fp32; if that doesn't help, its weights are damaged",
        )
    return [int(token) for token in ids], logprobs


def _draw(
    logits_BV: Tensor, settings: Sequence[SamplingSettings], draws: Sequence[float]
) -> Tensor:
    greedy = logits_BV.new_tensor([row.temperature == 0 for row in settings], dtype=torch.bool)
    temperatures_B = logits_BV.new_tensor([row.temperature or 1.0 for row in settings])
    probabilities_BV = torch.softmax(logits_BV / temperatures_B[:, None], dim=-1)
    if any(row.top_p < 1 for row in settings):
        top_p_B = logits_BV.new_tensor([row.top_p for row in settings])
        probabilities_BV = _keep_top(probabilities_BV, top_p_B)
    # The inverse of the distribution function, in float64 so that rare tokens keep their share.
    cumulative_BV = probabilities_BV.double().cumsum(dim=-1)
    # 1 - draw is in (0, 1]: the first token with cumulative >= target has a share of its own.
    targets_B = 1 - torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)
    targets_B = targets_B * cumulative_BV[:, -1]
    ids_B = torch.searchsorted(cumulative_BV, targets_B[:, None])[:, 0]
    return torch.where(greedy, logits_BV.argmax(dim=-1), ids_B)


def _keep_top(probabilities_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Sets to 0 what lies outside the smallest set of tokens with mass >= top_p."""
    ordered_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
    before_BV = ordered_BV.cumsum(dim=-1) - ordered_BV
    # Rounding may fill the mass before the last tokens are reached.
    is_kept_BV = (before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    kept_BV = torch.where(is_kept_BV, ordered_BV, 0.0)
    return torch.zeros_like(probabilities_BV).scatter(1, order_BV, kept_BV)
