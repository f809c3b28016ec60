"""The reverse KL over next bytes of a batch of rollouts, tile by tile, with its gradient.

Shapes: N sampled tokens of a batch, n of a tile, K tokens of the teacher, V vocabulary, M units.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stillroom.models.divergence import Divergence
from stillroom.models.reread.byte_chain import (
    NUM_BYTES,
    NextSymbols,
    SlopeSums,
    SortedSums,
    TriePlaces,
    side_symbols,
    trie_places,
    unit_kl,
)
from stillroom.models.reread.byte_units import Choice
from stillroom.models.reread.rereading import ByteReading

NextSymbolsOf = Callable[[slice, Sequence[TriePlaces]], NextSymbols]
"""Takes a slice of the teacher's tokens and positions in its trie, and returns its predictions
there."""


class ByteDivergences:
    """The divergence of each sampled token of a batch: the sum over the token's bytes."""

    def __init__(
        self, readings: Sequence[ByteReading], kept: Sequence[int], device: torch.device
    ) -> None:
        """kept: the number of sampled tokens of each sequence in the batch."""
        pair = readings[0].pair
        self._student, self._teacher = pair.student_trie, pair.teacher_trie
        students, teachers, symbols, choices = [], [], [], []
        prefixes: tuple[list[bytes], list[bytes]] = [], []
        before_words: list[bytes] = []
        known: dict[int, int] = {}
        self._choices: list[Choice] = []
        before = [0, 0]
        for reading, num_kept in zip(readings, kept, strict=True):
            for unit in reading.units:
                choice = reading.choices.known[unit.choice]
                if id(choice) not in known:
                    known[id(choice)] = len(self._choices)
                    self._choices.append(choice)
                students.append(before[0] + unit.student_token)
                teachers.append(before[1] + unit.teacher_token)
                prefixes[0].append(unit.student_prefix)
                prefixes[1].append(unit.teacher_prefix)
                before_words.append(unit.teacher_before)
                choices.append(known[id(choice)])
                symbols.append(unit.symbol)
            before[0] += num_kept
            before[1] += reading.tokens.num_trained
        self._student_of_M = np.array(students, dtype=np.int64)
        self._teacher_of_M = np.array(teachers, dtype=np.int64)
        self._places = [
            trie_places(trie, prefix, device)
            for trie, prefix in zip((self._student, self._teacher), prefixes, strict=True)
        ]
        self._before = trie_places(self._teacher, before_words, device)
        self._symbols_M = torch.tensor(symbols, dtype=torch.int64, device=device)
        self._choice_of_M = np.array(choices, dtype=np.int64)
        self._device = device
        self._order_P = torch.from_numpy(self._student.order).to(device)

    def of_tile(
        self,
        part: slice,
        student_nV: Tensor,
        probabilities_nV: Tensor,
        next_symbols: NextSymbolsOf,
    ) -> tuple[Divergence, Tensor]:
        """Returns the divergences of a tile's tokens, and sampled estimates of them, both [n].

        An estimate is the sum of log p_student - log p_teacher of what was sampled.
        student_nV, probabilities_nV: the student's log-probabilities and probabilities; the
        gradient overwrites the former. next_symbols: called with at most one more teacher token
        at a time than the tile has.
        """
        num_rows = len(probabilities_nV)
        first, end = np.searchsorted(self._student_of_M, [part.start, part.start + num_rows])
        tile = slice(int(first), int(end))
        ours = SortedSums(probabilities_nV, self._order_P, [self._places[0].part(tile)])
        slopes = SlopeSums(ours.ranges, num_rows)
        value_n = probabilities_nV.new_zeros(num_rows, dtype=torch.float64)
        gap_n = torch.zeros_like(value_n)
        for start, stop in self._chunks(tile, num_rows):
            # One more, because a token's end depends on alternatives to the previous token.
            low = max(0, self._teacher_of_M[start] - 1)
            high = self._teacher_of_M[stop - 1] + 1
            chunk = slice(start, stop)
            cuts = [self._places[1].part(chunk), self._before.part(chunk)]
            symbols_of_teacher = next_symbols(slice(low, high), cuts)
            for choice in np.unique(self._choice_of_M[start:stop]):
                units = start + np.nonzero(self._choice_of_M[start:stop] == choice)[0]
                units_m = torch.from_numpy(units).to(self._device)
                rows_m = torch.from_numpy(self._student_of_M[units] - part.start).to(self._device)
                others_m = torch.from_numpy(self._teacher_of_M[units] - low).to(self._device)
                chosen = self._choices[choice]
                places = self._places[0].rows(units_m)
                student = side_symbols(ours, rows_m, places, chosen, is_student=True)
                teacher = symbols_of_teacher.at(
                    others_m, self._places[1].rows(units_m), self._before.rows(units_m), chosen
                )
                kl = unit_kl(student, teacher)
                slopes.add(rows_m, places, chosen, kl, student)
                value_n.index_add_(0, rows_m, kl.value_m)
                columns_m = _columns(self._symbols_M[units_m], chosen, kl.is_shared_mS)
                gap_n.index_add_(0, rows_m, kl.gaps_mS.gather(1, columns_m[:, None])[:, 0])
        divergence = Divergence(
            value_n.to(probabilities_nV), lambda: slopes.gradient(probabilities_nV, student_nV)
        )
        return divergence, gap_n.to(probabilities_nV)

    def _chunks(self, units: slice, most: int) -> list[tuple[int, int]]:
        """Returns slices of the units that read at most `most` teacher tokens each."""
        chunks: list[tuple[int, int]] = []
        first, end = units.start, units.stop
        while first < end:
            limit = self._teacher_of_M[first] + most
            stop = int(np.searchsorted(self._teacher_of_M[first:end], limit)) + first
            chunks.append((first, stop))
            first = stop
        return chunks


def _columns(symbols_m: Tensor, choice: Choice, is_shared_mS: Tensor) -> Tensor:
    """Returns the column of each sampled symbol: its own, or the one for all others."""
    columns_m = symbols_m.clone()
    for index, symbol in enumerate(choice.symbols):
        for letter in symbol.student_bytes:
            columns_m[symbols_m == letter] = NUM_BYTES + index
    others = is_shared_mS.shape[1]
    is_shared = is_shared_mS.gather(1, columns_m.clamp_min(0)[:, None])[:, 0] & (columns_m >= 0)
    return torch.where(is_shared, columns_m, others)
