"""The name of a row: a hash of its content, and which of the equal rows of its file it is.

Rows have ids of their own, but several rows may have the same one: other systems number samples
from 1 in each run, or write no id at all, and two models' rollouts of the same prompts agree in
theirs. A name such as `3f9a0c1d2b4e5f60#1` means one row of a file, and stays when the row is
copied to another file.
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
_BEGINNING = re.compile(r"[0-9a-f]{8,16}")


def row_hash(data: Buffer) -> str:
    """Returns the part of a row's name that depends on its content alone."""
    return hashlib.sha256(data).hexdigest()[:16]


def is_row_name(text: str) -> bool:
    """Returns whether a text has the form of a row's name."""
    return _NAME.fullmatch(text) is not None


def is_named(name: str, wanted: str) -> bool:
    """Returns whether `wanted` is this name, its hash, or a beginning of the hash."""
    return wanted == name or (_BEGINNING.fullmatch(wanted) is not None and name.startswith(wanted))


class RowNames:
    """Names the rows of files; all rows of a file must be given, one after the other."""

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


def ambiguous(given: str, candidates: Iterable[str], num_candidates: int) -> InputError:
    """Returns the error for an id that several rows have; `candidates` are their names."""
    shown = ", ".join(candidates)
    more = "" if num_candidates <= MAX_CANDIDATES else ", …"
    return InputError(
        f"{num_candidates} rows have the id {given!r}: {shown}{more}",
        "give the name of the one that is meant (<hash>#<number>), or its line",
    )


_LEAST_SLOTS = 1 << 10
_MASK = (1 << 64) - 1


class HashSet:
    """A set of 64-bit hashes, which takes 13 to 27 bytes for each, a fifth of a Python set.

    Of a million rows, two different ones have the same 64 bits in one of 40 million files.
    """

    def __init__(self) -> None:
        # An open-addressing table: a slot holds a hash, or 0 if it is free.
        self._slots = array("Q", bytes(8 * _LEAST_SLOTS))
        self._count = 0

    def add(self, value: int) -> bool:
        """Adds a hash, from 0 to 2**64 - 1, and returns whether it is new."""
        value = value & _MASK or 1
        place = self._place(value)
        if self._slots[place]:
            return False
        self._slots[place] = value
        self._count += 1
        if 5 * self._count > 3 * len(self._slots):
            self._grow()
        return True

    def __contains__(self, value: int) -> bool:
        return bool(self._slots[self._place(value & _MASK or 1)])

    def __len__(self) -> int:
        return self._count

    def _place(self, value: int) -> int:
        """Returns the slot that holds a value, or the free one where it belongs."""
        slots = self._slots
        mask = len(slots) - 1
        place = value & mask
        while (held := slots[place]) and held != value:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        held = self._slots
        self._slots = array("Q", bytes(2 * held.itemsize * len(held)))
        for value in held:
            if value:
                self._slots[self._place(value)] = value
