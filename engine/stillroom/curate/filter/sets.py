"""Filters that judge a row by the others: duplicates, near duplicates, balance of categories.

The rows are read twice: once to judge, once to write. Between, only what is needed to compare them
is held in memory.
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

from stillroom.curate.filter.near_duplicates import NearDuplicates, Signature, Signer
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.rows import Row
from stillroom.curate.filter.rules import FactRule, Knowledge, Reason, Rule, fact_rules, row_rules
from stillroom.curate.rows.read import without_ids
from stillroom.curate.rows.translate import own_row
from stillroom.curate.rows.words import shingles_of, spoken_text
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.row_files import RowReader
from stillroom.errors import DataError
from stillroom.files import canonical_json

NOT_A_ROW = Reason("not a rollout or SFT row")
TOO_DEEP = Reason("nested too deeply")
DUPLICATE, _NEAR_DUPLICATE = "duplicate", "near duplicate"

Reasons = tuple[Reason, ...]
_MESSAGES: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class Judge:
    """Judges one row after the other; remembers the conversations that it let pass."""

    def __init__(self, request: FilterDataset, known: Knowledge) -> None:
        self._fact_rules: list[FactRule] = fact_rules(request)
        self._row_rules: list[Rule] = row_rules(request, known)
        self._seen: dict[bytes, tuple[Path, int]] | None = {} if request.dedupe == "exact" else None

    def reasons(self, row: Row) -> Reasons:
        """Returns why to drop a row; nothing means that it passes."""
        facts = row.facts
        if facts is None:
            return (NOT_A_ROW,)
        found: list[Reason] = []
        # A comprehension would cost as much as the rules.
        for fact_rule in self._fact_rules:
            if (reason := fact_rule(facts)) is not None:
                found.append(reason)  # noqa: PERF401
        if not self._row_rules and self._seen is None:
            return tuple(found)
        try:
            found += [reason for rule in self._row_rules if (reason := rule(row)) is not None]
            # Only rows that are kept otherwise can make another one a duplicate.
            if self._seen is not None and not found and (like := self._earlier(row, self._seen)):
                found.append(Reason(DUPLICATE, like))
        except (msgspec.DecodeError, RecursionError):
            found.append(TOO_DEEP)
        return tuple(found)

    def _earlier(self, row: Row, seen: dict[bytes, tuple[Path, int]]) -> str | None:
        here = (row.line.path, row.line.line.number)
        path, number = seen.setdefault(conversation_digest(row), here)
        return f"{path}:{number}" if (path, number) != here else None


def conversation_digest(row: Row) -> bytes:
    """Returns what is equal for rows that say the same."""
    messages = [without_ids(message) for message in row.messages]
    return hashlib.sha256(canonical_json(messages)).digest()[:16]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row can be read again."""

    path: Path
    number: int
    offset: int
    num_bytes: int
    is_own: bool
    """Whether it is in our layout."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a row is compared with others by."""

    place: Place
    category: str | None
    signature: Signature | None
    worth: float
    tie: bytes


class TraitReader:
    """Reads the traits that a request compares rows by."""

    def __init__(self, request: FilterDataset) -> None:
        self._field = request.category_field if request.max_per_category is not None else None
        self._signer = Signer() if request.dedupe == "near" else None

    def traits(self, row: Row) -> Traits:
        """Returns the traits of a row that passes so far."""
        line, facts = row.line.line, row.facts
        is_own = row.line.layout in (None, RolloutLayout.STILLROOM)
        signature = None
        if self._signer is not None:
            signature = self._signer.signature(spoken_text(row.messages))
        return Traits(
            Place(row.line.path, line.number, line.offset, line.num_bytes, is_own),
            None if self._field is None else row.category(self._field),
            signature,
            -math.inf if facts is None or facts.reward is None else facts.reward,
            hashlib.blake2b(line.data, digest_size=8).digest() if signature else b"",
        )


class _Places:
    """Where rows can be read again: 37 bytes each."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._files = array("i")
        self._numbers, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._is_own = array("b")

    def add(self, place: Place) -> None:
        if not self._paths or self._paths[-1] != place.path:
            self._paths.append(place.path)
        self._files.append(len(self._paths) - 1)
        self._numbers.append(place.number)
        self._offsets.append(place.offset)
        self._sizes.append(place.num_bytes)
        self._is_own.append(place.is_own)

    def where(self, index: int) -> str:
        """Returns `file:line`."""
        return f"{self._paths[self._files[index]]}:{self._numbers[index]}"

    def shingles(self, index: int, reader: RowReader) -> frozenset[str]:
        path = self._paths[self._files[index]]
        data = reader.read(path, self._offsets[index], self._sizes[index])
        own = data if self._is_own[index] else own_row(data) or data
        return shingles_of(spoken_text(_MESSAGES.decode(own)["messages"]))


class Passed:
    """The rows that pass so far, by their position in the input."""

    def __init__(self, request: FilterDataset) -> None:
        self._request = request
        self._near = NearDuplicates() if request.dedupe == "near" else None
        self._positions = array("q")
        self._places = _Places()
        self._categories: list[str] = []

    def add(self, position: int, traits: Traits) -> None:
        """Takes in the next row."""
        self._positions.append(position)
        if traits.category is not None:
            self._categories.append(traits.category)
        if self._near is not None and traits.signature is not None:
            self._places.add(traits.place)
            self._near.add(traits.signature, worth=traits.worth, tie=traits.tie)

    def decided(self) -> dict[int, Reason]:
        """Returns the positions of the rows to drop after all."""
        dropped: dict[int, Reason] = {}
        if self._near is not None:
            with RowReader() as reader:
                repeats = self._near.repeats(lambda index: self._places.shingles(index, reader))
            for index, kept in repeats.items():
                reason = Reason(_NEAR_DUPLICATE, self._places.where(kept))
                dropped[self._positions[index]] = reason
        if (limit := self._request.max_per_category) is not None:
            left = [(p, c) for p, c in zip(self._positions, self._categories, strict=True)
                    if p not in dropped]  # fmt: skip
            surplus = Reason(f"over {limit} of its category")
            chosen = chosen_by_category(left, limit, random.Random(self._request.seed))
            dropped |= {position: surplus for position, _ in left if position not in chosen}
        return dropped


def chosen_by_category(
    rows: Iterable[tuple[int, str]], limit: int, chance: random.Random
) -> set[int]:
    """Returns the positions of a random `limit` of each category, each with the same chance."""
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


def judged(
    read: Callable[[], Iterator[Row]], request: FilterDataset, known: Knowledge
) -> Iterator[tuple[Row, Reasons]]:
    """Yields every row with the reasons to drop it; reads them twice only where it must."""
    judge = Judge(request, known)
    if request.dedupe != "near" and request.max_per_category is None:
        for row in read():
            yield row, judge.reasons(row)
        return
    verdicts: list[Reasons] = []
    sizes, tokens = array("q"), array("q")
    passed, reader = Passed(request), TraitReader(request)
    for position, row in enumerate(read()):
        reasons = judge.reasons(row)
        verdicts.append(reasons)
        sizes.append(row.line.line.num_bytes)
        tokens.append(-1 if row.num_tokens is None else row.num_tokens)
        if not reasons:
            passed.add(position, reader.traits(row))
    for position, reason in passed.decided().items():
        verdicts[position] = (reason,)
    position = -1
    for position, row in enumerate(read()):
        if position >= len(verdicts) or sizes[position] != row.line.line.num_bytes:
            raise changed_input(row.line.path)
        if tokens[position] >= 0:
            row.num_tokens = tokens[position]
        yield row, verdicts[position]
    if position + 1 != len(verdicts):
        raise changed_input(None)


def changed_input(path: Path | None) -> DataError:
    """Returns the error of an input that something writes to."""
    return DataError(
        f"the input {path or ''} changed while it was read",
        "wait until nothing writes to it any more (get_run), then filter again",
    )
