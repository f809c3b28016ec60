"""Log-probabilities and their gradients for an output head that is one matrix, without autograd.

The trained tokens are processed in tiles, so that only a tile's logits are in memory. The
gradient with respect to a tile's logits overwrites them before the next tile is computed: three
matrix products are enough (two if the head is frozen), where autograd with tiles would need four.
Shapes: N trained tokens, n of a tile, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TILE_LOGITS = 1 << 25
"""The maximum number of logits per tile, unless one position has more."""


class MatrixHead:
    """An output head whose logits are `softcap(scale × hidden @ weight.T)`."""

    def __init__(self, weight: Tensor, *, scale: float, softcap: float | None) -> None:
        self.weight = weight
        self._scale = scale
        self._softcap = softcap
        # Both buffers are as large as the vocabulary and are reused from step to step: allocating
        # such a buffer (the system clears every page of it) costs as much as filling it.
        self._tile: Tensor | None = None
        self._gradient: Tensor | None = None
        self._num_tiles_computed = 0

    @property
    def vocab_size(self) -> int:
        """The number of logits at each position, V."""
        return self.weight.shape[0]

    @torch.no_grad()
    def add_nll_gradient(
        self, hidden_NH: Tensor, targets_N: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Adds the gradient of `scale` × the tokens' negative log-likelihood to `weight.grad`.

        Returns the tokens' log-probabilities, [N], and the gradient with respect to the hidden
        states, [N, H].
        """
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=torch.float32)
        gradient_NH = torch.empty_like(hidden_NH)
        for part in self._tiles(len(targets_N)):
            hidden_nH = hidden_NH[part]
            logprobs_N[part], gradient_nV = self._nll_gradient(hidden_nH, targets_N[part])
            gradient_NH[part] = (gradient_nV @ self.weight).mul_(scale)
            self._add_weight_gradient(gradient_nV, hidden_nH, scale)
        return logprobs_N, gradient_NH

    @torch.no_grad()
    def score(self, hidden_NH: Tensor, targets_N: Tensor) -> "MatrixScores":
        """Returns the tokens' log-probabilities, with what `score_gradient` needs later."""
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=torch.float32)
        gradient_NH = torch.empty_like(hidden_NH)
        gradient_nV = None
        tiles = list(self._tiles(len(targets_N)))
        for part in tiles:
            logprobs_N[part], gradient_nV = self._nll_gradient(hidden_NH[part], targets_N[part])
            torch.mm(gradient_nV, self.weight, out=gradient_NH[part])
        return MatrixScores(
            logprobs_N,
            hidden_NH,
            targets_N,
            gradient_NH,
            gradient_nV if len(tiles) == 1 else None,
            self._num_tiles_computed,
        )

    @torch.no_grad()
    def score_gradient(self, scores: "MatrixScores", weights_N: Tensor) -> Tensor:
        """Adds the gradient of Σ weights_N × log-probability to `weight.grad`, once per `scores`.

        Returns the gradient with respect to the hidden states, [N, H].
        """
        if self.weight.requires_grad:
            for part in self._tiles(len(weights_N)):
                hidden_nH = scores.hidden_NH[part]
                gradient_nV = scores.logit_gradient_NV
                # Recomputed unless the head's buffer still holds it from the only tile: another
                # caller may have used the buffer.
                if gradient_nV is None or scores.num_tiles_computed != self._num_tiles_computed:
                    _, gradient_nV = self._nll_gradient(hidden_nH, scores.targets_N[part])
                weighted_nH = hidden_nH * weights_N[part, None].to(hidden_nH.dtype)
                self._add_weight_gradient(gradient_nV, weighted_nH, -1.0)
        return scores.gradient_NH.mul_(-weights_N[:, None].to(scores.gradient_NH.dtype))

    @torch.no_grad()
    def add_gradient(
        self,
        hidden_NH: Tensor,
        logit_gradient: Callable[[slice, Tensor], Tensor],
        *,
        tile_logits: int,
    ) -> Tensor:
        """Adds the gradient of any loss to `weight.grad`; returns the hidden states', [N, H].

        logit_gradient: takes a tile's slice and its logits, which it may overwrite, and returns the
        gradient of the loss with respect to them.
        tile_logits: the maximum number of logits per tile.
        """
        gradient_NH = torch.empty_like(hidden_NH)
        for part in self._tiles(len(hidden_NH), tile_logits):
            logits_nV, slope_nV = self._scale_and_cap(self._product(hidden_NH[part]))
            gradient_nV = self._product_gradient(logit_gradient(part, logits_nV), slope_nV)
            torch.mm(gradient_nV, self.weight, out=gradient_NH[part])
            self._add_weight_gradient(gradient_nV, hidden_NH[part], 1.0)
        return gradient_NH

    @torch.no_grad()
    def logits(self, hidden_nH: Tensor) -> Tensor:
        """Returns a tile's logits in float32, [n, V]; the next tile overwrites them."""
        return self._scale_and_cap(self._product(hidden_nH))[0]

    @torch.no_grad()
    def logprobs(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        """Returns the tokens' log-probabilities (nats), [N], without gradient."""
        parts = [
            self._nll_gradient(hidden_NH[part], targets_N[part])[0]
            for part in self._tiles(len(targets_N))
        ]
        return torch.cat(parts) if parts else hidden_NH.new_empty(0, dtype=torch.float32)

    def _tiles(self, count: int, tile_logits: int | None = None) -> Iterator[slice]:
        """Yields slices of `count` tokens, one for each tile."""
        size = max(1, (tile_logits or TILE_LOGITS) // self.vocab_size)
        for start in range(0, count, size):
            yield slice(start, min(count, start + size))

    def _nll_gradient(self, hidden_nH: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities, [n], and the gradient of their negative sum, [n, V].

        The gradient is with respect to the matrix product: the probabilities minus 1 at the
        targets, then `_product_gradient`. The next tile overwrites it.
        """
        logits_nV, slope_nV = self._scale_and_cap(self._product(hidden_nH))
        chosen_n1 = logits_nV.gather(1, targets_n[:, None])
        greatest_n = logits_nV.amax(-1)
        gradient_nV = torch.softmax(logits_nV, -1, out=logits_nV)
        # The greatest probability is 1 / Σ exp(logit - greatest logit), so the softmax that is
        # needed anyway also gives the norm, without a second pass of exponentials.
        logprobs_n = chosen_n1[:, 0] - greatest_n + gradient_nV.amax(-1).log()
        gradient_nV.scatter_add_(1, targets_n[:, None], torch.full_like(chosen_n1, -1.0))
        return logprobs_n, self._product_gradient(gradient_nV, slope_nV)

    def _scale_and_cap(self, logits_nV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and soft-caps the product in place; returns it and the cap's slope, if any."""
        if self._scale != 1.0:
            logits_nV.mul_(self._scale)
        if self._softcap is None:
            return logits_nV, None
        logits_nV.div_(self._softcap).tanh_()
        slope_nV = 1 - logits_nV**2
        return logits_nV.mul_(self._softcap), slope_nV

    def _product_gradient(self, gradient_nV: Tensor, slope_nV: Tensor | None) -> Tensor:
        """Returns the gradient with respect to the product, given that of the logits."""
        if slope_nV is not None:
            gradient_nV.mul_(slope_nV)
        if self._scale != 1.0:
            gradient_nV.mul_(self._scale)
        return gradient_nV.to(self.weight.dtype)

    def _product(self, hidden_nH: Tensor) -> Tensor:
        """Returns the matrix product in float32, in a buffer that the next product overwrites."""
        self._num_tiles_computed += 1
        shape = (len(hidden_nH), self.vocab_size)
        if self.weight.dtype != torch.float32:
            return (hidden_nH @ self.weight.T).float()
        size = shape[0] * shape[1]
        if self._tile is None or self._tile.numel() < size:
            self._tile = hidden_nH.new_empty(size)
        return torch.mm(hidden_nH, self.weight.T, out=self._tile[:size].view(shape))

    def _add_weight_gradient(self, gradient_nV: Tensor, hidden_nH: Tensor, scale: float) -> None:
        """Adds a tile's gradient to the weight's gradient, if the weight is trained."""
        if not self.weight.requires_grad:
            return
        if self.weight.grad is None:
            if self._gradient is None:
                self._gradient = torch.zeros_like(self.weight)
            self.weight.grad = self._gradient.zero_()
        self.weight.grad.addmm_(gradient_nV.T, hidden_nH, alpha=scale)


@dataclass(frozen=True, slots=True)
class MatrixScores:
    """The log-probabilities of tokens, with the tensors that their backward pass needs."""

    logprobs_N: Tensor
    hidden_NH: Tensor
    targets_N: Tensor
    gradient_NH: Tensor
    """The gradient of each token's negative log-probability with respect to its hidden state."""
    logit_gradient_NV: Tensor | None
    """The gradient with respect to the logits, if all tokens fit one tile; else None."""
    num_tiles_computed: int
    """The number of tiles that the head had computed so far; each overwrites the previous one."""


def matrix_head(head: Any, *, scale: float, softcap: float | None) -> MatrixHead | None:
    """Returns the head as a `MatrixHead`; None if it is not a single dense matrix on the CPU."""
    if type(head) is not nn.Linear or "bias" in dict(head.named_parameters()):
        return None
    weight = head.weight
    # A sharded parameter holds a tensor of another type.
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return None
    if weight.device.type != "cpu" or not weight.is_floating_point():
        return None
    return MatrixHead(weight, scale=scale, softcap=softcap)
