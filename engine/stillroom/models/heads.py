"""The output head over chosen positions only: logits are formed for trained tokens, never for all.

Shapes: B sequences, T tokens, H hidden size, V vocabulary, N trained tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stillroom.errors import ModelError
from stillroom.models.batches import TokenBatch
from stillroom.models.cpu.matrix_head import MatrixHead, MatrixScores, matrix_head
from stillroom.models.packing import allow_packing, can_pack, packed_inputs
from stillroom.models.placement import input_device

MAX_LOGITS = 1 << 27
"""Logits that are held at a time stay below this many numbers."""

_PROBE_TOKENS = 8
# Of the largest logit; in short number formats soft-capping rounds several times in a row.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def max_positions(vocab_size: int) -> int:
    """Returns how many positions' logits over a vocabulary may be held at a time."""
    return max(1, MAX_LOGITS // vocab_size)


class OutputHead:
    """Runs a causal language model's body and head apart, so that the head sees few positions.

    Follows the model's own head: logit soft-capping (Gemma) and logit scaling (Cohere, Granite).
    `check` compares with the model's own forward pass, so an unknown head is refused, never wrong.
    """

    def __init__(self, model: nn.Module) -> None:
        # A peft model wraps the layers in place, so its base model runs the adapter too.
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
        self._base = base
        self._body = base.get_decoder()
        self._head = base.get_output_embeddings()
        config = base.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = _logit_scale(config)
        self._matrix: MatrixHead | None = None

    @property
    def can_pack(self) -> bool:
        """Whether batches may be packs."""
        return can_pack(self._base)

    def allow_packing(self) -> None:
        """Lets batches be packs from now on, if the model can run them."""
        allow_packing(self._base)

    @property
    def matrix(self) -> MatrixHead | None:
        """The head as a matrix, if it is no more than that and gradients can be formed directly."""
        weight = getattr(self._head, "weight", None)
        if self._matrix is None or self._matrix.weight is not weight:
            self._matrix = matrix_head(self._head, scale=self._scale, softcap=self._softcap)
        return self._matrix

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Returns the body's last hidden states, [B, T, H]."""
        return self.run_body(input_ids=ids_BT, use_cache=False)

    def run_body(self, **inputs: Any) -> Tensor:
        """Returns the body's last hidden states for any of its inputs (cache, mask, positions)."""
        return self._body(**inputs).last_hidden_state

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Returns the logits of chosen hidden states, [N, V], in float32."""
        # A spread model's head may be on another device.
        logits_NV = self._head(hidden_NH).to(hidden_NH.device).float() * self._scale
        if self._softcap is not None:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def batch_logits(self, batch: TokenBatch) -> Tensor:
        """Returns the logits at the positions that predict the batch's trained tokens, [N, V]."""
        return self.logits(self.batch_hidden(batch))

    def embedding_table(self) -> nn.Embedding | None:
        """Returns the trained embeddings, if they are no more than a table of rows."""
        table = self._base.get_input_embeddings()
        is_plain = type(table) is nn.Embedding and table.max_norm is None
        if not is_plain or not table.weight.requires_grad or table.scale_grad_by_freq:
            return None
        return table if type(table.weight.data) is Tensor else None

    def batch_hidden(self, batch: TokenBatch, embedded_BTH: Tensor | None = None) -> Tensor:
        """Returns the hidden states that predict the batch's trained tokens, [N, H].

        `embedded_BTH` are the batch's embedded tokens, if they are at hand.
        """
        given: dict[str, Any] = {"input_ids": batch.ids_BT, "use_cache": False}
        if embedded_BTH is not None:
            given = {"inputs_embeds": embedded_BTH, "use_cache": False}
        if batch.pack is not None and batch.positions_BT is not None:
            given |= packed_inputs(batch.pack, batch.positions_BT)
        hidden_BTH = self.run_body(**given)
        sources_N = batch.sources_N.to(hidden_BTH.device)
        return hidden_BTH.flatten(0, 1).index_select(0, sources_N).to(batch.sources_N.device)

    def score(self, batch: TokenBatch) -> "Scores":
        """Returns the log-probabilities of the batch's trained tokens, for one backward pass."""
        matrix = self.matrix
        if matrix is None or not torch.is_grad_enabled():
            return Scores(self.batch_logprobs(batch))
        run = _BodyRun(self, batch)
        scores = matrix.score(run.hidden_NH.detach(), batch.targets_N)
        return Scores(scores.logprobs_N.requires_grad_(), run, scores)

    def add_nll_gradient(self, batch: TokenBatch, *, scale: float) -> float:
        """Adds the gradient of `scale` × the trained tokens' summed negative log-likelihood.

        Returns the sum (nats, not scaled). Only for heads with a `matrix`.
        """
        if self.matrix is None:
            raise ValueError("the head is no matrix")
        run = _BodyRun(self, batch)
        logprobs_N, gradient_NH = self.matrix.add_nll_gradient(
            run.hidden_NH.detach(), batch.targets_N, scale=scale
        )
        run.backward(gradient_NH)
        return -logprobs_N.sum().item()

    def add_gradient(
        self, batch: TokenBatch, learn: Callable[[slice, Tensor], Tensor], *, most: int
    ) -> None:
        """Adds the gradient of any loss of the batch's trained tokens, tile by tile.

        `learn` returns the loss's gradient with regard to a tile's logits, which it gets with the
        slice of the trained tokens that they predict. Only for heads with a `matrix`.
        """
        if self.matrix is None:
            raise ValueError("the head is no matrix")
        run = _BodyRun(self, batch)
        run.backward(self.matrix.add_gradient(run.hidden_NH.detach(), learn, most=most))

    def batch_logprobs(self, batch: TokenBatch) -> Tensor:
        """Returns the log-probability (nats) of each of the batch's trained tokens, [N]."""

        if self.matrix is not None and not torch.is_grad_enabled():
            return self.matrix.logprobs(self.batch_hidden(batch), batch.targets_N)

        def logprobs(hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
            return token_logprobs(self.logits(hidden_NH), targets_N)

        hidden_NH = self.batch_hidden(batch)
        return in_tiles(logprobs, hidden_NH, batch.targets_N, most=self.max_positions)

    @property
    def max_positions(self) -> int:
        """How many positions' logits may be held at a time."""
        return max_positions(int(self._base.config.get_text_config().vocab_size))

    @torch.no_grad()
    def check(self) -> None:
        """Raises ModelError if this head's logits are not those of the model's own forward pass."""
        vocabulary = int(self._base.config.get_text_config().vocab_size)
        ids_BT = torch.arange(_PROBE_TOKENS, device=input_device(self._base))[None] % vocabulary
        was_training = self._base.training
        self._base.eval()
        own_NV = self._base(input_ids=ids_BT, use_cache=False).logits[0].float()
        ours_NV = self.logits(self.hidden(ids_BT)[0]).to(own_NV.device)
        self._base.train(was_training)
        gap = (own_NV - ours_NV).abs().max().item()
        tolerance = _TOLERANCE.get(self._base.dtype, 2e-2)
        if not gap <= tolerance * own_NV.abs().max().item():
            raise ModelError(
                f"{type(self._base).__name__} forms its logits in a way that is not known here "
                f"(they differ by {gap:.3g})",
                "use a model of another family (Qwen, Llama, Mistral, Gemma, Phi are tested)",
            )


class _BodyRun:
    """A forward pass of the body, whose gradient is given by hand.

    That of the embeddings is added row by row: autograd would form one as large as the vocabulary.
    """

    def __init__(self, head: OutputHead, batch: TokenBatch) -> None:
        self._ids_BT = batch.ids_BT
        self._table = head.embedding_table()
        self._embedded_BTH: Tensor | None = None
        if self._table is not None:
            embedded_BTH = nn.functional.embedding(batch.ids_BT, self._table.weight.detach())
            self._embedded_BTH = embedded_BTH.requires_grad_()
        self.hidden_NH = head.batch_hidden(batch, self._embedded_BTH)

    def backward(self, gradient_NH: Tensor) -> None:
        """Adds the gradients of the body's parameters."""
        self.hidden_NH.backward(gradient_NH)
        if self._table is None or self._embedded_BTH is None or self._embedded_BTH.grad is None:
            return
        gradient_PH = self._embedded_BTH.grad.flatten(0, 1)
        ids_P = self._ids_BT.flatten()
        if self._table.padding_idx is not None:
            # As in torch: the padding token's row is not trained by what it stands for.
            gradient_PH[ids_P == self._table.padding_idx] = 0
        weight: Tensor = self._table.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids_P, gradient_PH)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities to build a loss on; after its backward pass comes theirs."""

    logprobs_N: Tensor
    _run: _BodyRun | None = None
    _matrix: MatrixScores | None = None

    def backward(self) -> None:
        """Hands the loss's gradient on to the model; once, after `loss.backward()`."""
        if self._run is None or self._matrix is None:
            return
        weights_N = self.logprobs_N.grad
        if weights_N is not None:
            self._run.backward(self._matrix.backward(weights_N))


def in_tiles(compute: Callable[..., Tensor], *inputs: Tensor, most: int) -> Tensor:
    """Returns `compute` of the inputs' rows, at most so many at a time.

    Beyond one tile, what a tile needs for its gradient is not held but computed again.
    """
    if inputs[0].shape[0] <= most:
        return compute(*inputs)
    tiles = zip(*(tensor.split(most) for tensor in inputs), strict=True)
    parts = [
        checkpoint(compute, *tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles
    ]
    return torch.cat(cast("list[Tensor]", parts))


def _logit_scale(config: Any) -> float:
    """Returns the factor of the model's logits: Cohere multiplies, Granite divides."""
    multiplier = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(multiplier or 1.0) / float(divisor or 1.0)


def token_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Returns the log-probability (nats) of each target, [N]."""
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    return chosen_N - torch.logsumexp(logits_NV, dim=-1)
