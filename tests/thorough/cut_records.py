"""The last record of each kind of file cut at every byte: are all records before it read, and does writing go on? cut_records.py [--records 20]

Cut are a rollouts file, its journal, the events of a run, the journal of a rescoring and the failures of a run. At each offset of the last record the file is
opened again as the product opens it, what it reads is compared with the records before the cut, one more record is appended and all is read again.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from scenes import report, workspace

from fakes.rollout_rows import assistant, rollout_row
from fakes.scripted_policy import turn
from stillroom.data.formats import decode_trajectory
from stillroom.files import AppendLog
from stillroom.lines import read_lines
from stillroom.rollout.journal.journal import RolloutStore, journal_path
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.rescore.rows import ScoreJournal
from stillroom.run_folder import RunEvent, RunFolder

SETTINGS: dict[str, Any] = {"model": "m"}


def task(number: int) -> str:
    return f"täsk-{number:03}"


class Rollouts:
    """A rollouts file: its rows are finished rollouts."""

    def __init__(self, folder: Path) -> None:
        self.file = self.output = folder / "out.jsonl"

    def write(self, numbers: range) -> None:
        store = RolloutStore(self.output, SETTINGS)
        for number in numbers:
            row = rollout_row(task_id=task(number))
            store.finish(decode_trajectory(msgspec.json.encode(row)))
        store.close(is_complete=False)

    def read(self) -> list[str]:
        store = RolloutStore(self.output, SETTINGS)
        store.close(is_complete=False)
        return [key.task_id for key in store.finished]


class Journal(Rollouts):
    """The journal of an output: its records are turns of unfinished rollouts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = journal_path(self.output)

    def write(self, numbers: range) -> None:
        store = RolloutStore(self.output, SETTINGS)
        for number in numbers:
            store.recorder(RolloutKey(task(number), 0)).record_turn(0, turn(assistant("“7”")))
        store.close(is_complete=False)

    def read(self) -> list[str]:
        store = RolloutStore(self.output, SETTINGS)
        store.close(is_complete=False)
        return [key.task_id for key in store.recorded_steps]


class Events:
    """The events of a run."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        self.file = self.run.events

    def write(self, numbers: range) -> None:
        with AppendLog(self.file) as log:
            for number in numbers:
                log.append(RunEvent(event="note", text=task(number)))

    def read(self) -> list[str]:
        return [event.text or "" for event in self.run.read_events()]


class Failures(Events):
    """The failed rollouts of a run, and every other log of lines."""

    def read(self) -> list[str]:
        with AppendLog(self.file):
            pass
        return [msgspec.json.decode(line.data)["text"] for line in read_lines(self.file)]


class Scores:
    """The journal of a rescoring: judgements that were paid for."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ".out.scores"

    def write(self, numbers: range) -> None:
        with AppendLog(self.file) as log:
            for number in numbers:
                log.append({"settings": "s", "row": task(number), "total": 1.0, "by_name": {"ü": 1.0}, "calls": 1})  # fmt: skip

    def read(self) -> list[str]:
        with ScoreJournal(self.file, "s") as journal:
            return [task(n) for n in range(1000) if journal.recorded(task(n)) is not None]


def cut_everywhere(kind: Callable[[Path], Any], folder: Path, records: int) -> tuple[int, int]:
    """Returns at how many offsets the last record was cut, and at how many of them something went wrong."""
    whole = folder / "whole"
    whole.mkdir(parents=True)
    kind(whole).write(range(records))
    data = kind(whole).file.read_bytes()
    begin = data.rstrip(b"\n").rfind(b"\n") + 1
    wrong = 0
    expected = [task(number) for number in range(records)]
    for offset in range(begin, len(data) + 1):
        copy = folder / "cut"
        shutil.copytree(whole, copy)
        opened = kind(copy)
        opened.file.write_bytes(data[:offset])
        before = expected if offset == len(data) else expected[:-1]
        read = opened.read()
        # Events are read while they are written, so a last line that lacks only its end counts.
        is_right = read == before or (kind is Events and offset == len(data) - 1 and read == expected)  # fmt: skip
        opened.write(range(500, 501))
        wrong += not (is_right and opened.read() == [*before, task(500)])
        shutil.rmtree(copy)
    return len(data) + 1 - begin, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20)
    options = parser.parse_args()
    kinds = (Rollouts, Journal, Events, Failures, Scores)
    with workspace() as space:
        counts = {k.__name__: cut_everywhere(k, space.root / k.__name__, options.records) for k in kinds}  # fmt: skip
    cuts, wrong = (sum(count[i] for count in counts.values()) for i in (0, 1))
    shown = ", ".join(f"{name.lower()} {num}" for name, (num, _) in counts.items())
    return report(
        4,
        f"{cuts} cuts ({shown}): {wrong} in which an earlier record was lost or the next could not be written",
        wrong == 0,
        seed=0,
    )


if __name__ == "__main__":
    sys.exit(main())
