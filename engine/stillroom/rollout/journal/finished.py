"""The finished rows of an output, packed so that very many fit into memory."""

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from stillroom.rollout.journal.records import FinishedRow, RolloutKey, decoded_lines
from stillroom.types import Answerer, CallTotals, Usage

_LEAST_SLOTS = 1 << 10
_ROW_BITS = 32
_ROW = msgspec.json.Decoder(FinishedRow)
Answerers = tuple[Answerer, ...]


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
    """The finished rows of an output by the key of their rollout, in some 150 bytes each."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends = array("Q", [0])
        self._replaced: set[int] = set()
        """The numbers of rows that a later row of the same rollout has replaced."""
        # An open-addressing table. A slot holds a part of a key's hash, and the number of its row
        # plus 1; or 0 if it is free.
        self._slots = array("Q", bytes(8 * _LEAST_SLOTS))
        self._answerers: dict[Answerers, int] = {}
        """The groups of models that answered; most rows have the same one."""
        self._answered_by, self._judged_by = array("I"), array("I")
        self._groups: list[Answerers] = []

    def add(self, row: FinishedRow) -> None:
        """Adds a row, which replaces an earlier one of the same rollout."""
        key = RolloutKey(row.task_id, row.sample)
        slot, number = self._find(key)
        if number is not None:
            self._replaced.add(number)
        self._answered_by.append(self._group(row.answered_by))
        self._judged_by.append(self._group(row.judged_by))
        judge = row.judge and msgspec.structs.replace(row.judge, answered_by=())
        fields = msgspec.structs.astuple(msgspec.structs.replace(row, judge=judge))
        self._data += msgspec.msgpack.encode(_Packed(*fields[: len(_Packed.__struct_fields__)]))
        self._ends.append(len(self._data))
        self._slots[slot] = _tag(key) | len(self._answered_by)
        if 5 * len(self._answered_by) > 3 * len(self._slots):
            self._grow()

    def _group(self, answerers: Answerers) -> int:
        number = self._answerers.setdefault(answerers, len(self._groups))
        if number == len(self._groups):
            self._groups.append(answerers)
        return number

    def __getitem__(self, key: RolloutKey) -> FinishedRow:
        _, number = self._find(key)
        if number is None:
            raise KeyError(key)
        return self._row(number)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, RolloutKey) and self._find(key)[1] is not None

    def __iter__(self) -> Iterator[RolloutKey]:
        return (RolloutKey(row.task_id, row.sample) for row in self.rows())

    def __len__(self) -> int:
        return len(self._answered_by) - len(self._replaced)

    @property
    def num_bytes(self) -> int:
        """The memory that the rows take."""
        arrays = (self._ends, self._slots, self._answered_by, self._judged_by)
        return len(self._data) + sum(one.itemsize * len(one) for one in arrays)

    def rows(self) -> Iterator[FinishedRow]:
        """Yields the rows one by one, so that they are never all in memory as objects."""
        for number in range(len(self._answered_by)):
            if number not in self._replaced:
                yield self._row(number)

    def _row(self, number: int) -> FinishedRow:
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

    def _find(self, key: RolloutKey) -> tuple[int, int | None]:
        """Returns the slot of a key and the number of its row; None if there is no row."""
        mask, tag = len(self._slots) - 1, _tag(key)
        slot = hash(key) & mask
        while held := self._slots[slot]:
            number = (held & ((1 << _ROW_BITS) - 1)) - 1
            if held >> _ROW_BITS == tag >> _ROW_BITS:
                row = self._row(number)
                if (row.task_id, row.sample) == key:
                    return slot, number
            slot = (slot + 1) & mask
        return slot, None

    def _grow(self) -> None:
        self._slots = array("Q", bytes(2 * 8 * len(self._slots)))
        mask = len(self._slots) - 1
        for number in range(len(self._answered_by)):
            if number not in self._replaced:
                row = self._row(number)
                key = RolloutKey(row.task_id, row.sample)
                slot = hash(key) & mask
                while self._slots[slot]:
                    slot = (slot + 1) & mask
                self._slots[slot] = _tag(key) | number + 1


def _tag(key: RolloutKey) -> int:
    """Returns the part of a key's hash that a slot holds, at its place in the slot."""
    return hash(key) >> 16 & 0xFFFFFFFF << _ROW_BITS


def finished_rows(output: Path) -> FinishedRows:
    """Returns the finished rows of an output file."""
    rows = FinishedRows()
    for row in decoded_lines(output, _ROW, "a rollout"):
        rows.add(row)
    return rows
