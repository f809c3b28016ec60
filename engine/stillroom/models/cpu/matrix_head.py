"""Log-probabilities and their gradients where the output head is one matrix, without autograd.

The gradient with regard to the logits is formed while they are at hand, so that three matrix
products do (two if the head is frozen), and nothing of a tile is kept. Buffers as large as the
vocabulary are kept from step to step: asking the system for them costs as much as using them.
Shapes: N trained tokens, n of a tile, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TILE_NUMBERS = 1 << 25
"""Logits of one tile stay below this many numbers."""


@dataclass(slots=True)
class _Kept:
    """Buffers that outlive a step."""

    tile: Tensor | None = None
    gradient: Tensor | None = None


class MatrixHead:
    """Logits are `softcap(scale × hidden @ weight.T)`."""

    def __init__(self, weight: Tensor, *, scale: float, softcap: float | None) -> None:
        self.weight = weight
        self._scale = scale
        self._softcap = softcap
        self._kept = _Kept()

    @property
    def tile(self) -> int:
        """How many positions' logits are held at a time."""
        return max(1, TILE_NUMBERS // self.weight.shape[0])

    @torch.no_grad()
    def add_nll_gradient(
        self, hidden_NH: Tensor, targets_N: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens' log-probabilities and the gradient of `scale` × their negative sum.

        The gradient with regard to the weight is added to it; the one returned is [N, H].
        """
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=torch.float32)
        gradient_NH = torch.empty_like(hidden_NH)
        for part in self._tiles(len(targets_N)):
            hidden_nH = hidden_NH[part]
            logprobs_N[part], wrong_nV = self._wrongness(hidden_nH, targets_N[part])
            gradient_NH[part] = (wrong_nV @ self.weight).mul_(scale)
            self._add(wrong_nV, hidden_nH, scale)
        return logprobs_N, gradient_NH

    @torch.no_grad()
    def score(self, hidden_NH: Tensor, targets_N: Tensor) -> "MatrixScores":
        """Returns the log-probabilities, of which the gradient comes later."""
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=torch.float32)
        gradient_NH = torch.empty_like(hidden_NH)
        wrong_nV = None
        for part in self._tiles(len(targets_N)):
            logprobs_N[part], wrong_nV = self._wrongness(hidden_NH[part], targets_N[part])
            torch.mm(wrong_nV, self.weight, out=gradient_NH[part])
        is_held = len(targets_N) <= self.tile and self.weight.requires_grad
        return MatrixScores(
            self, hidden_NH, targets_N, logprobs_N, gradient_NH, wrong_nV if is_held else None
        )

    @torch.no_grad()
    def add_gradient(
        self, hidden_NH: Tensor, learn: Callable[[slice, Tensor], Tensor], *, most: int
    ) -> Tensor:
        """Adds the weight's gradient of any loss, tile by tile; returns the hidden states', [N, H].

        `learn` gets a tile's tokens and their logits, which it may overwrite, and returns the
        loss's gradient with regard to these; `most` is how many tokens a tile may have.
        """
        gradient_NH = torch.empty_like(hidden_NH)
        for start in range(0, len(hidden_NH), most):
            part = slice(start, min(len(hidden_NH), start + most))
            logits_nV, slope_nV = self._shaped(self._logits(hidden_NH[part]))
            gradient_nV = self._unshaped(learn(part, logits_nV), slope_nV)
            torch.mm(gradient_nV, self.weight, out=gradient_NH[part])
            self._add(gradient_nV, hidden_NH[part], 1.0)
        return gradient_NH

    @torch.no_grad()
    def logits(self, hidden_nH: Tensor) -> Tensor:
        """Returns a tile's logits in float32, [n, V]; they are overwritten by the next tile."""
        return self._shaped(self._logits(hidden_nH))[0]

    @torch.no_grad()
    def logprobs(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        """Returns the tokens' log-probabilities (nats), [N]."""
        parts = [
            self._wrongness(hidden_NH[part], targets_N[part])[0]
            for part in self._tiles(len(targets_N))
        ]
        return torch.cat(parts) if parts else hidden_NH.new_empty(0, dtype=torch.float32)

    @torch.no_grad()
    def add_weight_gradient(self, scores: "MatrixScores", weights_N: Tensor) -> None:
        """Adds the gradient of `weights_N · log-probabilities` to the weight, if it is trained."""
        if not self.weight.requires_grad:
            return
        for part in self._tiles(len(weights_N)):
            hidden_nH = scores.hidden_NH[part]
            wrong_nV = scores.wrong_nV
            if wrong_nV is None:
                wrong_nV = self._wrongness(hidden_nH, scores.targets_N[part])[1]
            self._add(wrong_nV, hidden_nH * weights_N[part, None].to(hidden_nH.dtype), -1.0)

    def _tiles(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.tile):
            yield slice(start, min(count, start + self.tile))

    def _wrongness(self, hidden_nH: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities and what they lose by each logit of the matrix, [n, V].

        That is the probabilities, less 1 at the targets; it is overwritten by the next tile.
        """
        logits_nV, slope_nV = self._shaped(self._logits(hidden_nH))
        chosen_n1 = logits_nV.gather(1, targets_n[:, None])
        most_n = logits_nV.amax(-1)
        wrong_nV = torch.softmax(logits_nV, -1, out=logits_nV)
        # The greatest probability is 1 / Σ exp(logit - greatest logit).
        logprobs_n = chosen_n1[:, 0] - most_n + wrong_nV.amax(-1).log()
        wrong_nV.scatter_add_(1, targets_n[:, None], torch.full_like(chosen_n1, -1.0))
        return logprobs_n, self._unshaped(wrong_nV, slope_nV)

    def _shaped(self, logits_nV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the matrix product scaled and soft-capped, and the slope of the cap if it has."""
        if self._scale != 1.0:
            logits_nV.mul_(self._scale)
        if self._softcap is None:
            return logits_nV, None
        logits_nV.div_(self._softcap).tanh_()
        slope_nV = 1 - logits_nV**2
        return logits_nV.mul_(self._softcap), slope_nV

    def _unshaped(self, gradient_nV: Tensor, slope_nV: Tensor | None) -> Tensor:
        """Returns the gradient with regard to the matrix product, of that of the logits."""
        if slope_nV is not None:
            gradient_nV.mul_(slope_nV)
        if self._scale != 1.0:
            gradient_nV.mul_(self._scale)
        return gradient_nV.to(self.weight.dtype)

    def _logits(self, hidden_nH: Tensor) -> Tensor:
        """Returns the matrix product in float32, in a buffer that is used again."""
        shape = (len(hidden_nH), self.weight.shape[0])
        if self.weight.dtype != torch.float32:
            return (hidden_nH @ self.weight.T).float()
        numbers = shape[0] * shape[1]
        if self._kept.tile is None or self._kept.tile.numel() < numbers:
            self._kept.tile = hidden_nH.new_empty(numbers)
        return torch.mm(hidden_nH, self.weight.T, out=self._kept.tile[:numbers].view(shape))

    def _add(self, wrong_nV: Tensor, hidden_nH: Tensor, scale: float) -> None:
        if not self.weight.requires_grad:
            return
        gradient = self.weight.grad
        if gradient is None:
            gradient = self.weight.grad = self._zeros()
        gradient.addmm_(wrong_nV.T, hidden_nH, alpha=scale)

    def _zeros(self) -> Tensor:
        if self._kept.gradient is None:
            self._kept.gradient = torch.zeros_like(self.weight)
        return self._kept.gradient.zero_()


@dataclass(slots=True)
class MatrixScores:
    """Log-probabilities, and what their gradient needs."""

    head: MatrixHead
    hidden_NH: Tensor
    targets_N: Tensor
    logprobs_N: Tensor
    gradient_NH: Tensor
    """Of the negative log-probability of each token with regard to its own hidden state."""
    wrong_nV: Tensor | None
    """Of all tokens, where they fit one tile; else it is formed again."""

    def backward(self, weights_N: Tensor) -> Tensor:
        """Adds the weight's gradient; returns the hidden states', of Σ weight × log-probability."""
        self.head.add_weight_gradient(self, weights_N)
        return self.gradient_NH.mul_(-weights_N[:, None].to(self.gradient_NH.dtype))


def matrix_head(head: Any, *, scale: float, softcap: float | None) -> MatrixHead | None:
    """Returns the head as a matrix; None if it is anything else, or not in main memory."""
    if type(head) is not nn.Linear or "bias" in dict(head.named_parameters()):
        return None
    weight = head.weight
    # A sharded parameter holds a tensor of another type.
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return None
    if weight.device.type != "cpu" or not weight.is_floating_point():
        return None
    return MatrixHead(weight, scale=scale, softcap=softcap)
