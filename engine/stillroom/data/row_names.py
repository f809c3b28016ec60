"""The name of a row: a hash of its content, and its number among the equal rows of its file.

The ids of rows are not unique: other systems number samples from 1 in each run or write no ids, and
the rollouts of two models for the same prompts have the same ids. A name such as
`3f9a0c1d2b4e5f60#1` identifies one row of a file, and stays the same if the row is copied.
"""

import hashlib
import re
from array import array
from collections.abc import Iterable
from pathlib import Path

from stillroom.errors import InputError
from stillroom.files import Buffer

MAX_CANDIDATES = 8
_NAME = re.compile(r"[0-9a-f]{16}#[1-9][0-9]*")
_HASH_PREFIX = re.compile(r"[0-9a-f]{8,16}")


def row_hash(data: Buffer) -> str:
    """Returns the hash in a row's name, which depends only on the bytes of the row."""
    return hashlib.sha256(data).hexdigest()[:16]


def is_row_name(text: str) -> bool:
    """Returns whether a text has the form of a row name."""
    return _NAME.fullmatch(text) is not None


def matches_name(query: str, name: str) -> bool:
    """Returns whether `query` is this row name, its hash, or a prefix of the hash."""
    return query == name or (_HASH_PREFIX.fullmatch(query) is not None and name.startswith(query))


class RowNames:
    """Names the rows of files; `name` must be called for all rows of a file, in order."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._seen = HashSet()
        self._repeated: dict[str, int] = {}

    def name(self, path: Path, data: Buffer) -> str:
        """Returns the name of the next row of a file."""
        if path != self._path:
            self._path, self._seen, self._repeated = path, HashSet(), {}
        content = row_hash(data)
        if self._seen.add(int(content, 16)):
            return f"{content}#1"
        number = self._repeated[content] = self._repeated.get(content, 1) + 1
        return f"{content}#{number}"


def ambiguous_id_error(row_id: str, candidates: Iterable[str], num_candidates: int) -> InputError:
    """Returns the error for an id that several rows have; `candidates` are their names."""
    shown = ", ".join(candidates)
    more = "" if num_candidates <= MAX_CANDIDATES else ", …"
    return InputError(
        f"{num_candidates} rows have the id {row_id!r}: {shown}{more}",
        "give the name (<hash>#<number>) or the line of one of them",
    )


_MIN_SLOTS = 1 << 10
_MASK = (1 << 64) - 1


class HashSet:
    """A set of 64-bit hashes that takes 13 to 27 bytes per hash, a fifth of a Python set.

    The chance that two of a million different rows have the same hash is 1 in 40 million.
    """

    def __init__(self) -> None:
        # An open-addressing table: a slot holds a hash, or 0 if it is free.
        self._slots = array("Q", bytes(8 * _MIN_SLOTS))
        self._count = 0

    def add(self, value: int) -> bool:
        """Adds a hash, from 0 to 2**64 - 1, and returns whether it is new."""
        value = value & _MASK or 1
        slot = self._find_slot(value)
        if self._slots[slot]:
            return False
        self._slots[slot] = value
        self._count += 1
        if 5 * self._count > 3 * len(self._slots):
            self._grow()
        return True

    def _find_slot(self, value: int) -> int:
        """Returns the slot of a value, or the free slot for it."""
        slots = self._slots
        mask = len(slots) - 1
        slot = value & mask
        while (occupant := slots[slot]) and occupant != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old_slots = self._slots
        self._slots = array("Q", bytes(2 * old_slots.itemsize * len(old_slots)))
        for value in old_slots:
            if value:
                self._slots[self._find_slot(value)] = value
