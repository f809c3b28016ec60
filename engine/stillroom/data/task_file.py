"""The tasks of a prompts file, which are read from the file when they are needed."""

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
    """The tasks of a prompts file. Only their ids and positions, 20 bytes each, are in memory.

    `transform` is applied to each task, e.g. to set its system message. The constructor raises
    DataError for an invalid row, and for a file without rows.
    """

    def __init__(self, path: Path, transform: Callable[[Task], Task] = lambda task: task) -> None:
        self._path, self._transform = path, transform
        self._reader = RowReader()
        # Parallel arrays with one entry for each task.
        self._offsets, self._sizes, self._ids = array("Q"), array("I"), array("Q")
        for line, row in checked_rows(path, RowFormat.PROMPTS):
            self._offsets.append(line.offset)
            self._sizes.append(line.num_bytes)
            self._ids.append(int(transform(task_from_row(row)).task_id, 16))
        if not self._ids:
            raise DataError(f"{path} has no prompts", "write one prompt per line")

    def select(self, numbers: Sequence[int]) -> "TaskFile":
        """Returns the tasks with these numbers, counted from 0, in this order."""
        selected = TaskFile.__new__(TaskFile)
        selected._path, selected._transform, selected._reader = (
            self._path,
            self._transform,
            self._reader,
        )
        selected._offsets = array("Q", [self._offsets[number] for number in numbers])
        selected._sizes = array("I", [self._sizes[number] for number in numbers])
        selected._ids = array("Q", [self._ids[number] for number in numbers])
        return selected

    def task_id(self, number: int) -> str:
        """Returns the id of a task, without reading the task."""
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
            return self.select(range(*index.indices(len(self))))
        data = self._reader.read(self._path, self._offsets[index], self._sizes[index])
        decode = decode_text_line if self._path.suffix == ".txt" else decode_line
        row = decode(Line(0, 0, len(data), data))
        task = None if isinstance(row, Problem) else self._transform(task_from_row(row))
        if task is None or task.task_id != self.task_id(index):
            raise DataError(
                f"{self._path} has changed while it was read",
                "start the run again, and do not write to its input while it runs",
            )
        return task

    def __iter__(self) -> Iterator[Task]:
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)
