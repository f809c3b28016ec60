"""Building the demo's models and fitting them to examples: one small training loop.

Shapes: B batch, T tokens, H hidden, V vocabulary, N trained tokens of the batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo_models.curriculum import TrainingExample

_BATCHES_PER_BUCKET = 16
_WARMUP_STEPS = 50
_MIN_LEARNING_RATE_SHARE = 0.05
"""The share of the peak learning rate that is left at the last step."""
_NUM_LAST_LOSSES = 100


@dataclass(frozen=True, slots=True)
class FitReport:
    """The size of one training and its final loss."""

    steps: int
    tokens_read: int
    tokens_trained: int
    final_loss: float
    """The mean over the last steps, in nats per trained token."""


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, num_layers: int, max_length: int, seed: int
) -> Qwen3ForCausalLM:
    """Returns a model with random weights.

    The wide initial spread (0.15, not transformers' 0.02) makes copying emerge early.
    """
    torch.manual_seed(seed)
    marks: Any = tokenizer
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_length,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=marks.eos_token_id,
        pad_token_id=marks.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def deepen(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_layers: int, seed: int
) -> Qwen3ForCausalLM:
    """Returns a deeper model that computes the same function.

    The new layers are spread evenly behind the first one. Their output projections start at zero,
    so they add nothing yet.
    """
    deeper = build_model(
        tokenizer,
        num_layers=num_layers,
        max_length=model.config.max_position_embeddings,
        seed=seed,
    )
    old_layers: Any = model.model.layers
    new_layers: Any = deeper.model.layers
    for layer in new_layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    for index, layer in enumerate(old_layers):
        new_layers[index * num_layers // len(old_layers)].load_state_dict(layer.state_dict())
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    return deeper


def shuffled_batches(
    examples: Sequence[TrainingExample], *, batch_size: int, seed: int
) -> Iterator[list[TrainingExample]]:
    """Yields full batches for ever, each of examples of about the same length."""
    rng = Random(seed)
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), batch_size * _BATCHES_PER_BUCKET):
            bucket = order[start : start + batch_size * _BATCHES_PER_BUCKET]
            bucket.sort(key=lambda example: len(example.ids))
            starts = range(0, len(bucket) - batch_size + 1, batch_size)
            for batch_start in rng.sample(starts, len(starts)):
                yield bucket[batch_start : batch_start + batch_size]


def fit(
    model: Qwen3ForCausalLM,
    batches: Iterable[Sequence[TrainingExample]],
    *,
    num_steps: int,
    peak_learning_rate: float,
) -> FitReport:
    """Trains the model in place, one step per batch, and returns the figures of the training."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    tokens_read = tokens_trained = 0
    model.train()
    for step, batch in enumerate(islice(batches, num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * _schedule(step, num_steps)
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        tokens_read += sum(len(example.ids) for example in batch)
        tokens_trained += sum(sum(example.is_trained) for example in batch)
    model.eval()
    last = losses[-_NUM_LAST_LOSSES:]
    return FitReport(len(losses), tokens_read, tokens_trained, sum(last) / len(last))


def _schedule(step: int, num_steps: int) -> float:
    """Returns the share of the peak learning rate: a short warm-up, then half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (
        _MIN_LEARNING_RATE_SHARE + (1 - _MIN_LEARNING_RATE_SHARE) * cosine
    )


def _loss(model: Qwen3ForCausalLM, batch: Sequence[TrainingExample]) -> Tensor:
    """Returns the mean cross-entropy, in nats, over the tokens that are trained on.

    Rows are padded on the right, where a causal model cannot see the padding, so no attention mask
    is needed. Logits are computed only where the next token is trained on.
    """
    ids_BT = pad_sequence(
        [torch.tensor(example.ids) for example in batch], batch_first=True, padding_value=0
    )
    mask_BT = pad_sequence(
        [torch.tensor(example.is_trained) for example in batch], batch_first=True
    )
    rows_N, columns_N = mask_BT[:, 1:].nonzero(as_tuple=True)
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTH[rows_N, columns_N])
    return functional.cross_entropy(logits_NV, ids_BT[rows_N, columns_N + 1])
