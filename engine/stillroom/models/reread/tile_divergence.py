"""The reverse KL over next bytes of a batch of rollouts, tile by tile, with its gradient.

Shapes: N sampled tokens of a batch, n of a tile, K tokens of the teacher, V vocabulary, M
comparison points of the batch, m of them with the same symbol set.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stillroom.models.divergence import Divergence
from stillroom.models.reread.byte_chain import (
    NUM_BYTES,
    GradientSums,
    NextSymbols,
    SortedSums,
    TrieNodes,
    point_kl,
    symbol_probabilities,
    trie_nodes,
)
from stillroom.models.reread.comparison_points import SymbolSet
from stillroom.models.reread.rereading import ByteReading

NextSymbolsFunction = Callable[[slice, Sequence[TrieNodes]], NextSymbols]
"""Takes a slice of the teacher's tokens, and the trie nodes at which sums are needed; returns the
teacher's predictions at these tokens."""


class ByteDivergences:
    """The divergence of each sampled token of a batch: the sum over the token's bytes."""

    def __init__(
        self, readings: Sequence[ByteReading], kept: Sequence[int], device: torch.device
    ) -> None:
        """kept: the number of sampled tokens of each sequence in the batch."""
        pair = readings[0].pair
        self._student, self._teacher = pair.student_trie, pair.teacher_trie
        # One entry for each comparison point: its student and its teacher token (numbered over
        # the batch), its symbol and symbol set, both tokens' prefixes, and the teacher's previous
        # token.
        students, teachers, symbols, symbol_sets = [], [], [], []
        prefixes: tuple[list[bytes], list[bytes]] = [], []
        before_words: list[bytes] = []
        # Readings share symbol sets; each is stored once, and found by its identity.
        index_by_id: dict[int, int] = {}
        self._symbol_sets: list[SymbolSet] = []
        # The number of student and teacher tokens of earlier readings.
        before = [0, 0]
        for reading, num_kept in zip(readings, kept, strict=True):
            for point in reading.points:
                symbol_set = reading.symbol_sets.sets[point.symbol_set]
                if id(symbol_set) not in index_by_id:
                    index_by_id[id(symbol_set)] = len(self._symbol_sets)
                    self._symbol_sets.append(symbol_set)
                students.append(before[0] + point.student_token)
                teachers.append(before[1] + point.teacher_token)
                prefixes[0].append(point.student_prefix)
                prefixes[1].append(point.teacher_prefix)
                before_words.append(point.teacher_before)
                symbol_sets.append(index_by_id[id(symbol_set)])
                symbols.append(point.symbol)
            before[0] += num_kept
            before[1] += reading.tokens.num_trained
        self._student_of_M = np.array(students, dtype=np.int64)
        self._teacher_of_M = np.array(teachers, dtype=np.int64)
        self._nodes = [
            trie_nodes(trie, prefix, device)
            for trie, prefix in zip((self._student, self._teacher), prefixes, strict=True)
        ]
        self._before = trie_nodes(self._teacher, before_words, device)
        self._symbols_M = torch.tensor(symbols, dtype=torch.int64, device=device)
        self._symbol_set_of_M = np.array(symbol_sets, dtype=np.int64)
        self._device = device
        self._order_P = torch.from_numpy(self._student.order).to(device)

    def compute_tile(
        self,
        part: slice,
        student_nV: Tensor,
        probabilities_nV: Tensor,
        next_symbols: NextSymbolsFunction,
    ) -> tuple[Divergence, Tensor]:
        """Returns the divergences of a tile's tokens, and sampled estimates of them, both [n].

        An estimate sums log p_student - log p_teacher of the sampled symbols.
        student_nV, probabilities_nV: the student's log-probabilities and probabilities; the
        gradient overwrites the former. next_symbols: called for at most one more teacher token than
        the tile has tokens.
        """
        num_rows = len(probabilities_nV)
        first, end = np.searchsorted(self._student_of_M, [part.start, part.start + num_rows])
        tile = slice(int(first), int(end))
        sums = SortedSums(probabilities_nV, self._order_P, [self._nodes[0][tile]])
        gradients = GradientSums(sums.ranges, num_rows)
        value_n = probabilities_nV.new_zeros(num_rows, dtype=torch.float64)
        gap_n = torch.zeros_like(value_n)
        for start, stop in self._chunks(tile, num_rows):
            # From one token earlier: what follows a token depends on longer tokens in its place.
            low = max(0, self._teacher_of_M[start] - 1)
            high = self._teacher_of_M[stop - 1] + 1
            chunk = slice(start, stop)
            cuts = [self._nodes[1][chunk], self._before[chunk]]
            teacher_symbols = next_symbols(slice(low, high), cuts)
            for index in np.unique(self._symbol_set_of_M[start:stop]):
                points = start + np.nonzero(self._symbol_set_of_M[start:stop] == index)[0]
                points_m = torch.from_numpy(points).to(self._device)
                student_rows_m = torch.from_numpy(self._student_of_M[points] - part.start).to(
                    self._device
                )
                teacher_rows_m = torch.from_numpy(self._teacher_of_M[points] - low).to(self._device)
                symbol_set = self._symbol_sets[index]
                nodes = self._nodes[0][points_m]
                student = symbol_probabilities(
                    sums, student_rows_m, nodes, symbol_set, is_student=True
                )
                teacher = teacher_symbols.probabilities_at(
                    teacher_rows_m,
                    self._nodes[1][points_m],
                    self._before[points_m],
                    symbol_set,
                )
                kl = point_kl(student, teacher)
                gradients.add(student_rows_m, nodes, symbol_set, kl, student)
                value_n.index_add_(0, student_rows_m, kl.value_m)
                columns_m = _columns(self._symbols_M[points_m], symbol_set, kl.is_shared_mS)
                gap_n.index_add_(0, student_rows_m, kl.gaps_mS.gather(1, columns_m[:, None])[:, 0])
        divergence = Divergence(
            value_n.to(probabilities_nV), lambda: gradients.gradient(probabilities_nV, student_nV)
        )
        return divergence, gap_n.to(probabilities_nV)

    def _chunks(self, points: slice, max_tokens: int) -> list[tuple[int, int]]:
        """Splits a slice of points into slices of at most `max_tokens` teacher tokens each."""
        chunks: list[tuple[int, int]] = []
        first, end = points.start, points.stop
        while first < end:
            limit = self._teacher_of_M[first] + max_tokens
            stop = int(np.searchsorted(self._teacher_of_M[first:end], limit)) + first
            chunks.append((first, stop))
            first = stop
        return chunks


def _columns(symbols_m: Tensor, symbol_set: SymbolSet, is_shared_mS: Tensor) -> Tensor:
    """Returns each sampled symbol's column in `PointKl.gaps_mS`; the last if it is not shared."""
    columns_m = symbols_m.clone()
    for index, symbol in enumerate(symbol_set.symbols):
        for byte in symbol.student_bytes:
            columns_m[symbols_m == byte] = NUM_BYTES + index
    others = is_shared_mS.shape[1]
    is_shared = is_shared_mS.gather(1, columns_m.clamp_min(0)[:, None])[:, 0] & (columns_m >= 0)
    return torch.where(is_shared, columns_m, others)
