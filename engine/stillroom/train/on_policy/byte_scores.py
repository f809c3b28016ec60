"""The scores of sampled tokens by a teacher that reads the student's text in tokens of its own.

Shapes: N sampled tokens of a microbatch, n of a tile, K tokens of the teacher, k of a tile of
them, H hidden size, V vocabulary, P tokens of the teacher's trie.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stillroom.models.batches import TokenBatch
from stillroom.models.cpu.gradients import TeacherTile
from stillroom.models.divergence import entropy
from stillroom.models.reread.byte_chain import (
    NextSymbols,
    SortedSums,
    SummedSymbols,
    TriePlaces,
)
from stillroom.models.reread.rereading import ByteReading
from stillroom.models.reread.tile_divergence import ByteDivergences
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.on_policy.token_scores import Losses, score_by_autograd
from stillroom.train.student.model import Student


def add_gradient_with_reader(
    student: Student,
    teacher: LocalTeacher,
    batch: TokenBatch,
    readings: Sequence[ByteReading],
    losses: Losses,
) -> None:
    """Adds the gradient of the losses' sum; the divergence of a token is that of its bytes.

    readings: the batch's sequences, in order, as the teacher reads them.
    """
    scorer = _ByteScorer(teacher, batch, readings)
    if (by_hand := student.by_hand) is not None:
        by_hand.add_loss_gradient(batch, scorer.compare, losses)
        return
    tile_size = min(student.head.max_positions, teacher.head.max_positions)
    scores = score_by_autograd(student, scorer, batch, tile_size)
    losses(slice(0, batch.num_trained), scores).sum().backward()


class _ByteScorer:
    """A teacher in this process, with a tokenizer or a chat template of its own."""

    needs_distribution = True
    is_baseline = False

    def __init__(
        self, teacher: LocalTeacher, batch: TokenBatch, readings: Sequence[ByteReading]
    ) -> None:
        self._head, self._by_hand = teacher.head, teacher.head.by_hand
        self._targets_N = batch.targets_N
        device = batch.targets_N.device
        kept = torch.bincount(batch.rows_N, minlength=len(readings)).tolist()
        self._divergences = ByteDivergences(readings, kept, device)
        self._order_P = torch.from_numpy(readings[0].pair.teacher_trie.order).to(device)
        with torch.no_grad():
            teacher_batch = teacher.collate([reading.tokens for reading in readings])
            self._hidden_KH = teacher.head.batch_hidden(teacher_batch).to(device)

    def num_columns(self, vocab_size: int) -> int:
        return vocab_size

    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        divergence, gap_n = self._divergences.of_tile(
            part, student_nV, probabilities_nV, self._symbols
        )
        student_n = student_nV.gather(1, self._targets_N[part, None])[:, 0]
        return TeacherTile(student_n - gap_n, divergence, entropy(student_nV, probabilities_nV))

    def _symbols(self, part: slice, cuts: Sequence[TriePlaces]) -> NextSymbols:
        """Returns the teacher's next symbols at some of its positions."""
        hidden_kH = self._hidden_KH[part]
        if self._by_hand is not None:
            probabilities_kV = self._by_hand.probabilities_of_tile(hidden_kH)
        else:
            probabilities_kV = self._head.logits(hidden_kH).softmax(dim=-1)
        return SummedSymbols(SortedSums(probabilities_kV, self._order_P, cuts))
