"""Tasks that are read from their file one at a time."""

from pathlib import Path

import msgspec
import pytest

from fakes.rollout_rows import write_rows
from stillroom.data.formats import Task, load_tasks
from stillroom.data.task_file import TaskFile
from stillroom.errors import DataError

ROWS = [{"prompt": f"What is {number}?", "metadata": {"n": number}} for number in range(5)]


def test_tasks_are_those_that_are_loaded_at_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [*ROWS, ROWS[1]])
    text = tmp_path / "prompts.txt"
    text.write_text("\ufefffirst one\n\n  second ü \n", encoding="utf-8")

    for file in (path, text):
        with TaskFile(file) as tasks:
            loaded = load_tasks(file)
            assert list(tasks) == loaded
            assert [tasks.task_id(number) for number in range(len(tasks))] == [
                task.task_id for task in loaded
            ]
    with TaskFile(path) as tasks:
        assert list(tasks.select([3, 0])) == [load_tasks(path)[3], load_tasks(path)[0]]
        assert list(tasks[1:3]) == load_tasks(path)[1:3]


def test_each_task_is_changed_alike(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", ROWS)

    def change(task: Task) -> Task:
        return msgspec.structs.replace(task, task_id=task.task_id[::-1])

    with TaskFile(path, change) as tasks:
        assert [task.task_id[::-1] for task in tasks] == [task.task_id for task in load_tasks(path)]


def test_a_row_that_has_changed_since_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", ROWS)
    with TaskFile(path) as tasks:
        assert tasks[0].metadata == {"n": 0}
        path.write_bytes(path.read_bytes().replace(b"What is 3", b"What is 4"))
        assert tasks[2].metadata == {"n": 2}
        with pytest.raises(DataError, match="has changed while it was read"):
            _ = tasks[3]


def test_a_bad_row_and_no_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl:6"):
        TaskFile(write_rows(tmp_path / "prompts.jsonl", [*ROWS, {"prompt": 5}]))
    with pytest.raises(DataError, match="has no prompts"):
        TaskFile(write_rows(tmp_path / "empty.jsonl", []))
