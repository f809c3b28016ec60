"""The name of a row: a hash of its content, and which of the equal rows of its file it is.

Rows have ids of their own, but several rows may have the same one: other systems number samples
from 1 in each run, or write no id at all, and two models' rollouts of the same prompts agree in
theirs. A name such as `3f9a0c1d2b4e5f60#1` means one row of a file, and stays when the row is
copied to another file.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from stillroom.data.hash_set import HashSet
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
