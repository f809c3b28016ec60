"""Finds the prefixes that token sequences share, so that each is run through the model once."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.models.sharing import num_common


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of `num_tokens` tokens that a sequence shares with the one at `index`."""

    index: int
    num_tokens: int


class PrefixIndex:
    """An index of token sequences that finds the one with the longest prefix in common."""

    def __init__(self, sequences: Sequence[list[int]]) -> None:
        self._ordered = sorted((ids, index) for index, ids in enumerate(sequences))
        self._lengths = sorted({len(ids) for ids in sequences}, reverse=True)

    def longest(self, ids: list[int]) -> SharedPrefix | None:
        """Returns the longest prefix that `ids` shares with a sequence; None without sequences."""
        place = bisect.bisect_left(self._ordered, (ids, -1))
        # In dictionary order, one of the two neighbours shares the longest prefix.
        shares = [
            SharedPrefix(index, num_common(ids, neighbour))
            for neighbour, index in self._ordered[max(0, place - 1) : place + 1]
        ]
        return max(shares, key=lambda share: share.num_tokens, default=None)

    def longest_whole(self, ids: list[int]) -> SharedPrefix | None:
        """Returns the longest sequence that `ids` begins with as a whole; None without any."""
        for length in self._lengths:
            if length > len(ids):
                continue
            prefix = ids[:length]
            place = bisect.bisect_left(self._ordered, (prefix, -1))
            if place < len(self._ordered) and self._ordered[place][0] == prefix:
                return SharedPrefix(self._ordered[place][1], length)
        return None


def shared_prefixes(sequences: Sequence[list[int]]) -> list[SharedPrefix | None]:
    """Returns for each sequence the prefix to copy, and the other sequence to run first for it.

    None: the sequence shares no prefix with one that is run before it. No two sequences wait for
    each other, and of equal sequences all but one copy everything from one that copies less itself.
    """
    shares: list[SharedPrefix | None] = [None] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    # common[k]: how many tokens the kth in dictionary order shares with the one before it.
    common = [0]
    common += [
        num_common(sequences[order[k - 1]], sequences[order[k]]) for k in range(1, len(order))
    ]
    for k in range(1, len(order)):
        if common[k] == 0:
            continue
        # Go back to the first of the neighbours that share as much: all of them copy from that one.
        source = k
        while common[source] >= common[k]:
            source -= 1
        shares[order[k]] = SharedPrefix(order[source], common[k])
    return shares
