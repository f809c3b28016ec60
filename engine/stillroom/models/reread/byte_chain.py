"""The reverse KL over next bytes, between two models with different tokenizers on the same text.

At each position of a turn (a `ComparisonPoint`) a model's next-token probabilities are summed into
next-byte probabilities, given the bytes of the current token that are already fixed; ends of turns
and openings of calls are symbols in addition to the 256 bytes. Symbols that only one model
distinguishes count as one. This assumes each tokenizer's own segmentation; other ways of splitting
the same text have almost no probability.
Shapes: n positions of a tile, V vocabulary, P tokens of a trie (sorted), R ranges of them, M
comparison points of a batch, m of them with the same symbol set, S symbols.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stillroom.models.placement import to_float64
from stillroom.models.reread.comparison_points import SymbolSet
from stillroom.models.reread.token_bytes import ByteTrie

MIN_PROBABILITY = 1e-7
"""The minimum probability of a symbol, so that one symbol costs at most 16 nats."""
NUM_BYTES = 256
_SMALL_VOCABULARY = 2048
"""With a smaller vocabulary, summing row by row is slower on the CPU: 36 µs a row for the demo's
569 tokens, against 5; with 152k tokens it takes 0.26 ms against 2.7."""


@dataclass(frozen=True, slots=True)
class TrieNodes:
    """The trie nodes of comparison points for one model, one entry per point (see `TrieNode`).

    The fields have M entries for all points of a batch; after indexing, one per selected point.
    """

    low_M: Tensor
    high_M: Tensor
    """The sorted tokens that begin with the point's prefix are `low` to `high`."""
    starts_M: Tensor
    """The first sorted token that continues with each byte, and the end, [M, 257]."""
    is_root_M: Tensor
    """Whether the prefix is empty, so that any token may follow."""

    def __getitem__(self, points: slice | Tensor) -> "TrieNodes":
        """Returns the entries of some points, given by a slice or by their indices."""
        return TrieNodes(
            self.low_M[points], self.high_M[points], self.starts_M[points], self.is_root_M[points]
        )


def trie_nodes(trie: ByteTrie, prefixes: Sequence[bytes], device: torch.device) -> TrieNodes:
    """Returns the trie nodes of comparison points, as tensors.

    prefixes: the bytes of each point's token before the point.
    """
    index = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
    distinct = [trie.node(prefix) for prefix in index]
    node_of_point = np.array([index[prefix] for prefix in prefixes], dtype=np.int64)
    starts = (
        np.stack([node.starts for node in distinct]) if distinct else np.zeros((0, 257), np.int32)
    )
    bounds = np.array([(node.low, node.high) for node in distinct], dtype=np.int64).reshape(-1, 2)
    return TrieNodes(
        torch.from_numpy(bounds[node_of_point, 0]).to(device),
        torch.from_numpy(bounds[node_of_point, 1]).to(device),
        torch.from_numpy(starts[node_of_point]).to(device),
        torch.tensor([not prefix for prefix in prefixes], dtype=torch.bool, device=device),
    )


class TokenRanges:
    """Ranges of sorted tokens, split wherever a sum for a comparison point begins or ends.

    A tile's points need few of the possible sums, so that everything after one pass over the
    probabilities works on R ranges; markers, which are not text, are in no range.
    """

    def __init__(self, order_P: Tensor, vocab_size: int, cuts: Sequence[TrieNodes] | None) -> None:
        """cuts: the trie nodes of the points; None to make every token a range of its own."""
        num_sorted = len(order_P)
        is_cut = torch.full((num_sorted + 1,), cuts is None, device=order_P.device)
        is_cut[0] = is_cut[num_sorted] = True
        for nodes in cuts or ():
            for positions in (nodes.starts_M, nodes.low_M, nodes.high_M):
                is_cut[positions.flatten().long()] = True
        self.order_P = order_P
        self.range_of_P = is_cut.cumsum(0) - 1
        """The index of the range that holds each sorted token, and R for the end, [P + 1]."""
        self.first_R = is_cut.nonzero()[:-1, 0]
        """The first sorted token of each range."""
        self.range_of_token_V = torch.full((vocab_size,), len(self.first_R), device=order_P.device)
        """The index of each token's range; R for tokens that are not text."""
        self.range_of_token_V[order_P] = self.range_of_P[:-1]

    def __len__(self) -> int:
        return len(self.first_R)


class SortedSums:
    """Cumulative sums of a tile's probabilities, over the tokens sorted by their bytes."""

    def __init__(
        self,
        probabilities_nV: Tensor,
        order_P: Tensor,
        cuts: Sequence[TrieNodes] | None = None,
    ) -> None:
        """cuts: the trie nodes at which sums are needed; None for any."""
        self.probabilities_nV = probabilities_nV
        self.ranges = TokenRanges(order_P, probabilities_nV.shape[1], cuts)
        is_small = probabilities_nV.shape[1] < _SMALL_VOCABULARY
        is_sorted = is_small or probabilities_nV.device.type != "cpu"
        self._sums = (sums_of_sorted if is_sorted else sums_row_by_row)(
            probabilities_nV, self.ranges
        )

    def mass_before(self, rows_m: Tensor, positions: Tensor) -> Tensor:
        """Returns the probability mass before each position of the sorted tokens.

        rows_m: the rows of the tile. positions: indices into the sorted tokens, [m] or [m, k],
        not token ids; the result has this shape.
        """
        base = rows_m * self._sums.shape[1]
        range_indices = self.ranges.range_of_P[positions]
        return self._sums.flatten()[
            (base if positions.ndim == 1 else base[:, None]) + range_indices
        ]


def sums_row_by_row(probabilities_nV: Tensor, ranges: TokenRanges) -> Tensor:
    """Returns the sums before each range and the total, [n, R + 1]; fast on the CPU.

    Probabilities are added in the vocabulary's order, one row at a time, which fits the cache.
    """
    sums_nR = probabilities_nV.new_zeros(
        len(probabilities_nV), len(ranges) + 1, dtype=torch.float64
    )
    for sums_R, row_V in zip(sums_nR, probabilities_nV, strict=True):
        sums_R.scatter_add_(0, ranges.range_of_token_V, row_V.double())
    # The last column collects tokens in no range.
    return torch.nn.functional.pad(sums_nR[:, :-1], (1, 0)).cumsum(1)


def sums_of_sorted(probabilities_nV: Tensor, ranges: TokenRanges) -> Tensor:
    """Returns the sums of `sums_row_by_row` for all rows at once.

    On a GPU scatter-adds run in any order, which would change the last digits.
    """
    sorted_nP = probabilities_nV.index_select(1, ranges.order_P)
    sums_nP = sorted_nP.cumsum(1, dtype=torch.float64)
    ends_R = torch.cat([ranges.first_R[1:], ranges.first_R.new_tensor([len(ranges.order_P)])]) - 1
    return torch.nn.functional.pad(sums_nP[:, ends_R], (1, 0))


@dataclass(frozen=True, slots=True)
class SymbolProbabilities:
    """A model's probabilities of the next symbols at points that share one symbol set."""

    probabilities_mS: Tensor
    """[m, 256 + the symbols of the set], in float64."""
    is_known_mS: Tensor
    """Which symbols the model can distinguish there."""
    total_m: Tensor
    """The probability of the bytes that are already fixed in the token."""


def symbol_probabilities(
    sums: SortedSums, rows_m: Tensor, nodes: TrieNodes, symbol_set: SymbolSet, *, is_student: bool
) -> SymbolProbabilities:
    """Returns next-symbol probabilities at comparison points that share one symbol set."""
    starts = nodes.starts_M.long()
    edges = sums.mass_before(rows_m, starts)
    bytes_m = (edges[:, 1:] - edges[:, :-1]).clamp_min(0)
    known_m = starts[:, 1:] > starts[:, :-1]
    inside_m = sums.mass_before(rows_m, nodes.high_M) - sums.mass_before(rows_m, nodes.low_M)
    total_m = inside_m
    if not symbol_set.is_conditional:
        total_m = torch.where(nodes.is_root_M, torch.ones_like(inside_m), inside_m)
    columns, known = [bytes_m], [known_m]
    hidden = torch.zeros(NUM_BYTES, dtype=torch.bool, device=bytes_m.device)
    hidden[:] = not (symbol_set.has_bytes or symbol_set.is_conditional)
    for symbol in symbol_set.symbols:
        ids = symbol.student_ids if is_student else symbol.teacher_ids
        first_bytes = list(symbol.student_bytes if is_student else symbol.teacher_bytes)
        mass_m = bytes_m[:, first_bytes].sum(1)
        is_known = known_m[:, first_bytes].all(1)
        if ids:
            marker_mass_m = to_float64(sums.probabilities_nV[:, list(ids)][rows_m]).sum(1)
            mass_m, is_known = mass_m + marker_mass_m, is_known & nodes.is_root_M
        columns.append(mass_m[:, None])
        known.append(is_known[:, None])
        hidden[[*symbol.student_bytes, *symbol.teacher_bytes]] = True
    known[0] = known_m & ~hidden
    return SymbolProbabilities(
        torch.cat(columns, 1) / total_m.clamp_min(1e-300)[:, None], torch.cat(known, 1), total_m
    )


def with_longer_tokens(
    after: SymbolProbabilities,
    sums: SortedSums,
    rows_m: Tensor,
    before: TrieNodes,
    symbol_set: SymbolSet,
) -> SymbolProbabilities:
    """Returns a teacher's probabilities at the ends of its tokens, including longer tokens.

    The student's text is tokenized as the teacher's tokenizer does, but the teacher may be nearly
    sure of a longer token: if it expects `candle` as one token, its distribution after the token
    `c` hardly counts, since that token has almost no probability. So a next byte's probability is
    the sum over longer tokens and, weighted by the token itself, over what follows it.
    after: the probabilities after the teacher's tokens. rows_m, before: the rows of the previous
    tokens, and their trie nodes; the root for no token.
    """
    starts = before.starts_M.long()
    edges = sums.mass_before(rows_m, starts)
    longer_m = (edges[:, 1:] - edges[:, :-1]).clamp_min(0)
    low_m, high_m = sums.mass_before(rows_m, before.low_M), sums.mass_before(rows_m, before.high_M)
    total_m = (high_m - low_m).clamp_min(1e-300)
    share_m = ((edges[:, 0] - low_m) / total_m)[:, None]
    markers = [
        longer_m[:, list(symbol.teacher_bytes)].sum(1, keepdim=True)
        for symbol in symbol_set.symbols
    ]
    mixed = torch.cat([longer_m, *markers], 1) / total_m[:, None] + share_m * after.probabilities_mS
    has_before = ~before.is_root_M[:, None]
    probabilities = torch.where(has_before, mixed, after.probabilities_mS)
    return SymbolProbabilities(probabilities, after.is_known_mS, after.total_m)


class NextSymbols(Protocol):
    """A teacher's next-symbol probabilities at some of its positions."""

    def probabilities_at(
        self, rows_m: Tensor, nodes: TrieNodes, before: TrieNodes, symbol_set: SymbolSet
    ) -> SymbolProbabilities:
        """Returns next-symbol probabilities at comparison points that share one symbol set.

        rows_m: the rows of the points' tokens in the teacher's predictions. nodes: the points' own
        trie nodes. before: the trie nodes of the teacher's previous tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class SummedSymbols:
    """The next symbols of a teacher with full next-token distributions."""

    sums: SortedSums

    def probabilities_at(
        self, rows_m: Tensor, nodes: TrieNodes, before: TrieNodes, symbol_set: SymbolSet
    ) -> SymbolProbabilities:
        """Returns next-symbol probabilities at comparison points that share one symbol set."""
        after = symbol_probabilities(self.sums, rows_m, nodes, symbol_set, is_student=False)
        rows_before_m = (rows_m - 1).clamp_min(0)
        return with_longer_tokens(after, self.sums, rows_before_m, before, symbol_set)


@dataclass(frozen=True, slots=True)
class PointKl:
    """The reverse KL at comparison points that share one symbol set."""

    value_m: Tensor
    gaps_mS: Tensor
    """log p_student - log p_teacher of each symbol and, last, of all others, [m, S + 1]."""
    is_shared_mS: Tensor
    """Which symbols both models can distinguish."""


def point_kl(student: SymbolProbabilities, teacher: SymbolProbabilities) -> PointKl:
    """Returns KL(student || teacher) over the symbols that both models can distinguish."""
    is_shared = student.is_known_mS & teacher.is_known_mS
    student_mS, teacher_mS = (_with_others(model, is_shared) for model in (student, teacher))
    gaps_mS = student_mS.log() - teacher_mS.log()
    return PointKl((student_mS * gaps_mS).sum(1), gaps_mS, is_shared)


def _with_others(probabilities: SymbolProbabilities, is_shared_mS: Tensor) -> Tensor:
    """Returns the probabilities of the shared symbols and, last, of all others, [m, S + 1]."""
    symbols = probabilities.probabilities_mS.masked_fill(~is_shared_mS, 0.0)
    others = 1 - symbols.sum(1, keepdim=True)
    return torch.cat([symbols, others], 1).clamp_min(MIN_PROBABILITY)


class GradientSums:
    """Accumulates the derivative of the divergence with respect to each token's probability.

    A value for a range of sorted tokens is added at one end of it and subtracted at the other;
    `gradient` computes the cumulative sums once.
    """

    def __init__(self, ranges: TokenRanges, num_rows: int) -> None:
        self._ranges = ranges
        shape, device = (num_rows, len(ranges) + 1), ranges.order_P.device
        self._ends = torch.zeros(shape, dtype=torch.float64, device=device)
        # The derivatives of all tokens of a row, and of marker tokens: rows, ids and values.
        self._rows = self._ends.new_zeros(num_rows)
        self._marker_slopes: list[tuple[Tensor, tuple[int, ...], Tensor]] = []

    def add(
        self,
        rows_m: Tensor,
        nodes: TrieNodes,
        symbol_set: SymbolSet,
        kl: PointKl,
        student: SymbolProbabilities,
    ) -> None:
        """Adds the derivatives at comparison points that share one symbol set."""
        others_m = kl.gaps_mS[:, -1]
        slopes_mS = (kl.gaps_mS[:, :-1] - others_m[:, None]) * kl.is_shared_mS
        slopes_mS = slopes_mS / student.total_m.clamp_min(1e-300)[:, None]
        slopes_m = slopes_mS[:, :NUM_BYTES]
        for index, symbol in enumerate(symbol_set.symbols):
            symbol_slopes_m = slopes_mS[:, NUM_BYTES + index]
            for byte in symbol.student_bytes:
                slopes_m[:, byte] = symbol_slopes_m
            if symbol.student_ids:
                self._marker_slopes.append((rows_m, symbol.student_ids, symbol_slopes_m))
        ends = torch.nn.functional.pad(slopes_m, (1, 1)).diff(dim=1)
        self._add_at(rows_m[:, None], nodes.starts_M.long(), ends)
        base = (others_m - kl.value_m) / student.total_m.clamp_min(1e-300)
        is_all = nodes.is_root_M & (not symbol_set.is_conditional)
        self._rows.index_add_(0, rows_m, base.masked_fill(~is_all, 0.0))
        base = base.masked_fill(is_all, 0.0)
        self._add_at(rows_m, nodes.low_M, base)
        self._add_at(rows_m, nodes.high_M, -base)

    def _add_at(self, rows: Tensor, positions: Tensor, values: Tensor) -> None:
        """Adds values to rows, at the ranges that begin at these sorted tokens."""
        flat = rows * self._ends.shape[1] + self._ranges.range_of_P[positions]
        self._ends.view(-1).index_add_(0, flat.flatten(), values.flatten())

    def gradient(self, probabilities_nV: Tensor, out_nV: Tensor) -> Tensor:
        """Returns the gradient with respect to the student's logits, [n, V], in `out_nV`."""
        slopes_nR = self._ends.cumsum(1)
        slopes_nR[:, -1] = 0
        slopes_nR = (slopes_nR + self._rows[:, None]).to(probabilities_nV)
        torch.index_select(slopes_nR, 1, self._ranges.range_of_token_V, out=out_nV)
        for rows_m, ids, values_m in self._marker_slopes:
            for token in ids:
                out_nV[:, token].index_add_(0, rows_m, values_m.to(out_nV))
        return out_nV.mul_(probabilities_nV)


class _Continuations(NamedTuple):
    """The listed probabilities of tokens that begin with given bytes."""

    bytes_m: Tensor
    """The probability of the tokens that continue with each byte, [m, 256]."""
    ended_m: Tensor
    """The probability of the token that is exactly these bytes."""
    total_m: Tensor
    """The probability of all these tokens, with their share of the tail."""


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """The top tokens that a server returned at a teacher's positions: a `NextSymbols`."""

    ids_kK: Tensor
    """The ids; -1 where fewer tokens are listed."""
    indices_kK: Tensor
    """The tokens' indices in the teacher's trie; -1 for those that are not in it."""
    probabilities_kK: Tensor
    """The tokens' probabilities in float64; 0 where fewer tokens are listed."""
    num_sorted: int
    """The number of tokens in the trie."""

    @classmethod
    def from_logprobs(
        cls,
        listed: Sequence[tuple[Sequence[int], Sequence[float]]],
        written: Sequence[tuple[int, float]],
        trie: ByteTrie,
        device: torch.device,
    ) -> "ListedTokens":
        """Returns the listed tokens of all positions.

        listed: the ids of the most likely tokens at each position, and their log-probabilities in
        nats. written: the id and log-probability of the token in the text, listed or not.
        """
        shape = len(listed), len(listed[0][0]) if listed else 0
        ids_kK = np.array([ids for ids, _ in listed], np.int64).reshape(shape)
        logprobs_kK = np.array([logprobs for _, logprobs in listed], np.float64).reshape(shape)
        written_ids_k = np.array([token for token, _ in written], np.int64)
        is_listed_k = (ids_kK == written_ids_k[:, None]).any(1)
        written_ids_k[is_listed_k] = -1
        written_k = np.exp(np.array([logp for _, logp in written], np.float64)) * ~is_listed_k
        ids_kK = np.concatenate([ids_kK, written_ids_k[:, None]], 1)
        index_V = np.full(int(max(trie.order.max(initial=0), ids_kK.max(initial=0))) + 1, -1)
        index_V[trie.order] = np.arange(len(trie.order))
        indices_kK = np.where(ids_kK >= 0, index_V[ids_kK], -1)
        probabilities_kK = np.concatenate([np.exp(logprobs_kK), written_k[:, None]], 1)
        return cls(
            torch.from_numpy(ids_kK).to(device),
            torch.from_numpy(indices_kK).to(device),
            torch.from_numpy(probabilities_kK).to(device),
            len(trie.order),
        )

    def __getitem__(self, positions: slice) -> "ListedTokens":
        """Returns the listed tokens at the positions of a slice."""
        return replace(
            self,
            ids_kK=self.ids_kK[positions],
            indices_kK=self.indices_kK[positions],
            probabilities_kK=self.probabilities_kK[positions],
        )

    def probabilities_at(
        self, rows_m: Tensor, nodes: TrieNodes, before: TrieNodes, symbol_set: SymbolSet
    ) -> SymbolProbabilities:
        """Returns next-symbol probabilities at comparison points that share one symbol set.

        rows_m: the row of each point in these `ListedTokens`. nodes, before, symbol_set: as in
        `NextSymbols.probabilities_at`.
        """
        is_all_m = nodes.is_root_M & (not symbol_set.is_conditional)
        current = self._continuations(rows_m, nodes, is_all_m)
        symbols_m = [
            current.bytes_m[:, list(symbol.teacher_bytes)].sum(1)
            + self._marker_probability(rows_m, symbol.teacher_ids) * nodes.is_root_M
            for symbol in symbol_set.symbols
        ]
        after_mS = torch.column_stack([current.bytes_m, *symbols_m]) / current.total_m[:, None]
        # The teacher may prefer a token that is longer than the previous one and includes the bytes
        # at this point: its probability counts too (see `with_longer_tokens`).
        longer = self._continuations((rows_m - 1).clamp_min(0), before, torch.zeros_like(is_all_m))
        longer_m = [
            longer.bytes_m[:, list(symbol.teacher_bytes)].sum(1) for symbol in symbol_set.symbols
        ]
        longer_mS = torch.column_stack([longer.bytes_m, *longer_m])
        mixed_mS = (longer_mS + longer.ended_m[:, None] * after_mS) / longer.total_m[:, None]
        probabilities_mS = torch.where(before.is_root_M[:, None], after_mS, mixed_mS)
        return SymbolProbabilities(probabilities_mS, probabilities_mS > 0, current.total_m)

    def _continuations(self, rows_m: Tensor, nodes: TrieNodes, is_all_m: Tensor) -> _Continuations:
        """Returns the continuations of the bytes at `nodes`; `is_all_m`: any token counts."""
        probabilities_mK, indices_mK = self.probabilities_kK[rows_m], self.indices_kK[rows_m]
        is_inside = (indices_mK >= nodes.low_M[:, None]) & (indices_mK < nodes.high_M[:, None])
        inside_mK = probabilities_mK * is_inside
        # Column 0: tokens that end with these bytes; column b + 1: those that continue with byte b.
        columns_mK = torch.searchsorted(nodes.starts_M.long(), indices_mK, right=True)
        sums = inside_mK.new_zeros(len(rows_m), NUM_BYTES + 2)
        sums.scatter_add_(1, columns_mK, inside_mK)
        num_listed_m = (indices_mK >= 0).sum(1)
        num_here_m = nodes.high_M - nodes.low_M - is_inside.sum(1)
        share_m = num_here_m / (self.num_sorted - num_listed_m).clamp_min(1)
        tail_m = (1 - probabilities_mK.sum(1)).clamp_min(0)
        total_m = inside_mK.sum(1) + tail_m * share_m
        total_m = torch.where(is_all_m, torch.ones_like(total_m), total_m).clamp_min(1e-300)
        return _Continuations(sums[:, 1 : NUM_BYTES + 1], sums[:, 0], total_m)

    def _marker_probability(self, rows_m: Tensor, ids: tuple[int, ...]) -> Tensor:
        """Returns the listed probability of a marker's tokens."""
        marker_ids = torch.tensor(ids, dtype=torch.int64, device=rows_m.device)
        return (self.probabilities_kK[rows_m] * torch.isin(self.ids_kK[rows_m], marker_ids)).sum(1)
