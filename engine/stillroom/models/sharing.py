"""Which beginnings sequences have in common, so that each is computed once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_SHARED = 8
"""Tokens in common below this are not worth a piece of their own."""
# What follows a common beginning attends under a mask, which costs the square of its length.
_SQUARE_WORTH = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` … `stop` of the sequence `holder`; `before` are the pieces it follows."""

    holder: int
    start: int
    stop: int
    before: tuple[int, ...]


@dataclass(slots=True)
class Layout:
    """The pieces of some sequences, each after those it follows."""

    pieces: list[Piece] = field(default_factory=list[Piece])
    of_sequence: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """From a sequence's index to the pieces that make it up, in order."""

    @property
    def num_tokens(self) -> int:
        """How many tokens all pieces have."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def num_common(one: list[int], other: list[int]) -> int:
    """Returns how many tokens two sequences begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])


def packs(sequences: Sequence[list[int]], *, max_tokens: int) -> Iterator[list[int]]:
    """Yields index groups of sequences that begin alike, of about `max_tokens` tokens at most.

    What a sequence has in common with the one before it is not counted again. A sequence longer
    than `max_tokens` gets a group of its own.
    """
    group: list[int] = []
    total = 0
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        ids = sequences[index]
        own = len(ids) - (num_common(sequences[group[-1]], ids) if group else 0)
        if group and total + own > max_tokens:
            yield group
            group, total, own = [], 0, len(ids)
        group.append(index)
        total += own
    if group:
        yield group


def lay_out(sequences: Sequence[Sequence[int]]) -> Layout:
    """Returns the sequences as pieces: what some of them begin with alike is one piece."""
    layout = Layout()
    _add(layout, sequences, list(range(len(sequences))), depth=0, before=())
    return layout


def _add(
    layout: Layout,
    sequences: Sequence[Sequence[int]],
    members: Sequence[int],
    *,
    depth: int,
    before: tuple[int, ...],
) -> None:
    """Adds what the members have after their first `depth` tokens, which they have in common."""
    by_next: dict[tuple[int, ...], list[int]] = {}
    for index in members:
        following = tuple(sequences[index][depth : depth + MIN_SHARED])
        by_next.setdefault(following, []).append(index)
    for following, group in by_next.items():
        shared = _shared(sequences, group)
        longest = max(len(sequences[index]) for index in group) - shared
        is_worth_it = (shared - depth) * _SQUARE_WORTH >= longest**2
        if len(group) > 1 and len(following) == MIN_SHARED and is_worth_it:
            trunk = _piece(layout, Piece(group[0], depth, shared, before))
            _add(layout, sequences, group, depth=shared, before=(*before, *trunk))
            continue
        for index in group:
            leaf = _piece(layout, Piece(index, depth, len(sequences[index]), before))
            layout.of_sequence[index] = (*before, *leaf)


def _piece(layout: Layout, piece: Piece) -> tuple[int, ...]:
    """Adds the piece, unless it is empty, and returns its index."""
    if piece.start == piece.stop:
        return ()
    layout.pieces.append(piece)
    return (len(layout.pieces) - 1,)


def _shared(sequences: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """Returns how many tokens all sequences of the group begin with alike."""
    held = [list(sequences[index]) for index in group]
    low, high = min(held), max(held)
    # What the first and the last in dictionary order have in common, all have.
    most = min(len(low), len(high))
    return next((i for i in range(most) if low[i] != high[i]), most)
