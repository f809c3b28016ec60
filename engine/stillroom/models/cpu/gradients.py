"""Hand-written gradients for models on the CPU; other packages import only this module.

Everywhere else, and for unsupported models, autograd computes the gradients.
`HeadRunner.hand_gradients` is a `HandGradients` for supported models, else None.

Their purpose is speed without a GPU. With a vocabulary of 152k and a hidden size of
256 (benchmarks/on_policy, full reverse KL) an update by autograd takes 1.40 times the CPU time
(12.5 s against 8.9 to 9.6 s) and peaks at 2.5 GB of memory instead of 2.0 GB.
Shapes: B sequences, T tokens, N trained tokens of a batch, n of a tile, H hidden size, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.models.batches import TokenBatch
from stillroom.models.cpu.matrix_head import TILE_LOGITS, MatrixHead, MatrixScores, matrix_head
from stillroom.models.divergence import Divergence, TokenScores

__all__ = ["HandGradients", "MatrixHead", "TeacherTile", "matrix_head", "tile_positions"]

# A loss of two distributions holds four buffers of a tile's size, so its tiles are smaller.
_LOSS_TILE_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class TeacherTile:
    """A teacher's scores of a tile's tokens, and its divergence from the student."""

    logprobs_n: Tensor
    """The teacher's log-probabilities (nats) of the sampled tokens, [n]."""
    divergence: Divergence | None = None
    entropy_n: Tensor | None = None
    """The entropy (nats) of the student's distributions, [n]; None to estimate it by the negative
    log-probability of the token."""


def tile_positions(vocab_size: int) -> int:
    """Returns the number of positions per tile."""
    return max(1, TILE_LOGITS // vocab_size)


@dataclass(frozen=True, slots=True)
class HandGradients:
    """A language model on the CPU whose output head's gradient is computed without autograd."""

    matrix: MatrixHead
    embeddings: nn.Module | None
    """The token embeddings, if their gradient is hand-written too; None: by autograd."""
    batch_hidden: Callable[[TokenBatch, Callable[[Tensor], Tensor] | None], Tensor]
    """The function that returns the hidden states that predict a batch's trained tokens, [N, H];
    its second argument embeds token ids, or is None."""

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Returns the log-probabilities (nats) of the batch's trained tokens, [N].

        They carry a gradient if gradients are enabled, for a single backward pass.
        """
        if not torch.is_grad_enabled():
            return self.matrix.logprobs(self.batch_hidden(batch, None), batch.targets_N)
        return _TokenLogprobs.apply(self._hidden(batch), batch.targets_N, self.matrix)

    def add_nll_gradient(self, batch: TokenBatch, *, scale: float) -> float:
        """Adds the gradient of `scale` × the summed negative log-likelihood of the trained tokens.

        Returns the unscaled sum (nats).
        """
        hidden_NH = self._hidden(batch)
        logprobs_N, gradient_NH = self.matrix.add_nll_gradient(
            hidden_NH.detach(), batch.targets_N, scale=scale
        )
        hidden_NH.backward(gradient_NH)
        return -logprobs_N.sum().item()

    def add_loss_gradient(
        self,
        batch: TokenBatch,
        compare: Callable[[slice, Tensor, Tensor], TeacherTile],
        losses: Callable[[slice, TokenScores], Tensor],
    ) -> None:
        """Adds the gradient of a sum of per-token losses, tile by tile.

        compare: takes a tile's slice of the trained tokens, the student's log-probabilities and its
        probabilities, both [n, V], and returns the teacher's scores.
        losses: takes the tile's slice and its scores, and returns the losses, [n].
        """

        def logit_gradient(part: slice, logits_nV: Tensor) -> Tensor:
            """Returns the gradient with respect to a tile's logits, which it overwrites."""
            student_nV = _log_softmax_in_place(logits_nV)
            probabilities_nV = student_nV.exp()
            targets_n1 = batch.targets_N[part, None]
            teacher = compare(part, student_nV, probabilities_nV)
            student_n = student_nV.gather(1, targets_n1)[:, 0].requires_grad_()
            divergence_n = torch.zeros_like(student_n, requires_grad=True)
            if teacher.divergence is not None:
                divergence_n = teacher.divergence.value_N.detach().requires_grad_()
            entropy_n = -student_n.detach() if teacher.entropy_n is None else teacher.entropy_n
            # Autograd differentiates the losses themselves, which are a few numbers per token.
            with torch.enable_grad():
                scores = TokenScores(student_n, teacher.logprobs_n, divergence_n, entropy_n)
                losses(part, scores).sum().backward()
            token_gradient_n1 = None if student_n.grad is None else student_n.grad[:, None]
            if teacher.divergence is None or divergence_n.grad is None:
                gradient_nV = probabilities_nV
                gradient_nV.mul_(0.0 if token_gradient_n1 is None else -token_gradient_n1)
            else:
                gradient_nV = teacher.divergence.compute_gradient().mul_(divergence_n.grad[:, None])
                if token_gradient_n1 is not None:
                    gradient_nV.addcmul_(probabilities_nV, token_gradient_n1, value=-1.0)
            if token_gradient_n1 is not None:
                gradient_nV.scatter_add_(1, targets_n1, token_gradient_n1)
            return gradient_nV

        hidden_NH = self._hidden(batch)
        gradient_NH = self.matrix.add_gradient(
            hidden_NH.detach(), logit_gradient, tile_logits=_LOSS_TILE_LOGITS
        )
        hidden_NH.backward(gradient_NH)

    def logprobs_of_tile(self, hidden_nH: Tensor) -> Tensor:
        """Returns the vocabulary's log-probabilities, [n, V]; the next tile overwrites them."""
        return _log_softmax_in_place(self.matrix.logits(hidden_nH))

    def probabilities_of_tile(self, hidden_nH: Tensor) -> Tensor:
        """Returns the probabilities over the vocabulary, [n, V]; the next tile overwrites them."""
        logits_nV = self.matrix.logits(hidden_nH)
        return torch.softmax(logits_nV, -1, out=logits_nV)

    def _hidden(self, batch: TokenBatch) -> Tensor:
        """Returns the hidden states that predict the batch's trained tokens, with gradient.

        The gradient of the embeddings is added row by row in the backward pass: autograd would
        allocate one as large as the vocabulary.
        """
        table = _plain_table(self.embeddings)
        return self.batch_hidden(batch, None if table is None else partial(_embed, table))


def _embed(table: nn.Embedding, ids_BT: Tensor) -> Tensor:
    """Returns embeddings, [B, T, H], whose backward pass adds to the table's gradient by row."""
    embedded_BTH = nn.functional.embedding(ids_BT, table.weight.detach())
    embedded_BTH.requires_grad_()

    def add_rows(embedded_BTH: Tensor) -> None:
        gradient_BTH = embedded_BTH.grad
        if gradient_BTH is None:
            return
        gradient_PH, ids_P = gradient_BTH.flatten(0, 1), ids_BT.flatten()
        if table.padding_idx is not None:
            # As in torch, the row of the padding token is not trained.
            gradient_PH[ids_P == table.padding_idx] = 0
        weight: Tensor = table.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids_P, gradient_PH)

    embedded_BTH.register_post_accumulate_grad_hook(add_rows)
    return embedded_BTH


class _TokenLogprobs(torch.autograd.Function):
    """Makes a `MatrixHead`'s log-probabilities differentiable with respect to hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, targets_N: Tensor, matrix: MatrixHead) -> Tensor:
        scores = matrix.score(hidden_NH, targets_N)
        ctx.matrix, ctx.scores = matrix, scores
        return scores.logprobs_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor) -> tuple[Tensor, None, None]:
        matrix: MatrixHead = ctx.matrix
        scores: MatrixScores = ctx.scores
        return matrix.score_gradient(scores, grads_N[0]), None, None


def _plain_table(embeddings: nn.Module | None) -> nn.Embedding | None:
    """Returns the embeddings if they are trained and a plain embedding table, else None."""
    if type(embeddings) is not nn.Embedding or embeddings.max_norm is not None:
        return None
    if not embeddings.weight.requires_grad or embeddings.scale_grad_by_freq:
        return None
    return embeddings if type(embeddings.weight.data) is Tensor else None


def _log_softmax_in_place(logits_nV: Tensor) -> Tensor:
    # logsumexp and a subtraction would take three times as long, and a buffer.
    return torch.log_softmax(logits_nV, -1, out=logits_nV)
