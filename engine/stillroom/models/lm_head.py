"""Runs the output head at trained positions only, instead of forming logits at all of them.

Shapes: B sequences, T tokens, H hidden size, V vocabulary, N trained tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stillroom.errors import ModelError
from stillroom.models.batches import BatchPass, PassRules, TokenBatch, TokenSequence, collate
from stillroom.models.cpu.gradients import HandGradients, MatrixHead, matrix_head
from stillroom.models.kernels import packed_inputs
from stillroom.models.placement import base_model, body_of, input_device
from stillroom.models.rope import reset_dynamic_frequencies, rope_boundaries, scale_by_positions

MAX_LOGITS = 1 << 27
"""The maximum number of logits in memory at a time, unless one position has more."""

_PROBE_TOKENS = 8
# The tolerance relative to the largest logit; in bf16 and fp16 soft-capping rounds several times.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def max_positions(vocab_size: int) -> int:
    """Returns the maximum number of positions whose logits may be in memory at a time."""
    return max(1, MAX_LOGITS // vocab_size)


class HeadRunner:
    """Runs a causal language model's body, and its output head at chosen positions only.

    The logits are the model's own, with soft-capping (Gemma) and scaling (Cohere, Granite). `check`
    compares them with the model's forward pass, and raises an error for an unsupported head.
    """

    def __init__(self, model: nn.Module) -> None:
        """Patches the RoPE updates and query scaling of `model` in place (see `models.rope`)."""
        self._base = base_model(model)
        self._body = body_of(model)
        self._head = self._base.get_output_embeddings()
        config = self._base.config.get_text_config()
        reset_dynamic_frequencies(self._body)
        scale_by_positions(self._body)
        self.rules = PassRules(boundaries=rope_boundaries(config))
        """Which sequences may share a pass; `choose_passes` sets faster rules."""
        self.accepts_embeddings = True
        """Whether the body accepts embeddings instead of token ids."""
        self.notes: list[str] = []
        """Notes for the user on how rows run: packed on a GPU, or why a slower layout is used."""
        self._softcap = _softcap(config)
        self._scale = _logit_scale(config)
        self._matrix: MatrixHead | None = None

    @property
    def base(self) -> Any:
        """The causal language model, unwrapped from peft."""
        return self._base

    @property
    def can_pack(self) -> bool:
        """Whether the sequences of a batch are packed into one row."""
        return self.rules.layout == "packed"

    def collate(
        self, sequences: Sequence[TokenSequence], *, max_tokens: int | None = None
    ) -> TokenBatch:
        """Collates sequences into one batch, on the device of the body's inputs.

        max_tokens: the maximum number of tokens per pass, where a batch may be split.
        """
        return collate(
            sequences, device=input_device(self._base), rules=self.rules, max_tokens=max_tokens
        )

    @property
    def hand_gradients(self) -> HandGradients | None:
        """The head's hand-written gradients, without autograd; None for an unsupported head."""
        if self._matrix is None or self._matrix.weight is not self._head.weight:
            self._matrix = matrix_head(self._head, scale=self._scale, softcap=self._softcap)
        if self._matrix is None:
            return None
        # Created each time: it refers to this head, and a reference cycle would keep the model
        # alive after its last use.
        embeddings = self._base.get_input_embeddings() if self.accepts_embeddings else None
        return HandGradients(self._matrix, embeddings, self.batch_hidden)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Returns the body's last hidden states, [B, T, H]."""
        return self.run_body(input_ids=ids_BT, use_cache=False)

    def run_body(self, **inputs: Any) -> Tensor:
        """Returns the last hidden states, [B, T, H], for any inputs (cache, mask, positions)."""
        return self._body(**inputs).last_hidden_state

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Returns the logits of hidden states, [N, V], in float32."""
        # With spread: true the head may be on another device.
        logits_NV = self._head(hidden_NH).to(hidden_NH.device).float() * self._scale
        if self._softcap is not None:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def batch_logits(self, batch: TokenBatch) -> Tensor:
        """Returns the logits at the positions that predict the batch's trained tokens, [N, V]."""
        return self.logits(self.batch_hidden(batch))

    def batch_hidden(
        self, batch: TokenBatch, embed: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Returns the hidden states that predict the batch's trained tokens, [N, H].

        embed: returns the embeddings, [B, T, H], of token ids; None: the body embeds them.
        """
        parts = [self._pass_hidden(one_pass, embed) for one_pass in batch.passes]
        if batch.output_indices_N is None:
            return parts[0]
        return torch.cat(parts).index_select(0, batch.output_indices_N)

    def _pass_hidden(
        self, batch_pass: BatchPass, embed: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """Returns the hidden states that predict the trained tokens of one pass."""
        inputs: dict[str, Any] = {"use_cache": False}
        if embed is None:
            inputs["input_ids"] = batch_pass.ids_BT
        else:
            inputs["inputs_embeds"] = embed(batch_pass.ids_BT)
        if batch_pass.pack is not None and batch_pass.positions_BT is not None:
            inputs |= packed_inputs(batch_pass.pack, batch_pass.positions_BT)
        hidden_BTH = self.run_body(**inputs)
        sources_N = batch_pass.sources_N.to(hidden_BTH.device)
        return hidden_BTH.flatten(0, 1).index_select(0, sources_N).to(batch_pass.sources_N.device)

    def batch_logprobs(self, batch: TokenBatch) -> Tensor:
        """Returns the log-probability (nats) of each of the batch's trained tokens, [N].

        Autograd tracks them if gradients are enabled.
        """
        if not torch.is_grad_enabled() and (gradients := self.hand_gradients) is not None:
            return gradients.logprobs(batch)

        def logprobs(hidden_nH: Tensor, part: slice) -> Tensor:
            return token_logprobs(self.logits(hidden_nH), batch.targets_N[part])

        return compute_in_tiles(logprobs, self.batch_hidden(batch), tile_size=self.max_positions)

    @property
    def vocab_size(self) -> int:
        """The number of logits at each position, V."""
        return int(self._base.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int:
        """The maximum number of positions whose logits may be in memory at a time."""
        return max_positions(self.vocab_size)

    @torch.no_grad()
    def check(self) -> None:
        """Raises ModelError unless this head's logits equal those of the model's forward pass."""
        probe_T = torch.arange(_PROBE_TOKENS, device=input_device(self._base))
        ids_BT = probe_T[None] % self.vocab_size
        was_training = self._base.training
        self._base.eval()
        model_NV = self._base(input_ids=ids_BT, use_cache=False).logits[0].float()
        head_NV = self.logits(self.hidden(ids_BT)[0]).to(model_NV.device)
        self._base.train(was_training)
        gap = (model_NV - head_NV).abs().max().item()
        tolerance = _TOLERANCE.get(self._base.dtype, 2e-2)
        if not gap <= tolerance * model_NV.abs().max().item():
            raise ModelError(
                f"{type(self._base).__name__} is not supported: the logits that Stillroom computes "
                f"from its hidden states differ from the model's own by up to {gap:.3g}",
                "use a model of another family (Qwen, Llama, Mistral, Gemma, Phi are tested)",
            )


def compute_in_tiles(
    compute: Callable[[Tensor, slice], Tensor], hidden_NH: Tensor, *, tile_size: int
) -> Tensor:
    """Returns the results of `compute` for each tile of hidden states and its slice, joined.

    tile_size: the number of hidden states per tile. With several tiles, the backward pass
    recomputes a tile's activations instead of keeping them.
    """
    num_positions = hidden_NH.shape[0]
    if num_positions <= tile_size:
        return compute(hidden_NH, slice(0, num_positions))
    # split instead of slices: the gradient of a slice is a tensor of zeros as large as all hidden
    # states.
    parts = [
        checkpoint(
            compute,
            hidden_nH,
            slice(index * tile_size, min(num_positions, (index + 1) * tile_size)),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for index, hidden_nH in enumerate(hidden_NH.split(tile_size))
    ]
    return torch.cat(cast("list[Tensor]", parts))


def _softcap(config: Any) -> float | None:
    """Returns the soft-cap of the logits in a configuration; None if there is none."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None))), None)


def _logit_scale(config: Any) -> float:
    """Returns the factor by which a model's configuration scales logits; 1 if there is none."""
    multiplier = getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", None))
    divisor = getattr(config, "logits_scaling", None)
    return float(multiplier or 1.0) / float(divisor or 1.0)


def token_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Returns the log-probability (nats) of each target, [N]."""
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    return chosen_N - torch.logsumexp(logits_NV, dim=-1)
