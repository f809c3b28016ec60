"""Which token sequences begin alike, so that what they have in common is run once."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.models.sharing import num_common


@dataclass(frozen=True, slots=True)
class Share:
    """A beginning that a sequence has in common with the one at `index`."""

    index: int
    num_tokens: int


class Beginnings:
    """Sequences to look up by how they begin."""

    def __init__(self, sequences: Sequence[list[int]]) -> None:
        self._ordered = sorted((ids, index) for index, ids in enumerate(sequences))

    def longest(self, ids: list[int]) -> Share | None:
        """Returns the sequence that has the longest beginning in common with `ids`."""
        place = bisect.bisect_left(self._ordered, (ids, -1))
        # In dictionary order nothing is more alike than the neighbours.
        shares = [
            Share(index, num_common(ids, other))
            for other, index in self._ordered[max(0, place - 1) : place + 1]
        ]
        return max(shares, key=lambda share: share.num_tokens, default=None)


def shared_beginnings(sequences: Sequence[list[int]]) -> list[Share | None]:
    """Returns for each sequence which other one to run first, and how many tokens to take from it.

    None: nothing of it is in any that is run before. Takers never form a circle, and a sequence
    that equals another takes all of it from one that takes less itself.
    """
    shares: list[Share | None] = [None] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    # common[k]: of the kth in dictionary order and the one before it.
    common = [0]
    common += [
        num_common(sequences[order[k - 1]], sequences[order[k]]) for k in range(1, len(order))
    ]
    for k in range(1, len(order)):
        if common[k] == 0:
            continue
        first = k
        while common[first] >= common[k]:
            first -= 1
        shares[order[k]] = Share(order[first], common[k])
    return shares
