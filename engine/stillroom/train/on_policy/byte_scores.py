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
from stillroom.models.reread.listed_tokens import ListedTokens
from stillroom.models.reread.rereading import ByteReading
from stillroom.models.reread.tile_divergence import ByteDivergences, NextSymbolsOf
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.scores import TeacherScores
from stillroom.train.on_policy.token_scores import Losses, add_gradient
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
    symbols = _SymbolsHere(teacher, readings, batch.targets_N.device)
    tile_size = min(student.head.max_positions, teacher.head.max_positions)
    scorer = _ByteScorer(batch, readings, symbols)
    add_gradient(student, scorer, batch, losses, tile_size=tile_size)


def add_gradient_with_listed_tokens(
    student: Student,
    teacher_scores: Sequence[TeacherScores],
    batch: TokenBatch,
    readings: Sequence[ByteReading],
    losses: Losses,
) -> None:
    """Adds the gradient of the losses' sum; a server has listed the teacher's likeliest tokens.

    teacher_scores: of each of the readings' trained tokens.
    """
    listed = listed_tokens(teacher_scores, readings, batch.targets_N.device)

    def symbols(part: slice, _: Sequence[TriePlaces]) -> NextSymbols:
        return listed.part(part)

    add_gradient(student, _ByteScorer(batch, readings, symbols), batch, losses)


def listed_tokens(
    teacher_scores: Sequence[TeacherScores], readings: Sequence[ByteReading], device: torch.device
) -> ListedTokens:
    """Returns what a server listed at each trained token of some readings, in their order."""
    listed: list[tuple[list[int], list[float]]] = []
    own: list[tuple[int, float]] = []
    for scores, reading in zip(teacher_scores, readings, strict=True):
        tokens = reading.tokens
        ids = [i for i, is_own in zip(tokens.ids, tokens.trained, strict=True) if is_own]
        own += zip(ids, scores.logprobs, strict=True)
        listed += zip(scores.top_ids or [], scores.top_logprobs or [], strict=True)
    return ListedTokens.of(listed, own, readings[0].pair.teacher_trie, device)


class _ByteScorer:
    """A teacher with a tokenizer or a chat template of its own."""

    needs_distribution = True
    is_baseline = False

    def __init__(
        self,
        batch: TokenBatch,
        readings: Sequence[ByteReading],
        next_symbols: NextSymbolsOf,
    ) -> None:
        """`next_symbols` returns what the teacher says at some of the readings' trained tokens."""
        self._targets_N, self._next_symbols = batch.targets_N, next_symbols
        kept = torch.bincount(batch.rows_N, minlength=len(readings)).tolist()
        self._divergences = ByteDivergences(readings, kept, batch.targets_N.device)

    def num_columns(self, vocab_size: int) -> int:
        return vocab_size

    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        divergence, gap_n = self._divergences.of_tile(
            part, student_nV, probabilities_nV, self._next_symbols
        )
        student_n = student_nV.gather(1, self._targets_N[part, None])[:, 0]
        return TeacherTile(student_n - gap_n, divergence, entropy(student_nV, probabilities_nV))


class _SymbolsHere:
    """The next symbols of a teacher in this process."""

    def __init__(
        self, teacher: LocalTeacher, readings: Sequence[ByteReading], device: torch.device
    ) -> None:
        self._head = teacher.head
        self._order_P = torch.from_numpy(readings[0].pair.teacher_trie.order).to(device)
        with torch.no_grad():
            teacher_batch = teacher.collate([reading.tokens for reading in readings])
            self._hidden_KH = teacher.head.batch_hidden(teacher_batch).to(device)

    def __call__(self, part: slice, cuts: Sequence[TriePlaces]) -> NextSymbols:
        """Returns the symbols at some of the teacher's positions."""
        hidden_kH = self._hidden_KH[part]
        if (by_hand := self._head.by_hand) is not None:
            probabilities_kV = by_hand.probabilities_of_tile(hidden_kH)
        else:
            probabilities_kV = self._head.logits(hidden_kH).softmax(dim=-1)
        return SummedSymbols(SortedSums(probabilities_kV, self._order_P, cuts))
