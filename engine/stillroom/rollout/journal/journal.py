"""What is done and what is owed: an append-only record that lets a killed run go on.

Each finished model call and tool reply is on record before it is used. A finished rollout is a row
of the output file; until then its steps stand in the journal, and a new process replays them.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import InputError
from stillroom.files import AppendLog, FileLock, cut_torn_line, write_atomic, write_json
from stillroom.rollout.journal.records import (
    FinishedRow,
    JudgeRecord,
    KnownSteps,
    OutstandingRecord,
    Record,
    RepliesRecord,
    RestartRecord,
    RolloutKey,
    StepRecord,
    TurnRecord,
    UnconfirmedRecord,
    finished_rows,
    read_journal,
)
from stillroom.teachers.budget import Cost, Outstanding
from stillroom.tools.source import ToolResult
from stillroom.types import CallTotals, SampledTurn, Trajectory

_SYNC_EVERY_S = 1.0
_SETTINGS = "settings.json"
_WEIGHTS = "weights"


def holds_rollouts(path: Path) -> bool:
    """Returns whether a rollout run wrote rows to this file."""
    is_begun = (journal_folder(path) / _SETTINGS).exists()
    return is_begun and path.exists() and path.stat().st_size > 0


def journal_folder(output: Path) -> Path:
    """Returns the folder beside an output that holds its journal, settings and lock."""
    return output.with_name(f".{output.name}")


def journal_path(output: Path) -> Path:
    """Returns the journal of an output."""
    return journal_folder(output) / "journal.jsonl"


def check_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Raises InputError if an output was begun with other settings, or by something else."""
    if not _is_begun(output):
        return
    path = journal_folder(output) / _SETTINGS
    if not path.exists():
        raise InputError(
            f"{output} exists and was not written by generate_rollouts",
            "choose another output",
        )
    before = msgspec.json.decode(path.read_bytes())
    given = msgspec.json.decode(msgspec.json.encode(settings))
    names = [*given, *(before.keys() - given.keys())]
    if before.get(_WEIGHTS) is None or given.get(_WEIGHTS) is None:
        # A model of the hub has no commit before it was fetched.
        names = [name for name in names if name != _WEIGHTS]
    changed = [name for name in names if before.get(name) != given.get(name)]
    if changed:
        shown = "; ".join(f"{n} was {before.get(n)!r}, now {given.get(n)!r}" for n in changed)
        raise InputError(
            f"{output} was begun with other settings: {shown}",
            "run with the settings it was begun with to go on, or choose another output",
        )


def _is_begun(output: Path) -> bool:
    files = (output, journal_path(output))
    return any(file.exists() and file.stat().st_size > 0 for file in files)


class RolloutStore:
    """The output file of a rollout run with its journal; one process at a time.

    `on_turn` hears of every new call; replayed ones are not new.
    Raises InputError if the settings differ from those the file was begun with, and DataError if
    the file or its journal was damaged anywhere but in its last line.
    """

    def __init__(
        self,
        output: Path,
        settings: dict[str, Any],
        *,
        on_turn: Callable[[SampledTurn], None] = lambda _turn: None,
    ) -> None:
        self.output, self.on_turn = output, on_turn
        self._folder = journal_folder(output)
        self._lock = FileLock(self._folder / "lock")
        if not self._lock.try_acquire():
            raise InputError(
                f"another process is writing {output}",
                "wait for that run (`stillroom list-runs`), or choose another output",
            )
        journal = journal_path(output)
        try:
            check_settings(output, settings)
            self._is_empty = not _is_begun(output)
            if self._is_empty:
                write_json(self._folder / _SETTINGS, settings)
            cut_torn_line(output)
            cut_torn_line(journal)
            self.finished = finished_rows(output)
            self._before = read_journal(journal, self.finished)
            self.known = self._before.known
            self._unconfirmed = self._before.unconfirmed + self.lost.worst
            self._rows, self._journal = AppendLog(output), AppendLog(journal)
        except BaseException:
            self._lock.release()
            raise
        self._synced_at = time.monotonic()
        self._has_sent = False
        self.num_restarted = 0
        """Rollouts that were begun again, because their tools' state could not be replayed."""

    @property
    def orphaned(self) -> Outstanding:
        """What the last run had out, at most, if it was killed."""
        return self._before.outstanding

    @property
    def lost(self) -> Outstanding:
        """The same of all runs that were killed."""
        return self._before.lost + self._before.outstanding

    def recorder(self, key: RolloutKey) -> "StepRecorder":
        """Returns what records and replays the steps of one rollout."""
        return StepRecorder(self, key, self.known.pop(key, None) or KnownSteps())

    def append(self, record: Record) -> None:
        """Puts a step on record; the disk is waited for once a second, in another thread."""
        self._is_empty = False
        if isinstance(record, UnconfirmedRecord):
            self._unconfirmed = self._unconfirmed + Cost(record.tokens, record.usd)
        self._journal.append(record)
        now = time.monotonic()
        if now - self._synced_at >= _SYNC_EVERY_S:
            self._synced_at = now
            self._journal.sync_soon()

    def finish(self, trajectory: Trajectory) -> None:
        """Writes the row of a finished rollout."""
        self._is_empty = False
        self._rows.append(trajectory)
        key = RolloutKey(trajectory.task_id, trajectory.sample)
        self.finished[key] = FinishedRow.of(trajectory)

    def record_unconfirmed(self, worst: Cost) -> None:
        """Puts on record that a call broke off which may have been billed."""
        self.append(UnconfirmedRecord(tokens=worst.tokens, usd=worst.usd))

    def record_outstanding(self, most: Outstanding) -> None:
        """Puts on record what may have been billed if nothing more is heard of this process."""
        self._put(most, begins=not self._has_sent)
        self._has_sent = True

    def inherit(self, lost: Outstanding) -> None:
        """Puts on record what other processes had out when they were killed."""
        self._is_empty = False
        self._unconfirmed = self._unconfirmed + lost.worst
        self._put(lost, begins=True)

    def _put(self, most: Outstanding, *, begins: bool) -> None:
        tokens, usd = most.worst.tokens, most.worst.usd
        self._journal.append(
            OutstandingRecord(calls=most.calls, tokens=tokens, usd=usd, begins=begins)
        )

    def spent(self) -> Cost:
        """Returns what is on record as spent by earlier runs, calls that broke off or were out when
        a run was killed included.

        Where a row says less than the journal (older ones do), the journal is right.
        """
        by_step = self._before.spent
        by_row = {key: row.spent for key, row in self.finished.items()}
        costs = [_larger(cost, by_step.get(key, Cost())) for key, cost in by_row.items()]
        costs += [cost for key, cost in by_step.items() if key not in by_row]
        return sum(costs, start=self._before.unconfirmed + self.lost.worst)

    def paid(self) -> CallTotals:
        """Returns all calls on record, those of unfinished rollouts included."""
        totals = [row.paid for row in self.finished.values()]
        by_step = self._before.paid
        totals += [paid for key, paid in by_step.items() if key not in self.finished]
        return sum(totals, start=CallTotals())

    def close(self, *, is_complete: bool) -> None:
        """Closes the files; a journal that nothing depends on any more is removed.

        What may have been billed stays on record: no row tells of it.
        """
        with ExitStack() as closing:
            closing.callback(self._lock.release)
            closing.callback(self._journal.close)
            self._rows.close()
            if self._has_sent:
                self.record_outstanding(Outstanding())
            if self._is_empty:
                # Nothing was done, so that the next run may have other settings.
                self._journal.remove()
            # Steps that no recorder took belong to rollouts that were not asked for this time.
            elif is_complete and not self.known:
                self._drop_steps()

    def _drop_steps(self) -> None:
        unconfirmed = self._unconfirmed
        if unconfirmed == Cost():
            self._journal.remove()
        else:
            left = UnconfirmedRecord(tokens=unconfirmed.tokens, usd=unconfirmed.usd)
            write_atomic(self._journal.path, msgspec.json.encode(left) + b"\n")


class StepRecorder:
    """The journal as one rollout sees it."""

    def __init__(self, store: RolloutStore, key: RolloutKey, known: KnownSteps) -> None:
        self._store, self._key, self._known = store, key, known

    def known_turn(self, index: int) -> SampledTurn | None:
        """Returns the turn `index` if it was finished earlier."""
        return self._known.turns.get(index)

    def known_replies(self, index: int) -> list[ToolResult] | None:
        """Returns the tools' replies to turn `index` if they came earlier."""
        return self._known.replies.get(index)

    def start_over(self) -> None:
        """Drops what is known, on record too: the state of the tools that it led to is gone."""
        task_id, sample = self._key
        self._put(RestartRecord(task_id=task_id, sample=sample))
        self._store.num_restarted += 1

    def dropped(self) -> CallTotals:
        """Returns what was paid for and dropped, by this and by earlier runs."""
        return self._known.dropped

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Puts a finished turn on record."""
        task_id, sample = self._key
        self._put(TurnRecord(task_id=task_id, sample=sample, index=index, turn=turn))
        self._store.on_turn(turn)

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Puts the tools' replies on record."""
        task_id, sample = self._key
        self._put(RepliesRecord(task_id=task_id, sample=sample, index=index, replies=replies))

    def judge_turns(self) -> list[SampledTurn]:
        """Returns the judge's replies that came earlier."""
        return self._known.judge

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Puts a reply of the judge on record."""
        task_id, sample = self._key
        self._put(JudgeRecord(task_id=task_id, sample=sample, index=index, turn=turn))
        self._store.on_turn(turn)

    def _put(self, record: StepRecord) -> None:
        self._store.append(record)
        self._known.add(record)


def _larger(one: Cost, other: Cost) -> Cost:
    return Cost(max(one.tokens, other.tokens), max(one.usd, other.usd))
