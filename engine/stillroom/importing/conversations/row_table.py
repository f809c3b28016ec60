"""The rows of the sources: a few numbers of each in memory, and the rest in a file."""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from stillroom.importing.conversations.call_tree import NONE
from stillroom.importing.spill import Spill
from stillroom.types import Usage


class LoggedFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is known of a source row apart from the messages of its call."""

    format: str
    source: str
    """Its place as `file:line`, as it is shown to users."""
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
    also_at: tuple[str, ...]
    """The places of other rows that it is put together from."""
    losses: tuple[str, ...]
    metadata: bytes
    """The metadata as a JSON object."""
    tools: int = -1
    """The number of its list of tools; NONE if the source does not say which were offered."""
    messages: list[bytes] = []
    """The messages of a whole conversation as JSON; empty for a call."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LoggedFacts)


class RowTable:
    """All rows that were read and not refused, by number in the order of their sources."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._places, self._sizes = array("Q"), array("I")
        self._ids, self._parents, self._groups = array("q"), array("q"), array("q")
        self.nodes, self.lengths = array("i"), array("I")
        self._aliases, self._alias_rows = array("q"), array("i")
        self.has_parents = False

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self,
        facts: LoggedFacts,
        *,
        judged_as: Sequence[str] = (),
        parent: str | None = None,
        node: int = NONE,
        length: int = 0,
    ) -> int:
        """Adds a row and returns its number.

        `node` is the end of its call in the tree, and `length` the number of its messages; a whole
        conversation has no node.
        """
        data = _ENCODER.encode(facts)
        row = len(self._places)
        self._places.append(self._spill.append(data))
        self._sizes.append(len(data))
        self._ids.append(hashed_id(facts.id))
        self._parents.append(0 if parent is None else hashed_id(parent))
        self._groups.append(0 if facts.group is None else hashed_id(facts.group))
        self.nodes.append(node)
        self.lengths.append(length)
        self.has_parents = self.has_parents or parent is not None
        for alias in judged_as:
            self._aliases.append(hashed_id(alias))
            self._alias_rows.append(row)
        return row

    def facts(self, row: int) -> LoggedFacts:
        """Returns what is known of a row."""
        return self.all_facts([row])[0]

    def all_facts(self, rows: Sequence[int]) -> list[LoggedFacts]:
        """Returns what is known of several rows."""
        places, sizes = self._places, self._sizes
        found = self._spill.read_all([(places[row], sizes[row]) for row in rows])
        return list(map(_DECODER.decode, found))

    def group(self, row: int) -> int:
        """Returns a hash of the group of a row; 0 if it has none."""
        return self._groups[row]

    def parent(self, row: int) -> int:
        """Returns a hash of the id of the row's parent; 0 if it has none."""
        return self._parents[row]

    def by_id(self) -> dict[int, int]:
        """Returns the rows by the hashes of their ids; of rows with the same id, the first."""
        found: dict[int, int] = {}
        for row, key in enumerate(self._ids):
            if key:
                found.setdefault(key, row)
        return found

    def judged(self) -> Iterator[tuple[int, int]]:
        """Yields the hashes under which feedback may refer to rows, each with its row."""
        for keys in (self._ids, self._groups):
            yield from ((key, row) for row, key in enumerate(keys) if key)
        yield from zip(self._aliases, self._alias_rows, strict=True)


def hashed_id(name: str | None) -> int:
    """Returns the hash by which a table knows an id or a group; 0 for none."""
    return 0 if name is None else hash(name) or 1
