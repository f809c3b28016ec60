"""Finds near duplicates: MinHash proposes pairs, and the Jaccard similarity of their words decides.

Rows are visited from best to worst, and a row is dropped if it nearly repeats a kept row. So every
dropped row resembles a kept one, a chain of small changes is not reduced to one row, and the
order of the file does not matter.
Dimensions: N rows, P = _BANDS * _BAND_ROWS numbers per signature.
"""

import hashlib
import importlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import eq
from typing import Any

from stillroom.data.words import jaccard, shingles_of
from stillroom.errors import missing_extra

MIN_JACCARD = 0.8
# Two rows with a similarity of 0.8 share at least one of 21 bands of 6 numbers with a probability
# of 99.8 %.
_BANDS, _BAND_ROWS = 21, 6
_NUM_PERM = _BANDS * _BAND_ROWS
# Four standard deviations of the estimate below 0.8. Pairs with fewer equal numbers are ruled out
# without comparing their words.
_MIN_EQUAL_NUMBERS = int(_NUM_PERM * 0.655)
_SEED = 42
_CACHED_SETS = 512
"""The number of shingle sets in memory: each row of a cluster is compared with many others."""
_MAX_COMPARED = 256
"""The largest number of rows of a band with which `clusters` compares a row."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The MinHash of a row's text, and a digest of the text; they are the same in every process."""

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

        `shingles` replaces the shingles of the text.
        """
        minhash = self._minhash(_NUM_PERM, _SEED)
        minhash.update(list(shingles_of(text) if shingles is None else shingles))
        # hash() differs from process to process.
        encoded = text.encode("utf-8", errors="surrogatepass")
        digest = hashlib.blake2b(encoded, digest_size=8).digest()
        return Signature(
            array("I", minhash.digest()), int.from_bytes(digest, "little", signed=True)
        )


class NearDuplicates:
    """Collects the signatures of rows, and then finds near duplicates.

    It takes about 670 bytes per row. The words of two rows are read again only if their signatures
    are similar.
    """

    def __init__(self) -> None:
        self._signatures_NP = array("I")
        self._digests_N = array("q")
        self._ranks: list[tuple[float, bytes]] = []

    def add(self, signature: Signature, *, quality: float, tie_breaker: bytes) -> None:
        """Adds the next row. Of near duplicates, the one with the highest `quality` is kept.

        If their quality is equal, the one with the lowest `tie_breaker` is kept.
        """
        self._signatures_NP.extend(signature.numbers)
        self._digests_N.append(signature.digest)
        self._ranks.append((-quality, tie_breaker))

    def find_repeats(self, shingles_at: Callable[[int], frozenset[str]]) -> dict[int, int]:
        """Returns the rows to drop, each with the kept row that it repeats.

        Rows are numbered from 0 in the order of `add`. `shingles_at` must return the shingles of a
        row (see `shingles_of`).
        """
        order = sorted(range(len(self._ranks)), key=self._ranks.__getitem__)
        links = [self._link_bands(order, band) for band in range(_BANDS)]
        shingles = lru_cache(_CACHED_SETS)(shingles_at)
        dropped: dict[int, int] = {}
        for row in order:
            candidates: set[int] = set()
            for link in links:
                link[row] = _skip_dropped(link[row], link, dropped)
                kept = link[row]
                while kept >= 0:
                    candidates.add(kept)
                    kept = link[kept]
            match = self._best_near_duplicate(row, candidates, shingles)
            if match is not None:
                dropped[row] = match
        return dropped

    def clusters(self, shingles_at: Callable[[int], frozenset[str]]) -> list[int]:
        """Returns the cluster of each row, named by the number of the cluster's first row.

        Rows are in one cluster if a chain of near duplicates links them, so that no row of one
        cluster nearly repeats a row of another. `shingles_at` is as for `find_repeats`.
        """
        order = range(len(self._ranks))
        links = [self._link_bands(order, band) for band in range(_BANDS)]
        shingles = lru_cache(_CACHED_SETS)(shingles_at)
        clusters = list(order)
        for row in order:
            candidates: set[int] = set()
            for link in links:
                other = link[row]
                for _ in range(_MAX_COMPARED):
                    if other < 0:
                        break
                    candidates.add(other)
                    other = link[other]
            for other in sorted(candidates):
                if cluster_of(clusters, other) != cluster_of(
                    clusters, row
                ) and self._are_near_duplicates(row, other, shingles):
                    merge_clusters(clusters, row, other)
        return [cluster_of(clusters, row) for row in order]

    def _link_bands(self, order: Iterable[int], band: int) -> "array[int]":
        """Returns, for each row, the row before it in `order` that is equal in a band, or -1."""
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

    def _best_near_duplicate(
        self, row: int, candidates: set[int], shingles: Callable[[int], frozenset[str]]
    ) -> int | None:
        """Returns the near duplicate of a row with the highest quality; None if there is none."""
        best_first = sorted(candidates, key=self._ranks.__getitem__)
        return next(
            (kept for kept in best_first if self._are_near_duplicates(row, kept, shingles)), None
        )

    def _are_near_duplicates(
        self, row: int, other: int, shingles: Callable[[int], frozenset[str]]
    ) -> bool:
        if self._digests_N[row] == self._digests_N[other]:
            return True
        is_near = self._num_equal(row, other) >= _MIN_EQUAL_NUMBERS
        return is_near and jaccard(shingles(row), shingles(other)) >= MIN_JACCARD

    def _num_equal(self, row: int, other: int) -> int:
        """Returns how many numbers of the signatures of two rows are equal."""
        numbers = memoryview(self._signatures_NP)
        row_numbers = numbers[row * _NUM_PERM : (row + 1) * _NUM_PERM]
        other_numbers = numbers[other * _NUM_PERM : (other + 1) * _NUM_PERM]
        return sum(map(eq, row_numbers, other_numbers))


def cluster_of(clusters: list[int], row: int) -> int:
    """Returns the first row of a row's cluster.

    `clusters` is a union-find forest: the parent of each row. The path to the root is compressed.
    """
    first = row
    while clusters[first] != first:
        first = clusters[first]
    while clusters[row] != first:
        clusters[row], row = first, clusters[row]
    return first


def merge_clusters(clusters: list[int], row: int, other: int) -> None:
    """Merges the clusters of two rows."""
    first, second = sorted((cluster_of(clusters, row), cluster_of(clusters, other)))
    clusters[second] = first


def _skip_dropped(row: int, link: "array[int]", dropped: dict[int, int]) -> int:
    """Returns the first row that is not dropped, following the links from `row`; -1 at the end."""
    while row in dropped:
        row = link[row]
    return row
