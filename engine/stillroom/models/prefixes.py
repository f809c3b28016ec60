"""Finds the prefixes that token sequences share, so that each is run through the model once."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_SHARED = 8
"""A shorter shared prefix does not become a piece of its own."""
# Tokens after a shared prefix need an explicit mask, with which attention is slower than with the
# causal one. The cost grows with the square of their number; each shared token makes up for about
# this many squares.
_SQUARES_SAVED_PER_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """The tokens from `start` up to `stop` of a sequence, and which pieces precede them."""

    sequence: int
    """The index of a sequence that has these tokens."""
    start: int
    stop: int
    before: tuple[int, ...]
    """The indices of the pieces with the tokens before `start`, in order."""


@dataclass(slots=True)
class PackLayout:
    """The pieces that sequences are split into, each listed after the pieces that precede it."""

    pieces: list[SharedPiece] = field(default_factory=list[SharedPiece])
    piece_indices: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The indices of the pieces that make up a sequence, in order, by the sequence's index."""

    @property
    def num_tokens(self) -> int:
        """The total number of tokens of the pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def common_prefix_length(left_ids: list[int], right_ids: list[int]) -> int:
    """Returns the length of the longest prefix that two sequences share."""
    shorter = min(len(left_ids), len(right_ids))
    # First one comparison in C: rollouts of one prompt are often equal up to the shorter's end.
    if left_ids[:shorter] == right_ids[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left_ids[i] != right_ids[i])


def group_by_prefix(sequences: Sequence[list[int]], *, max_tokens: int) -> Iterator[list[int]]:
    """Yields index groups of sequences that share prefixes, up to `max_tokens` tokens each.

    A prefix that a sequence shares with the previous one is counted once. A sequence longer than
    `max_tokens` gets a group of its own.
    """
    group: list[int] = []
    total = 0
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        ids = sequences[index]
        num_new = len(ids) - (common_prefix_length(sequences[group[-1]], ids) if group else 0)
        if group and total + num_new > max_tokens:
            yield group
            group, total, num_new = [], 0, len(ids)
        group.append(index)
        total += num_new
    if group:
        yield group


def split_shared_prefixes(sequences: Sequence[Sequence[int]]) -> PackLayout:
    """Splits sequences into pieces; a prefix that several of them share is one piece."""
    layout = PackLayout()
    _split_members(layout, sequences, list(range(len(sequences))), depth=0, before=())
    return layout


def _split_members(
    layout: PackLayout,
    sequences: Sequence[Sequence[int]],
    members: Sequence[int],
    *,
    depth: int,
    before: tuple[int, ...],
) -> None:
    """Adds the pieces of the members from position `depth` on; they share all tokens before it."""
    by_next: dict[tuple[int, ...], list[int]] = {}
    for index in members:
        following = tuple(sequences[index][depth : depth + MIN_SHARED])
        by_next.setdefault(following, []).append(index)
    for following, group in by_next.items():
        shared = _shared_prefix_length(sequences, group)
        longest = max(len(sequences[index]) for index in group) - shared
        is_worth_it = (shared - depth) * _SQUARES_SAVED_PER_TOKEN >= longest**2
        if len(group) > 1 and len(following) == MIN_SHARED and is_worth_it:
            trunk = _add_piece(layout, SharedPiece(group[0], depth, shared, before))
            _split_members(layout, sequences, group, depth=shared, before=(*before, *trunk))
            continue
        for index in group:
            leaf = _add_piece(layout, SharedPiece(index, depth, len(sequences[index]), before))
            layout.piece_indices[index] = (*before, *leaf)


def _add_piece(layout: PackLayout, piece: SharedPiece) -> tuple[int, ...]:
    """Adds the piece unless it is empty; returns a tuple with its index, or ()."""
    if piece.start == piece.stop:
        return ()
    layout.pieces.append(piece)
    return (len(layout.pieces) - 1,)


def _shared_prefix_length(sequences: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """Returns the length of the longest prefix that all sequences of the group share."""
    members = [list(sequences[index]) for index in group]
    # All of them share what the smallest and the largest in lexicographic order share.
    return common_prefix_length(min(members), max(members))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of `num_tokens` tokens that a sequence shares with the sequence at `index`."""

    index: int
    num_tokens: int


class PrefixIndex:
    """An index of token sequences for finding the longest prefix shared with one of them."""

    def __init__(self, sequences: Sequence[list[int]]) -> None:
        self._ordered = sorted((ids, index) for index, ids in enumerate(sequences))
        self._lengths = sorted({len(ids) for ids in sequences}, reverse=True)

    def longest_shared(self, ids: list[int]) -> SharedPrefix | None:
        """Returns the longest prefix of `ids` shared with a sequence; None without sequences."""
        position = bisect.bisect_left(self._ordered, (ids, -1))
        # In lexicographic order, one of the two neighbours shares the longest prefix.
        shares = [
            SharedPrefix(index, common_prefix_length(ids, neighbour))
            for neighbour, index in self._ordered[max(0, position - 1) : position + 1]
        ]
        return max(shares, key=lambda share: share.num_tokens, default=None)

    def longest_prefix_of(self, ids: list[int]) -> SharedPrefix | None:
        """Returns the longest sequence that is a prefix of `ids`; None if there is none."""
        for length in self._lengths:
            if length > len(ids):
                continue
            prefix = ids[:length]
            position = bisect.bisect_left(self._ordered, (prefix, -1))
            if position < len(self._ordered) and self._ordered[position][0] == prefix:
                return SharedPrefix(self._ordered[position][1], length)
        return None


def shared_prefixes(sequences: Sequence[list[int]]) -> list[SharedPrefix | None]:
    """Returns for each sequence the longest prefix that it can copy from another one, or None.

    The source comes earlier in lexicographic order, so no two sequences wait for each other. Of
    equal sequences, all but the first copy everything from the first.
    """
    shares: list[SharedPrefix | None] = [None] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    # common[k]: how many tokens the kth sequence in lexicographic order shares with the one before.
    common = [0]
    common += [
        common_prefix_length(sequences[order[k - 1]], sequences[order[k]])
        for k in range(1, len(order))
    ]
    for k in range(1, len(order)):
        if common[k] == 0:
            continue
        # Go back to the first neighbour that shares as much: all of them copy from it.
        source = k
        while common[source] >= common[k]:
            source -= 1
        shares[order[k]] = SharedPrefix(order[source], common[k])
    return shares
