"""An in-process teacher that scores the student's tokens.

Shapes: N trained tokens of a batch, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stillroom.models.batches import TokenBatch, TokenSequence, microbatches
from stillroom.models.lm_head import HeadRunner
from stillroom.models.load import LoadedModel
from stillroom.models.probe import choose_passes


class LocalTeacher:
    """Scores given tokens with a frozen transformers model in this process."""

    def __init__(self, loaded: LoadedModel, *, max_batch_tokens: int = 16384) -> None:
        self.loaded = loaded
        self.head = HeadRunner(loaded.model)
        self.head.check()
        choose_passes(self.head)
        self._max_batch_tokens = max_batch_tokens

    def collate(self, sequences: Sequence[TokenSequence]) -> TokenBatch:
        """Returns the sequences as one batch for the model."""
        return self.head.collate(sequences)

    def collate_long(self, sequences: Sequence[TokenSequence]) -> TokenBatch:
        """Returns the sequences as one batch, whose passes are no larger than memory allows."""
        return self.head.collate(sequences, max_tokens=self._max_batch_tokens)

    @torch.no_grad()
    def logits(self, batch: TokenBatch) -> Tensor:
        """Returns the logits that predict the batch's trained tokens, [N, V], without gradient."""
        return self.head.batch_logits(batch)

    @torch.no_grad()
    def score_tokens(self, sequences: Sequence[TokenSequence]) -> list[Tensor]:
        """Returns, for each sequence, the log-probability (nats) of its trained tokens, on CPU."""
        scores: dict[int, Tensor] = {}
        lengths = [len(sequence.ids) for sequence in sequences]
        for group in microbatches(lengths, max_tokens=self._max_batch_tokens):
            batch = self.collate([sequences[i] for i in group])
            logprobs_N = self.head.batch_logprobs(batch).cpu()
            parts = logprobs_N.split([sequences[i].num_trained for i in group])
            scores.update(zip(group, parts, strict=True))
        return [scores[index] for index in range(len(sequences))]
