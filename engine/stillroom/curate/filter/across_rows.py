"""Filters that compare rows with each other: duplicates, balance of categories, a random sample.

With these filters the rows are read twice, once to judge and once to write. In between, only the
traits to compare are held in memory.
"""

import hashlib
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.facts import RowFacts
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.rules import TOO_DEEP, FilterContext, Reason, Reasons, RowJudge
from stillroom.curate.rows import CuratedRow, conversation_digest, translate
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.near_duplicates import MinHasher, NearDuplicates, Signature
from stillroom.data.row_files import RowReader
from stillroom.data.words import shingles_of, user_and_assistant_text
from stillroom.errors import DataError

_DUPLICATE, _NEAR_DUPLICATE = "duplicate", "near duplicate"
_ROW: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class _RowLocation:
    """Where a row is in its file, so that it can be read again."""

    path: Path
    number: int
    offset: int
    num_bytes: int
    is_stillroom: bool
    """Whether the row is in Stillroom's layout and needs no translation; True for SFT rows."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of a row by which it is compared with other rows."""

    location: _RowLocation
    category: str | None
    signature: Signature | None
    conversation: bytes | None
    """A digest of the conversation, for exact duplicates; None unless they are dropped."""
    quality: float
    """The reward, or else the success as 0 or 1, or else -inf; the best of duplicates is kept."""
    tie_breaker: bytes
    """A digest of the line, which decides between rows of equal quality."""


class TraitReader:
    """Determines the traits of rows that the filters of a request compare."""

    def __init__(self, request: FilterDataset) -> None:
        self._field = request.category_field if request.max_per_category is not None else None
        self._hasher = MinHasher() if request.dedupe == "near" else None
        self._needs_digest = request.dedupe == "exact"

    def traits(self, row: CuratedRow) -> Traits:
        """Returns the traits of a row that has passed all filters so far."""
        line, facts = row.line, row.facts
        is_stillroom = row.layout in (None, RolloutLayout.STILLROOM)
        signature = None
        if self._hasher is not None:
            signature = self._hasher.signature(user_and_assistant_text(row.messages))
        return Traits(
            _RowLocation(row.path, line.number, line.offset, line.num_bytes, is_stillroom),
            None if self._field is None else row.category(self._field),
            signature,
            conversation_digest(row) if self._needs_digest else None,
            _quality(facts),
            hashlib.blake2b(line.data, digest_size=8).digest() if signature else b"",
        )


def _quality(facts: RowFacts | None) -> float:
    if facts is None or (facts.reward is None and facts.success is None):
        return -math.inf
    return float(bool(facts.success)) if facts.reward is None else facts.reward


class _RowLocations:
    """The locations of many rows, in parallel arrays that take 29 bytes per row."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        # For each row: its file's index in `_paths`, its line number, offset and number of bytes.
        self._files = array("i")
        self._numbers, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._is_stillroom = array("b")

    def add(self, location: _RowLocation) -> None:
        if not self._paths or self._paths[-1] != location.path:
            self._paths.append(location.path)
        self._files.append(len(self._paths) - 1)
        self._numbers.append(location.number)
        self._offsets.append(location.offset)
        self._sizes.append(location.num_bytes)
        self._is_stillroom.append(location.is_stillroom)

    def where(self, index: int) -> str:
        """Returns the location of a row as `file:line`."""
        return f"{self._paths[self._files[index]]}:{self._numbers[index]}"

    def shingles(self, index: int, reader: RowReader) -> frozenset[str]:
        """Reads a row again and returns the shingles of its conversation."""
        path = self._paths[self._files[index]]
        data = reader.read(path, self._offsets[index], self._sizes[index])
        rollout = data if self._is_stillroom[index] else translate(data) or data
        return shingles_of(user_and_assistant_text(_ROW.decode(rollout)["messages"]))


class PassedRows:
    """Compares the rows that have passed the filters that judge single rows.

    A row's position counts all rows of the input from 0; its index counts only the rows added here.
    """

    def __init__(self, request: FilterDataset) -> None:
        self._request = request
        self._near = NearDuplicates() if request.dedupe == "near" else None
        self._best: dict[bytes, tuple[int, float]] = {}
        """The index and quality of the best row so far, by the digest of the conversation."""
        self._repeated_conversations: dict[int, bytes] = {}
        """The conversation digest of each row that repeats a better one, by the row's index."""
        self._positions = array("q")
        self._locations = _RowLocations()
        self._categories: list[str] = []

    def add(self, position: int, traits: Traits) -> None:
        """Adds the next row; positions must be in ascending order."""
        self._positions.append(position)
        if traits.category is not None:
            self._categories.append(traits.category)
        if traits.conversation is not None:
            self._locations.add(traits.location)
            self._update_best(len(self._positions) - 1, traits.conversation, traits.quality)
        if self._near is not None and traits.signature is not None:
            self._locations.add(traits.location)
            self._near.add(traits.signature, quality=traits.quality, tie_breaker=traits.tie_breaker)

    def _update_best(self, index: int, conversation: bytes, quality: float) -> None:
        """Records which is better: a row, or the best earlier row with the same conversation."""
        best, best_quality = self._best.get(conversation, (index, quality))
        if quality > best_quality:
            self._repeated_conversations[best] = conversation
            best, best_quality = index, quality
        elif best != index:
            self._repeated_conversations[index] = conversation
        self._best[conversation] = best, best_quality

    def reasons_to_drop(self) -> dict[int, Reason]:
        """Returns the reason to drop each row that these filters drop, by position."""
        dropped: dict[int, Reason] = {}
        for index, conversation in self._repeated_conversations.items():
            kept = self._locations.where(self._best[conversation][0])
            dropped[self._positions[index]] = Reason(_DUPLICATE, kept)
        if self._near is not None:
            with RowReader() as reader:
                repeats = self._near.find_repeats(
                    lambda index: self._locations.shingles(index, reader)
                )
            for index, kept in repeats.items():
                reason = Reason(_NEAR_DUPLICATE, self._locations.where(kept))
                dropped[self._positions[index]] = reason
        if (limit := self._request.max_per_category) is not None:
            remaining = [(p, c) for p, c in zip(self._positions, self._categories, strict=True)
                         if p not in dropped]  # fmt: skip
            surplus = Reason(f"over {limit} rows of its category")
            sampled = _sample_by_category(remaining, limit, random.Random(self._request.seed))
            dropped |= {position: surplus for position, _ in remaining if position not in sampled}
        if (size := self._request.n) is not None:
            candidates = [position for position in self._positions if position not in dropped]
            rng = random.Random(self._request.seed)
            sampled = set(rng.sample(candidates, min(size, len(candidates))))
            not_sampled = Reason(f"not among the {size} sampled")
            dropped |= {position: not_sampled for position in candidates if position not in sampled}
        return dropped


def _sample_by_category(
    rows: Iterable[tuple[int, str]], limit: int, rng: random.Random
) -> set[int]:
    """Returns the positions of at most `limit` rows per category, by reservoir sampling."""
    sampled: dict[str, list[int]] = {}
    num_rows: Counter[str] = Counter()
    for position, category in rows:
        num_rows[category] += 1
        slots = sampled.setdefault(category, [])
        if len(slots) < limit:
            slots.append(position)
        elif (slot := rng.randrange(num_rows[category])) < limit:
            slots[slot] = position
    return {position for slots in sampled.values() for position in slots}


class JudgedRows:
    """The reasons to drop each row of an input, for the second pass over the rows."""

    def __init__(self) -> None:
        # One entry per row: its reasons, number of bytes, and number of tokens (-1: not counted).
        self.reasons: list[Reasons] = []
        self._sizes, self._tokens = array("q"), array("q")

    def add(self, row: CuratedRow, reasons: Reasons) -> None:
        """Adds the next row with its reasons."""
        self.reasons.append(reasons)
        self._sizes.append(row.line.num_bytes)
        self._tokens.append(-1 if row.num_tokens is None else row.num_tokens)

    def read_again(self, rows: Iterable[CuratedRow]) -> Iterator[tuple[CuratedRow, Reasons]]:
        """Yields each row with its reasons. Raises DataError if the rows have changed."""
        position, path = -1, None
        for position, row in enumerate(rows):
            path = row.path
            if position >= len(self.reasons) or self._sizes[position] != row.line.num_bytes:
                break
            if self._tokens[position] >= 0:
                row.num_tokens = self._tokens[position]
            yield row, self.reasons[position]
        else:
            if position + 1 == len(self.reasons):
                return
        raise DataError(
            f"the input {path or ''} changed while it was read",
            "filter again once nothing is writing to it (get_run says whether a run has ended)",
        )


def judge_row(
    row: CuratedRow, judge: RowJudge, reader: TraitReader
) -> tuple[Reasons, Traits | None]:
    """Returns the reasons to drop a row by itself; if there are none, also the row's traits."""
    reasons = judge.reasons(row)
    if reasons:
        return reasons, None
    try:
        return (), reader.traits(row)
    except (msgspec.DecodeError, RecursionError):
        return (TOO_DEEP,), None


def judge_rows(
    read_rows: Callable[[], Iterator[CuratedRow]], request: FilterDataset, context: FilterContext
) -> Iterator[tuple[CuratedRow, Reasons]]:
    """Yields every row with the reasons to drop it; a row without reasons is kept.

    The rows are read twice only if the request compares them with each other. Raises DataError if
    the input changes in between.
    """
    judge = RowJudge(request, context)
    if not request.compares_rows:
        for row in read_rows():
            yield row, judge.reasons(row)
        return
    judged, passed, reader = JudgedRows(), PassedRows(request), TraitReader(request)
    for position, row in enumerate(read_rows()):
        reasons, traits = judge_row(row, judge, reader)
        judged.add(row, reasons)
        if traits is not None:
            passed.add(position, traits)
    for position, reason in passed.reasons_to_drop().items():
        judged.reasons[position] = (reason,)
    yield from judged.read_again(read_rows())
