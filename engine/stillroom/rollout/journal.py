"""What is done and what is owed: an append-only record that lets a killed run go on.

Each finished model call and tool reply is on record before it is used. A finished rollout is a row
of the output file; until then its steps stand in the journal, and a new process replays them.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from stillroom.errors import DataError, InputError
from stillroom.files import AppendLog, FileLock, cut_torn_line, read_lines, write_json
from stillroom.teachers.budget import Cost
from stillroom.tools.base import ToolResult
from stillroom.types import SampledTurn, Trajectory, Usage

_SYNC_EVERY_S = 1.0
_SETTINGS = "settings.json"


class RolloutKey(NamedTuple):
    """Which rollout: the task and the number of its sample."""

    task_id: str
    sample: int


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """A finished model call."""

    task_id: str
    sample: int
    index: int
    turn: SampledTurn


class RepliesRecord(msgspec.Struct, frozen=True, kw_only=True, tag="replies"):
    """The tools' replies to a turn."""

    task_id: str
    sample: int
    index: int
    replies: list[ToolResult]


class RestartRecord(msgspec.Struct, frozen=True, kw_only=True, tag="restart"):
    """What stands before this of the rollout counts no more: its tools' state is gone."""

    task_id: str
    sample: int


class UnconfirmedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="unconfirmed"):
    """A call that broke off and may have been billed; its worst case."""

    tokens: int
    usd: float


_Record = TurnRecord | RepliesRecord | RestartRecord | UnconfirmedRecord
RECORD: msgspec.json.Decoder[_Record] = msgspec.json.Decoder(_Record)
_T = TypeVar("_T")


class FinishedRow(msgspec.Struct, frozen=True):
    """The part of a row that counts."""

    task_id: str
    sample: int
    reward: float | None
    success: bool | None
    truncated: bool
    turns: int = 1
    usage: Usage = Usage()
    cost_usd: float | None = None


_ROW = msgspec.json.Decoder(FinishedRow)


@dataclass(slots=True)
class KnownSteps:
    """The steps of one unfinished rollout that are on record."""

    turns: dict[int, SampledTurn] = field(default_factory=dict[int, SampledTurn])
    replies: dict[int, list[ToolResult]] = field(default_factory=dict[int, list[ToolResult]])

    @property
    def unanswered_turn(self) -> int | None:
        """The last turn, where it calls tools whose replies are not there yet."""
        last = len(self.turns) - 1
        if last < 0 or last in self.replies or not self.turns[last].message.get("tool_calls"):
            return None
        return last

    @property
    def next_turn(self) -> int | None:
        """The turn that may come next; None before the replies to the last one are there."""
        return len(self.turns) if self.unanswered_turn is None else None


def holds_rollouts(path: Path) -> bool:
    """Returns whether a rollout run wrote rows to this file."""
    is_begun = (journal_folder(path) / _SETTINGS).exists()
    return is_begun and path.exists() and path.stat().st_size > 0


def journal_folder(output: Path) -> Path:
    """Returns the folder beside an output that holds its journal, settings and lock."""
    return output.with_name(f".{output.name}")


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
        journal = self._folder / "journal.jsonl"
        try:
            self._check_settings(settings, journal)
            cut_torn_line(output)
            cut_torn_line(journal)
            self.finished = finished_rows(output)
            self.known, self._paid = _known_steps(journal, self.finished)
            self._rows, self._journal = AppendLog(output), AppendLog(journal)
        except BaseException:
            self._lock.release()
            raise
        self._synced_at = time.monotonic()
        self.num_restarted = 0
        """Rollouts that were begun again, because their tools' state could not be replayed."""

    def recorder(self, key: RolloutKey) -> "StepRecorder":
        """Returns what records and replays the steps of one rollout."""
        return StepRecorder(self, key, self.known.pop(key, None) or KnownSteps())

    def append(self, record: _Record) -> None:
        """Puts a step on record; the disk is waited for once a second at most."""
        now = time.monotonic()
        durable = now - self._synced_at >= _SYNC_EVERY_S
        self._journal.append(record, durable=durable)
        if durable:
            self._synced_at = now

    def finish(self, trajectory: Trajectory) -> None:
        """Writes the row of a finished rollout."""
        self._rows.append(trajectory)
        key = RolloutKey(trajectory.task_id, trajectory.sample)
        self.finished[key] = FinishedRow(
            trajectory.task_id,
            trajectory.sample,
            trajectory.reward,
            trajectory.success,
            trajectory.truncated,
            trajectory.turns,
            trajectory.usage,
            trajectory.cost_usd,
        )

    def record_unconfirmed(self, worst: Cost) -> None:
        """Puts on record that a call broke off which may have been billed."""
        self.append(UnconfirmedRecord(tokens=worst.tokens, usd=worst.usd))

    def spent(self) -> Cost:
        """Returns what is on record as spent by earlier runs, calls that broke off included.

        Of a rollout that was begun again, the journal knows more than the row.
        """
        by_row = {key: Cost.of(row.usage, row.cost_usd) for key, row in self.finished.items()}
        costs = [_larger(cost, self._paid.get(key, Cost())) for key, cost in by_row.items()]
        costs += [cost for key, cost in self._paid.items() if key not in by_row]
        return Cost(sum(cost.tokens for cost in costs), sum(cost.usd for cost in costs))

    def close(self, *, is_complete: bool) -> None:
        """Closes the files; a journal that nothing depends on any more is removed."""
        self._rows.close()
        self._journal.close()
        # Steps that no recorder took belong to rollouts that were not asked for this time.
        if is_complete and not self.known:
            self._journal.path.unlink()
        self._lock.release()

    def _check_settings(self, settings: dict[str, Any], journal: Path) -> None:
        path = self._folder / _SETTINGS
        given = msgspec.json.decode(msgspec.json.encode(settings))
        if not any(file.exists() and file.stat().st_size > 0 for file in (self.output, journal)):
            write_json(path, given)
            return
        if not path.exists():
            raise InputError(
                f"{self.output} exists and was not written by generate_rollouts",
                "choose another output",
            )
        before = msgspec.json.decode(path.read_bytes())
        names = [*given, *(before.keys() - given.keys())]
        changed = [name for name in names if before.get(name) != given.get(name)]
        if changed:
            shown = "; ".join(f"{n} was {before.get(n)!r}, now {given.get(n)!r}" for n in changed)
            raise InputError(
                f"{self.output} was begun with other settings: {shown}",
                "run with the settings it was begun with to go on, or choose another output",
            )


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
        self._store.append(RestartRecord(task_id=task_id, sample=sample))
        self._store.num_restarted += 1
        self._known = KnownSteps()

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Puts a finished turn on record."""
        task_id, sample = self._key
        self._store.append(TurnRecord(task_id=task_id, sample=sample, index=index, turn=turn))
        self._store.on_turn(turn)

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Puts the tools' replies on record."""
        task_id, sample = self._key
        record = RepliesRecord(task_id=task_id, sample=sample, index=index, replies=replies)
        self._store.append(record)


def finished_rows(output: Path) -> dict[RolloutKey, FinishedRow]:
    """Returns what counts of the rows that an output has."""
    rows = _decoded(output, _ROW, "a rollout")
    return {RolloutKey(row.task_id, row.sample): row for row in rows}


_Paid = dict[RolloutKey | None, Cost]
"""By rollout; under None what broke off."""


def _known_steps(
    journal: Path, finished: Collection[RolloutKey]
) -> tuple[dict[RolloutKey, KnownSteps], _Paid]:
    """Returns the steps of unfinished rollouts, and what was paid for all on record."""
    known: dict[RolloutKey, KnownSteps] = {}
    paid: _Paid = {}
    for record in _decoded(journal, RECORD, "a step of a rollout"):
        if isinstance(record, UnconfirmedRecord):
            paid[None] = paid.get(None, Cost()) + Cost(record.tokens, record.usd)
            continue
        key = RolloutKey(record.task_id, record.sample)
        if isinstance(record, TurnRecord):
            cost = Cost.of(record.turn.usage, record.turn.cost_usd)
            paid[key] = paid.get(key, Cost()) + cost
        if key in finished:
            continue
        if isinstance(record, RestartRecord):
            known.pop(key, None)
            continue
        steps = known.setdefault(key, KnownSteps())
        # A step that does not follow the one before it belongs to another conversation.
        if isinstance(record, TurnRecord) and record.index == steps.next_turn:
            steps.turns[record.index] = record.turn
        elif isinstance(record, RepliesRecord) and record.index == steps.unanswered_turn:
            steps.replies[record.index] = record.replies
    return known, paid


def _larger(one: Cost, other: Cost) -> Cost:
    return Cost(max(one.tokens, other.tokens), max(one.usd, other.usd))


def _decoded(path: Path, decoder: msgspec.json.Decoder[_T], what: str) -> Iterator[_T]:
    for line in read_lines(path) if path.exists() else ():
        try:
            yield decoder.decode(line.data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}:{line.number} is not {what}: {error}",
                "the file was changed from outside: take the line out (what it held is done "
                "again), or choose another output",
            ) from error
