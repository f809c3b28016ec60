"""Stores the source rows in a temporary file, with a few numbers of each row in memory."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from stillroom.errors import FailureClass
from stillroom.importing.conversations.call_tree import NONE
from stillroom.importing.spill import Spill
from stillroom.types import StopReason, Usage


class StoredRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The fields of a source row, without the messages of its call."""

    format: str
    source: str
    """The location as `file:line`, as shown to users."""
    id: str | None
    group: str | None
    provider: str | None
    model: str | None
    usage: Usage | None
    cost_usd: float | None
    started_at: str | None
    duration_s: float | None
    finish_reason: str | None
    error: str | None
    scores: dict[str, float]
    merged_from: tuple[str, ...]
    """The locations of other rows that were merged into it."""
    dropped: tuple[str, ...]
    metadata: bytes
    """The metadata as a JSON object."""
    tools: int = -1
    """The number of its list of tools; NONE if the source does not log the offered tools."""
    failure: FailureClass | None = None
    """The kind of the error; None if the source does not say."""
    messages: list[bytes] = []
    """The messages of a whole conversation as JSON; empty for a call."""
    stop_reason: StopReason | None = None
    tool_errors: int | None = None
    answered_by: tuple[str, ...] = ()


_MAX_ID_FIELDS = 20
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StoredRow)


class RowTable:
    """All accepted rows, numbered in the order of their sources."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        # One element per row: its offset and size in the spill, and hashes of its ids (0 for none).
        self._offsets, self._sizes = array("Q"), array("I")
        self._ids, self._parents, self._groups = array("q"), array("q"), array("q")
        self.nodes, self.lengths = array("i"), array("I")
        """For each row, its call's last node in the tree and number of messages; see `add`."""
        # Hashes of further ids to which feedback may refer, each with its row.
        self._aliases, self._alias_rows = array("q"), array("i")
        self._named_ids, self._named_rows = array("q"), array("i")
        self._chosen_ids, self._chosen_rows = array("q"), array("i")
        self.id_fields: dict[str, None] = {}
        """The names of fields with additional ids, in the order in which they were found."""
        self.chosen_fields: dict[str, None] = {}
        """The paths of the fields that the user named for look-ups of feedback ids."""
        self.has_parents = False

    def __len__(self) -> int:
        return len(self._offsets)

    def add(
        self,
        stored: StoredRow,
        data: bytes,
        *,
        feedback_ids: Sequence[str] = (),
        ids: Iterable[tuple[str, str]] = (),
        chosen_ids: Iterable[tuple[str, str]] = (),
        parent: str | None = None,
        node: int = NONE,
        length: int = 0,
    ) -> int:
        """Adds a row and returns its number. `data` is the result of `encode_row`.

        `ids` are the ids in fields with the name of an id, and `chosen_ids` those in the field that
        the user named. `node` is the last node of its call in the tree, and `length` the number of
        its messages; a whole conversation has the node NONE.
        """
        row = len(self._offsets)
        self._offsets.append(self._spill.append(data))
        self._sizes.append(len(data))
        self._ids.append(hash_of_id(stored.id))
        self._parents.append(0 if parent is None else hash_of_id(parent))
        self._groups.append(0 if stored.group is None else hash_of_id(stored.group))
        self.nodes.append(node)
        self.lengths.append(length)
        self.has_parents = self.has_parents or parent is not None
        for alias in feedback_ids:
            self._aliases.append(hash_of_id(alias))
            self._alias_rows.append(row)
        for field, name in ids:
            self._named_ids.append(hash_of_id(name))
            self._named_rows.append(row)
            if len(self.id_fields) < _MAX_ID_FIELDS:
                self.id_fields[field] = None
        for field, name in chosen_ids:
            self._chosen_ids.append(hash_of_id(name))
            self._chosen_rows.append(row)
            if len(self.chosen_fields) < _MAX_ID_FIELDS:
                self.chosen_fields[field] = None
        return row

    def stored_row(self, row: int) -> StoredRow:
        """Returns a row's fields."""
        return self.stored_rows([row])[0]

    def stored_rows(self, rows: Sequence[int]) -> list[StoredRow]:
        """Returns the fields of several rows."""
        offsets, sizes = self._offsets, self._sizes
        encoded = [self._spill.read(offsets[row], sizes[row]) for row in rows]
        return list(map(_DECODER.decode, encoded))

    def group(self, row: int) -> int:
        """Returns a hash of the group of a row; 0 if it has none."""
        return self._groups[row]

    def parent(self, row: int) -> int:
        """Returns a hash of the id of the row's parent; 0 if it has none."""
        return self._parents[row]

    def by_id(self) -> dict[int, int]:
        """Returns the first row of each id, by the id's hash."""
        first_rows: dict[int, int] = {}
        for row, key in enumerate(self._ids):
            if key:
                first_rows.setdefault(key, row)
        return first_rows

    def feedback_targets(self) -> Iterator[tuple[int, int]]:
        """Yields (hash, row) for the ids, groups and `feedback_ids` of rows."""
        for keys in (self._ids, self._groups):
            yield from ((key, row) for row, key in enumerate(keys) if key)
        yield from zip(self._aliases, self._alias_rows, strict=True)

    def chosen_targets(self) -> Iterator[tuple[int, int]]:
        """Yields (hash, row) for the ids in the field that the user named."""
        return zip(self._chosen_ids, self._chosen_rows, strict=True)

    def field_targets(self) -> Iterator[tuple[int, int]]:
        """Yields (hash, row) for the additional ids of rows."""
        return zip(self._named_ids, self._named_rows, strict=True)


def encode_row(row: StoredRow) -> bytes:
    """Encodes a row for `RowTable.add`.

    Raises OverflowError for a number that is too large.
    """
    return _ENCODER.encode(row)


def hash_of_id(name: str | None) -> int:
    """Returns the hash by which the table stores an id or a group; 0 for None."""
    return 0 if name is None else hash(name) or 1
