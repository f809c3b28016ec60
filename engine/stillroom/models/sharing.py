"""Finds the prefixes that sequences share, so that a pack computes each of them once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_SHARED = 8
"""A shared prefix of fewer tokens is not worth a piece of its own."""
# Tokens after a shared prefix need an explicit mask, with which attention is slower than with the
# causal one. The cost is the square of their number; sharing a token pays for about this much of
# it.
_SQUARE_WORTH = 4096


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """Tokens `start` … `stop` - 1 of the sequence `holder`; `before` are the pieces it follows."""

    holder: int
    start: int
    stop: int
    before: tuple[int, ...]


@dataclass(slots=True)
class PackLayout:
    """The pieces that some sequences are cut into, each listed after the pieces that it follows."""

    pieces: list[SharedPiece] = field(default_factory=list[SharedPiece])
    of_sequence: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The indices of the pieces that make up a sequence, in order, by the sequence's index."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all pieces together."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def num_common(left_ids: list[int], right_ids: list[int]) -> int:
    """Returns the length of the longest prefix that two sequences share."""
    shorter = min(len(left_ids), len(right_ids))
    # One comparison in C comes first: rollouts of one prompt are often equal up to the shorter's
    # end.
    if left_ids[:shorter] == right_ids[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left_ids[i] != right_ids[i])


def packs(sequences: Sequence[list[int]], *, max_tokens: int) -> Iterator[list[int]]:
    """Yields index groups of sequences that share prefixes, of about `max_tokens` tokens at most.

    The prefix that a sequence shares with the one before it is not counted again. A sequence longer
    than `max_tokens` gets a group of its own.
    """
    group: list[int] = []
    total = 0
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        ids = sequences[index]
        num_new = len(ids) - (num_common(sequences[group[-1]], ids) if group else 0)
        if group and total + num_new > max_tokens:
            yield group
            group, total, num_new = [], 0, len(ids)
        group.append(index)
        total += num_new
    if group:
        yield group


def lay_out(sequences: Sequence[Sequence[int]]) -> PackLayout:
    """Returns the sequences cut into pieces; a prefix that several of them share is one piece."""
    layout = PackLayout()
    _add(layout, sequences, list(range(len(sequences))), depth=0, before=())
    return layout


def _add(
    layout: PackLayout,
    sequences: Sequence[Sequence[int]],
    members: Sequence[int],
    *,
    depth: int,
    before: tuple[int, ...],
) -> None:
    """Adds the members' tokens after their first `depth`, which all of them share."""
    by_next: dict[tuple[int, ...], list[int]] = {}
    for index in members:
        following = tuple(sequences[index][depth : depth + MIN_SHARED])
        by_next.setdefault(following, []).append(index)
    for following, group in by_next.items():
        shared = _shared(sequences, group)
        longest = max(len(sequences[index]) for index in group) - shared
        is_worth_it = (shared - depth) * _SQUARE_WORTH >= longest**2
        if len(group) > 1 and len(following) == MIN_SHARED and is_worth_it:
            trunk = _piece(layout, SharedPiece(group[0], depth, shared, before))
            _add(layout, sequences, group, depth=shared, before=(*before, *trunk))
            continue
        for index in group:
            leaf = _piece(layout, SharedPiece(index, depth, len(sequences[index]), before))
            layout.of_sequence[index] = (*before, *leaf)


def _piece(layout: PackLayout, piece: SharedPiece) -> tuple[int, ...]:
    """Adds the piece, unless it is empty, and returns its index."""
    if piece.start == piece.stop:
        return ()
    layout.pieces.append(piece)
    return (len(layout.pieces) - 1,)


def _shared(sequences: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """Returns the length of the longest prefix that all sequences of the group share."""
    members = [list(sequences[index]) for index in group]
    # All sequences share the prefix that the first and the last in dictionary order share.
    return num_common(min(members), max(members))
