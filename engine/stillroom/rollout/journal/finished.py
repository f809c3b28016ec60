"""The finished rows of an output, packed to keep millions of them in memory."""

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from stillroom.rollout.journal.records import FinishedRow, RolloutKey, decoded_lines
from stillroom.types import Answerer, CallTotals, Usage

_FINISHED_ROW = msgspec.json.Decoder(FinishedRow)
Answerers = tuple[Answerer, ...]
"""The models that answered the calls of one row."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a FinishedRow that differ from row to row, without their names."""

    task_id: str
    sample: int
    reward: float | None
    success: bool | None
    truncated: bool
    turns: int
    usage: Usage
    cost_usd: float | None
    judge: CallTotals | None
    dropped: CallTotals | None


_PACKED = msgspec.msgpack.Decoder(_Packed)


class FinishedRows(Mapping[RolloutKey, FinishedRow]):
    """The finished rows of an output by rollout key, at about 200 bytes each."""

    def __init__(self) -> None:
        # The packed rows one after another, and the offset at which each row ends, after a 0.
        self._data = bytearray()
        self._ends = array("Q", [0])
        # Each row's number, by the hash of its key, which takes less memory than the key.
        self._numbers: dict[int, int] = {}
        self._group_indices: dict[Answerers, int] = {}
        """The index in `_groups` of each group of answering models; most rows share one group."""
        # For each row: the index in `_groups` of the models that answered, and that judged.
        self._answered_by, self._judged_by = array("I"), array("I")
        self._groups: list[Answerers] = []

    def add(self, row: FinishedRow) -> None:
        """Adds a row, which replaces an earlier one of the same rollout."""
        self._numbers[hash(RolloutKey(row.task_id, row.sample))] = len(self._answered_by)
        self._answered_by.append(self._group_index(row.answered_by))
        self._judged_by.append(self._group_index(row.judged_by))
        judge = row.judge and msgspec.structs.replace(row.judge, answered_by=())
        fields = msgspec.structs.astuple(msgspec.structs.replace(row, judge=judge))
        self._data += msgspec.msgpack.encode(_Packed(*fields[: len(_Packed.__struct_fields__)]))
        self._ends.append(len(self._data))

    def _group_index(self, answerers: Answerers) -> int:
        """Returns the index of a group of models in `_groups`; a new group is added."""
        index = self._group_indices.setdefault(answerers, len(self._groups))
        if index == len(self._groups):
            self._groups.append(answerers)
        return index

    def __getitem__(self, key: RolloutKey) -> FinishedRow:
        row = self._row(self._numbers[hash(key)])
        if (row.task_id, row.sample) != key:
            raise KeyError(key)
        return row

    def __iter__(self) -> Iterator[RolloutKey]:
        return (RolloutKey(row.task_id, row.sample) for row in self.rows())

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self) -> Iterator[FinishedRow]:
        """Yields the rows one by one, so that they are never all in memory as objects."""
        return map(self._row, list(self._numbers.values()))

    def _row(self, number: int) -> FinishedRow:
        """Returns the row with this number."""
        # A copy: while a view of it exists, the array cannot grow.
        packed = _PACKED.decode(bytes(self._data[self._ends[number] : self._ends[number + 1]]))
        row = FinishedRow(
            *msgspec.structs.astuple(packed),
            answered_by=self._groups[self._answered_by[number]],
        )
        if row.judge is None:
            return row
        judged_by = self._groups[self._judged_by[number]]
        judge = msgspec.structs.replace(row.judge, answered_by=judged_by)
        return msgspec.structs.replace(row, judge=judge)


def finished_rows(output: Path) -> FinishedRows:
    """Returns the finished rows of an output file."""
    rows = FinishedRows()
    for row in decoded_lines(output, _FINISHED_ROW, "a rollout"):
        rows.add(row)
    return rows
