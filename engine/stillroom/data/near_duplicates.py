"""Finds near duplicates: MinHash proposes pairs, and the true overlap of their words decides.

Rows are visited from best to worst, and a row is dropped if it says almost the same as a row that
is kept. So every dropped row resembles a kept one, no chain of small changes can drop all rows but
one, and the order of the file does not matter.
Dimensions: N rows, P = _BANDS * _BAND_ROWS numbers per signature.
"""

import hashlib
import importlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import eq
from typing import Any

from stillroom.data.words import jaccard, shingles_of
from stillroom.errors import missing_extra

LEAST_JACCARD = 0.8
# Two rows with a similarity of 0.8 share at least one of 21 bands of 6 numbers with a probability
# of 99.8 %.
_BANDS, _BAND_ROWS = 21, 6
_NUM_PERM = _BANDS * _BAND_ROWS
# Four standard deviations of the estimate below 0.8. Pairs with fewer equal numbers are ruled out
# without comparing their words.
_LEAST_EQUAL = int(_NUM_PERM * 0.655)
_SEED = 42
_CACHED_SETS = 512
_MOST_COMPARED = 256
"""The most rows with the same numbers in a band with which a row is compared for a cluster."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The MinHash of what a row says, and a digest of it; the same in every process."""

    numbers: "array[int]"
    digest: int
    """A 64-bit digest of the text; rows with equal digests are duplicates without a comparison."""


class MinHasher:
    """Computes MinHash signatures. Raises MissingExtraError if the library is not installed."""

    def __init__(self) -> None:
        try:
            rensa: Any = importlib.import_module("rensa")
        except ModuleNotFoundError as error:
            raise missing_extra("curate", "finding near duplicates") from error
        self._minhash = rensa.RMinHash

    def signature(self, text: str, shingles: frozenset[str] | None = None) -> Signature:
        """Returns the MinHash signature of a row's text.

        `shingles` are those of its shingles to use; by default all.
        """
        minhash = self._minhash(_NUM_PERM, _SEED)
        minhash.update(list(shingles_of(text) if shingles is None else shingles))
        # hash() would not do: it differs from process to process.
        spoken = text.encode("utf-8", errors="surrogatepass")
        digest = hashlib.blake2b(spoken, digest_size=8).digest()
        return Signature(
            array("I", minhash.digest()), int.from_bytes(digest, "little", signed=True)
        )


class NearDuplicates:
    """Collects the signatures of rows, and then finds which row nearly repeats which other row.

    It holds about 670 bytes per row. The words of two rows are read again only if their signatures
    are alike.
    """

    def __init__(self) -> None:
        self._signatures_NP = array("I")
        self._digests_N = array("q")
        self._ranks: list[tuple[float, bytes]] = []

    def add(self, signature: Signature, *, worth: float, tie: bytes) -> None:
        """Adds the next row. Of rows that are alike, the one with the highest `worth` is kept.

        If their worth is equal, the one with the lowest `tie` is kept.
        """
        self._signatures_NP.extend(signature.numbers)
        self._digests_N.append(signature.digest)
        self._ranks.append((-worth, tie))

    def repeats(self, words_at: Callable[[int], frozenset[str]]) -> dict[int, int]:
        """Returns the rows to drop, each with the kept row that it repeats.

        Rows are numbered from 0 in the order of `add`. `words_at` must return the shingles of a row
        (see `shingles_of`).
        """
        order = sorted(range(len(self._ranks)), key=self._ranks.__getitem__)
        links = [self._linked(order, band) for band in range(_BANDS)]
        read = _Cached(words_at)
        dropped: dict[int, int] = {}
        for row in order:
            candidates: set[int] = set()
            for link in links:
                link[row] = _kept_before(link[row], link, dropped)
                kept = link[row]
                while kept >= 0:
                    candidates.add(kept)
                    kept = link[kept]
            match = self._first_alike(row, candidates, read)
            if match is not None:
                dropped[row] = match
        return dropped

    def clusters(self, words_at: Callable[[int], frozenset[str]]) -> list[int]:
        """Returns the number of each row's cluster, which is that of its first row.

        Rows are in one cluster if a chain of near duplicates links them, so that no row of one
        cluster nearly repeats a row of another. `words_at` is as for `repeats`.
        """
        order = range(len(self._ranks))
        links = [self._linked(order, band) for band in range(_BANDS)]
        read = _Cached(words_at)
        clusters = list(order)
        for row in order:
            candidates: set[int] = set()
            for link in links:
                other = link[row]
                for _ in range(_MOST_COMPARED):
                    if other < 0:
                        break
                    candidates.add(other)
                    other = link[other]
            for other in sorted(candidates):
                if first_of(clusters, other) != first_of(clusters, row) and self._is_alike(
                    row, other, read
                ):
                    join_clusters(clusters, row, other)
        return [first_of(clusters, row) for row in order]

    def _linked(self, order: Iterable[int], band: int) -> "array[int]":
        """Returns, for each row, the next better row with the same numbers in a band, or -1."""
        numbers = memoryview(self._signatures_NP).cast("B")
        size = self._signatures_NP.itemsize
        start, width, step = band * _BAND_ROWS * size, _BAND_ROWS * size, _NUM_PERM * size
        last: dict[bytes, int] = {}
        link = array("i", bytes(4 * len(self._ranks)))
        for row in order:
            offset = row * step + start
            key = bytes(numbers[offset : offset + width])
            link[row] = last.get(key, -1)
            last[key] = row
        return link

    def _first_alike(self, row: int, candidates: set[int], read: "_Cached") -> int | None:
        best_first = sorted(candidates, key=self._ranks.__getitem__)
        return next((kept for kept in best_first if self._is_alike(row, kept, read)), None)

    def _is_alike(self, row: int, other: int, read: "_Cached") -> bool:
        if self._digests_N[row] == self._digests_N[other]:
            return True
        is_near = self._num_equal(row, other) >= _LEAST_EQUAL
        return is_near and jaccard(read(row), read(other)) >= LEAST_JACCARD

    def _num_equal(self, one: int, other: int) -> int:
        numbers = memoryview(self._signatures_NP)
        one_numbers = numbers[one * _NUM_PERM : (one + 1) * _NUM_PERM]
        other_numbers = numbers[other * _NUM_PERM : (other + 1) * _NUM_PERM]
        return sum(map(eq, one_numbers, other_numbers))


def first_of(clusters: list[int], row: int) -> int:
    """Returns the first row of a row's cluster; `clusters` has for each row one before it, or it.

    The way there is made shorter.
    """
    first = row
    while clusters[first] != first:
        first = clusters[first]
    while clusters[row] != first:
        clusters[row], row = first, clusters[row]
    return first


def join_clusters(clusters: list[int], one: int, other: int) -> None:
    """Makes the clusters of two rows one."""
    one, other = sorted((first_of(clusters, one), first_of(clusters, other)))
    clusters[other] = one


def _kept_before(row: int, link: "array[int]", dropped: dict[int, int]) -> int:
    """Returns the first row of a chain of links that is not dropped, or -1."""
    while row in dropped:
        row = link[row]
    return row


class _Cached:
    """Caches the word sets that were used last, because a cluster's rows are compared in turn."""

    def __init__(self, read: Callable[[int], frozenset[str]]) -> None:
        self._read = read
        self._sets: OrderedDict[int, frozenset[str]] = OrderedDict()

    def __call__(self, row: int) -> frozenset[str]:
        words = self._sets.pop(row, None)
        if words is None:
            words = self._read(row)
        self._sets[row] = words
        if len(self._sets) > _CACHED_SETS:
            self._sets.popitem(last=False)
        return words
