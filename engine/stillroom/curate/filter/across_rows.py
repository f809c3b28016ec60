"""Filters that compare a row with the other rows: duplicates and balance of categories.

With these filters the rows are read twice, once to judge and once to write. In between, only what
is needed to compare the rows is held in memory.
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
from stillroom.curate.filter.rules import TOO_DEEP, Knowledge, Reason, Reasons, RowJudge
from stillroom.curate.rows import CuratedRow, conversation_digest, translate
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.near_duplicates import MinHasher, NearDuplicates, Signature
from stillroom.data.row_files import RowReader
from stillroom.data.words import shingles_of, spoken_text
from stillroom.errors import DataError

_DUPLICATE, _NEAR_DUPLICATE = "duplicate", "near duplicate"
_WHOLE: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a row in its file, from which it can be read again."""

    path: Path
    number: int
    offset: int
    num_bytes: int
    is_ours: bool
    """Whether the row is in our layout, so that it needs no translation; True for SFT rows."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of one row that are needed to compare it with others."""

    place: _Place
    category: str | None
    signature: Signature | None
    conversation: bytes | None
    """A digest of the conversation, if exact duplicates are looked for."""
    worth: float
    """The reward, by which the best of duplicates is kept; the success where there is no reward,
    and -inf for a row that was not judged."""
    tie: bytes
    """A digest of the line, which decides between rows of equal worth."""


class TraitReader:
    """Determines those traits of a row that the request's filters need."""

    def __init__(self, request: FilterDataset) -> None:
        self._field = request.category_field if request.max_per_category is not None else None
        self._signer = MinHasher() if request.dedupe == "near" else None
        self._is_exact = request.dedupe == "exact"

    def traits(self, row: CuratedRow) -> Traits:
        """Returns the traits of a row that has passed all filters so far."""
        line, facts = row.line, row.facts
        is_ours = row.layout in (None, RolloutLayout.STILLROOM)
        signature = None
        if self._signer is not None:
            signature = self._signer.signature(spoken_text(row.messages))
        return Traits(
            _Place(row.path, line.number, line.offset, line.num_bytes, is_ours),
            None if self._field is None else row.category(self._field),
            signature,
            conversation_digest(row) if self._is_exact else None,
            _worth(facts),
            hashlib.blake2b(line.data, digest_size=8).digest() if signature else b"",
        )


def _worth(facts: RowFacts | None) -> float:
    if facts is None or (facts.reward is None and facts.success is None):
        return -math.inf
    return float(bool(facts.success)) if facts.reward is None else facts.reward


class _Places:
    """The places of many rows, in arrays that take 29 bytes per row."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._files = array("i")
        self._numbers, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._is_ours = array("b")

    def add(self, place: _Place) -> None:
        if not self._paths or self._paths[-1] != place.path:
            self._paths.append(place.path)
        self._files.append(len(self._paths) - 1)
        self._numbers.append(place.number)
        self._offsets.append(place.offset)
        self._sizes.append(place.num_bytes)
        self._is_ours.append(place.is_ours)

    def where(self, index: int) -> str:
        """Returns the place of a row as `file:line`."""
        return f"{self._paths[self._files[index]]}:{self._numbers[index]}"

    def shingles(self, index: int, reader: RowReader) -> frozenset[str]:
        path = self._paths[self._files[index]]
        data = reader.read(path, self._offsets[index], self._sizes[index])
        ours = data if self._is_ours[index] else translate(data) or data
        return shingles_of(spoken_text(_WHOLE.decode(ours)["messages"]))


class PassedRows:
    """Collects the rows that passed the filters for single rows, to compare them with each other.

    Rows are known by their position in the input, from 0.
    """

    def __init__(self, request: FilterDataset) -> None:
        self._request = request
        self._near = NearDuplicates() if request.dedupe == "near" else None
        self._best: dict[bytes, tuple[int, float]] = {}
        """The index of the best row so far with a conversation, and its worth."""
        self._repeats: dict[int, bytes] = {}
        """The conversations of the rows that repeat a better one, by the index of the row."""
        self._positions = array("q")
        self._places = _Places()
        self._categories: list[str] = []

    def add(self, position: int, traits: Traits) -> None:
        """Adds the next row; the positions must rise."""
        self._positions.append(position)
        if traits.category is not None:
            self._categories.append(traits.category)
        if traits.conversation is not None:
            self._places.add(traits.place)
            self._compare(len(self._positions) - 1, traits.conversation, traits.worth)
        if self._near is not None and traits.signature is not None:
            self._places.add(traits.place)
            self._near.add(traits.signature, worth=traits.worth, tie=traits.tie)

    def _compare(self, index: int, conversation: bytes, worth: float) -> None:
        """Finds whether a row repeats a better one, or an earlier one repeats it."""
        best, most = self._best.get(conversation, (index, worth))
        if worth > most:
            self._repeats[best] = conversation
            best, most = index, worth
        elif best != index:
            self._repeats[index] = conversation
        self._best[conversation] = best, most

    def dropped(self) -> dict[int, Reason]:
        """Returns the positions of the rows that must still be dropped, each with the reason."""
        dropped: dict[int, Reason] = {}
        for index, conversation in self._repeats.items():
            kept = self._places.where(self._best[conversation][0])
            dropped[self._positions[index]] = Reason(_DUPLICATE, kept)
        if self._near is not None:
            with RowReader() as reader:
                repeats = self._near.repeats(lambda index: self._places.shingles(index, reader))
            for index, kept in repeats.items():
                reason = Reason(_NEAR_DUPLICATE, self._places.where(kept))
                dropped[self._positions[index]] = reason
        if (limit := self._request.max_per_category) is not None:
            remaining = [(p, c) for p, c in zip(self._positions, self._categories, strict=True)
                         if p not in dropped]  # fmt: skip
            surplus = Reason(f"over {limit} of its category")
            chosen = _chosen_by_category(remaining, limit, random.Random(self._request.seed))
            dropped |= {position: surplus for position, _ in remaining if position not in chosen}
        if (most := self._request.n) is not None:
            left = [position for position in self._positions if position not in dropped]
            chance = random.Random(self._request.seed)
            drawn = set(chance.sample(left, min(most, len(left))))
            not_drawn = Reason(f"not among the {most} drawn")
            dropped |= {position: not_drawn for position in left if position not in drawn}
        return dropped


def _chosen_by_category(
    rows: Iterable[tuple[int, str]], limit: int, chance: random.Random
) -> set[int]:
    """Returns the positions of at most `limit` rows per category, chosen uniformly at random.

    This is reservoir sampling: a single pass over the rows, without a list per category.
    """
    chosen: dict[str, list[int]] = {}
    passed: Counter[str] = Counter()
    for position, category in rows:
        passed[category] += 1
        slots = chosen.setdefault(category, [])
        if len(slots) < limit:
            slots.append(position)
        elif (slot := chance.randrange(passed[category])) < limit:
            slots[slot] = position
    return {position for slots in chosen.values() for position in slots}


class JudgedRows:
    """The reasons to drop each row of an input, kept until the rows are read again."""

    def __init__(self) -> None:
        self.reasons: list[Reasons] = []
        self._sizes, self._tokens = array("q"), array("q")

    def add(self, row: CuratedRow, reasons: Reasons) -> None:
        """Adds the next row with its reasons."""
        self.reasons.append(reasons)
        self._sizes.append(row.line.num_bytes)
        self._tokens.append(-1 if row.num_tokens is None else row.num_tokens)

    def read_again(self, rows: Iterable[CuratedRow]) -> Iterator[tuple[CuratedRow, Reasons]]:
        """Yields each row with its reasons. Raises DataError if the rows are no longer the same."""
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
            "wait until nothing writes to it any more (get_run), then filter again",
        )


def judged_row(
    row: CuratedRow, judge: RowJudge, reader: TraitReader
) -> tuple[Reasons, Traits | None]:
    """Returns the reasons to drop a row by itself; without any, the traits to compare it by."""
    reasons = judge.reasons(row)
    if reasons:
        return reasons, None
    try:
        return (), reader.traits(row)
    except (msgspec.DecodeError, RecursionError):
        return (TOO_DEEP,), None


def judged_rows(
    read: Callable[[], Iterator[CuratedRow]], request: FilterDataset, known: Knowledge
) -> Iterator[tuple[CuratedRow, Reasons]]:
    """Yields every row with the reasons to drop it, none for a row to keep.

    The rows are read twice only if the request compares them with each other. Raises DataError if
    the input changes in between.
    """
    judge = RowJudge(request, known)
    if not request.compares_rows:
        for row in read():
            yield row, judge.reasons(row)
        return
    judged, passed, reader = JudgedRows(), PassedRows(request), TraitReader(request)
    for position, row in enumerate(read()):
        reasons, traits = judged_row(row, judge, reader)
        judged.add(row, reasons)
        if traits is not None:
            passed.add(position, traits)
    for position, reason in passed.dropped().items():
        judged.reasons[position] = (reason,)
    yield from judged.read_again(read())
