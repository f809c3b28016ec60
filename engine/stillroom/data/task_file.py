"""The tasks of a prompts file, of which only the places are held in memory."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, overload

from stillroom.data.checks import Problem
from stillroom.data.formats import RowFormat, Task, checked_rows, task_from_row
from stillroom.data.row_files import RowReader, decode_line, decode_text_line
from stillroom.errors import DataError
from stillroom.lines import Line


class TaskFile(Sequence[Task]):
    """The tasks of a prompts file, each read from the file when it is needed.

    A task takes 20 bytes of memory. Raises DataError at the first bad row, or if there is no row.
    `change` is applied to each task, e.g. to set its system message.
    """

    def __init__(self, path: Path, change: Callable[[Task], Task] = lambda task: task) -> None:
        self._path, self._change = path, change
        self._reader = RowReader()
        self._offsets, self._sizes, self._ids = array("Q"), array("I"), array("Q")
        for line, row in checked_rows(path, RowFormat.PROMPTS):
            self._offsets.append(line.offset)
            self._sizes.append(line.num_bytes)
            self._ids.append(int(change(task_from_row(row)).task_id, 16))
        if not self._ids:
            raise DataError(f"{path} holds no prompts", "write one prompt per line")

    def chosen(self, numbers: Sequence[int]) -> "TaskFile":
        """Returns only the tasks with these numbers, from 0, in this order."""
        chosen = TaskFile.__new__(TaskFile)
        chosen._path, chosen._change, chosen._reader = self._path, self._change, self._reader
        chosen._offsets = array("Q", [self._offsets[number] for number in numbers])
        chosen._sizes = array("I", [self._sizes[number] for number in numbers])
        chosen._ids = array("Q", [self._ids[number] for number in numbers])
        return chosen

    def id_of(self, number: int) -> str:
        """Returns the id of a task, which is not read for it."""
        return f"{self._ids[number]:016x}"

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TaskFile": ...
    def __getitem__(self, index: int | slice) -> "Task | TaskFile":
        """Returns a task. Raises DataError if its row has changed since the file was opened."""
        if isinstance(index, slice):
            return self.chosen(range(*index.indices(len(self))))
        data = self._reader.read(self._path, self._offsets[index], self._sizes[index])
        decode = decode_text_line if self._path.suffix == ".txt" else decode_line
        row = decode(Line(0, 0, len(data), data))
        task = None if isinstance(row, Problem) else self._change(task_from_row(row))
        if task is None or task.task_id != self.id_of(index):
            raise DataError(
                f"{self._path} has changed while it was read",
                "start again; do not write to a file that a run reads",
            )
        return task

    def __iter__(self) -> Iterator[Task]:
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)
