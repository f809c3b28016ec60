"""The records of a rollout run's journal: what is written, how it is read back, who keeps it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from stillroom.errors import DataError
from stillroom.lines import read_lines
from stillroom.teachers.budget import Cost, Outstanding
from stillroom.tools.source import ToolResult
from stillroom.types import Answerer, CallTotals, SampledTurn, Trajectory, Usage


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


class JudgeRecord(msgspec.Struct, frozen=True, kw_only=True, tag="judge"):
    """A finished call of the judge, also one whose reply could not be read."""

    task_id: str
    sample: int
    index: int
    turn: SampledTurn


class RestartRecord(msgspec.Struct, frozen=True, kw_only=True, tag="restart"):
    """What stands before this of the rollout counts no more: its tools' state is gone."""

    task_id: str
    sample: int
    dropped: CallTotals | None = None
    """Of calls that stand in another journal."""


class UnconfirmedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="unconfirmed"):
    """A call that broke off and may have been billed; its worst case."""

    tokens: int
    usd: float


class OutstandingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="outstanding"):
    """The most that is out until the next of these: calls without an answer, their worst case."""

    calls: int
    tokens: int
    usd: float
    begins: bool = False
    """The first of its process: what the one before it had out has had no answer."""


StepRecord = TurnRecord | RepliesRecord | JudgeRecord | RestartRecord
Record = StepRecord | UnconfirmedRecord | OutstandingRecord
RECORD: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
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
    judge: CallTotals | None = None
    dropped: CallTotals | None = None
    answered_by: tuple[Answerer, ...] = ()

    @classmethod
    def of(cls, rollout: Trajectory) -> "FinishedRow":
        """Returns what counts of a rollout."""
        return cls(**{name: getattr(rollout, name) for name in cls.__struct_fields__})

    @property
    def judged_by(self) -> tuple[Answerer, ...]:
        """Who answered as its judge."""
        return self.judge.answered_by if self.judge is not None else ()

    @property
    def paid(self) -> CallTotals:
        """All calls that were paid for this rollout; the row's cost is that of all of them."""
        more = [totals for totals in (self.judge, self.dropped) if totals is not None]
        return CallTotals(
            calls=self.turns + sum(totals.calls for totals in more),
            usage=sum((totals.usage for totals in more), start=self.usage),
            cost_usd=self.cost_usd,
        )

    @property
    def spent(self) -> Cost:
        """The same, as it counts against a budget."""
        return Cost.of(self.paid.usage, self.cost_usd)


_ROW = msgspec.json.Decoder(FinishedRow)


@dataclass(slots=True)
class KnownSteps:
    """The steps of one unfinished rollout that are on record."""

    turns: dict[int, SampledTurn] = field(default_factory=dict[int, SampledTurn])
    replies: dict[int, list[ToolResult]] = field(default_factory=dict[int, list[ToolResult]])
    judge: list[SampledTurn] = field(default_factory=list[SampledTurn])
    """The judge's replies."""
    dropped: CallTotals = field(default_factory=CallTotals)
    """Of calls before the rollout was begun again."""

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

    @property
    def paid(self) -> CallTotals:
        """All calls that were paid for so far."""
        made = [*self.turns.values(), *self.judge]
        return sum((CallTotals.of(turn) for turn in made), start=self.dropped)

    def add(self, record: StepRecord) -> None:
        """Takes in what is on record next.

        A step that does not follow the one before it belongs to another conversation.
        """
        match record:
            case RestartRecord():
                self.dropped = self.paid + (record.dropped or CallTotals())
                self.turns, self.replies, self.judge = {}, {}, []
            case TurnRecord() if record.index == self.next_turn:
                self.turns[record.index] = record.turn
            case RepliesRecord() if record.index == self.unanswered_turn:
                self.replies[record.index] = record.replies
            case JudgeRecord() if record.index == len(self.judge):
                self.judge.append(record.turn)
            case _:
                pass

    def records(self, key: RolloutKey) -> Iterator[StepRecord]:
        """Yields the records that these steps come from."""
        task_id, sample = key
        if self.dropped.calls:
            yield RestartRecord(task_id=task_id, sample=sample, dropped=self.dropped)
        for index, turn in sorted(self.turns.items()):
            yield TurnRecord(task_id=task_id, sample=sample, index=index, turn=turn)
            if index in self.replies:
                replies = self.replies[index]
                yield RepliesRecord(task_id=task_id, sample=sample, index=index, replies=replies)
        for index, turn in enumerate(self.judge):
            yield JudgeRecord(task_id=task_id, sample=sample, index=index, turn=turn)


@dataclass(slots=True)
class JournalContent:
    """What a journal holds."""

    known: dict[RolloutKey, KnownSteps] = field(default_factory=dict[RolloutKey, KnownSteps])
    """Of unfinished rollouts."""
    paid: dict[RolloutKey, CallTotals] = field(default_factory=dict[RolloutKey, CallTotals])
    """Of all rollouts on record."""
    spent: dict[RolloutKey, Cost] = field(default_factory=dict[RolloutKey, Cost])
    """The same, as it counts against a budget."""
    unconfirmed: Cost = field(default_factory=Cost)
    """Of calls that broke off."""
    outstanding: Outstanding = field(default_factory=Outstanding)
    """The most that is out; lost if the process that sent it is gone."""
    lost: Outstanding = field(default_factory=Outstanding)
    """What earlier ones had out that ended without a word."""

    def add(self, record: Record, finished: Collection[RolloutKey]) -> None:
        """Takes in what is on record next; the steps of finished rollouts are not needed."""
        if isinstance(record, UnconfirmedRecord):
            self.unconfirmed = self.unconfirmed + Cost(record.tokens, record.usd)
            return
        if isinstance(record, OutstandingRecord):
            if record.begins:
                self.lost = self.lost + self.outstanding
            self.outstanding = Outstanding(record.calls, Cost(record.tokens, record.usd))
            return
        key = RolloutKey(record.task_id, record.sample)
        if isinstance(record, TurnRecord | JudgeRecord):
            self._pay(key, CallTotals.of(record.turn))
        elif isinstance(record, RestartRecord) and record.dropped is not None:
            self._pay(key, record.dropped)
        if key not in finished:
            self.known.setdefault(key, KnownSteps()).add(record)

    def _pay(self, key: RolloutKey, totals: CallTotals) -> None:
        self.paid[key] = self.paid.get(key, CallTotals()) + totals
        # Apart from the totals: one call without a known price must not hide what others cost.
        self.spent[key] = self.spent.get(key, Cost()) + Cost.of(totals.usage, totals.cost_usd)


def finished_rows(output: Path) -> dict[RolloutKey, FinishedRow]:
    """Returns what counts of the rows that an output has."""
    answerers = _Shared()
    rows: dict[RolloutKey, FinishedRow] = {}
    for row in _decoded(output, _ROW, "a rollout"):
        rows[RolloutKey(row.task_id, row.sample)] = answerers.in_row(row)
    return rows


class _Shared:
    """Who answered is the same for most rows, of which there may be very many: kept once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Answerer, ...], tuple[Answerer, ...]] = {}

    def in_row(self, row: FinishedRow) -> FinishedRow:
        """Returns the row with answerers that others share."""
        judge = row.judge
        if judge is not None:
            judge = msgspec.structs.replace(judge, answered_by=self._kept(judge.answered_by))
        return msgspec.structs.replace(row, answered_by=self._kept(row.answered_by), judge=judge)

    def _kept(self, answerers: tuple[Answerer, ...]) -> tuple[Answerer, ...]:
        return self._known.setdefault(answerers, answerers)


def read_journal(journal: Path, finished: Collection[RolloutKey]) -> JournalContent:
    """Returns what a journal holds of finished and of other rollouts."""
    content = JournalContent()
    for record in _decoded(journal, RECORD, "a step of a rollout"):
        content.add(record, finished)
    return content


def _decoded(path: Path, decoder: msgspec.json.Decoder[_T], what: str) -> Iterator[_T]:
    for line in read_lines(path) if path.exists() else ():
        try:
            yield decoder.decode(line.data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            # Who only reads meets the line that another process is writing.
            if line.offset + len(line.data) == path.stat().st_size:
                return
            raise DataError(
                f"{path}:{line.number} is not {what}: {error}",
                "the file was changed from outside: take the line out (what it held is done "
                "again), or choose another output",
            ) from error


class JudgeRecorder(Protocol):
    """Remembers the calls of the judge."""

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Returns the judge's replies that came earlier, those that can't be read too."""
        ...

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps a reply of the judge; called before anything is done with it."""
        ...


class EpisodeRecorder(JudgeRecorder, Protocol):
    """Remembers all of a rollout."""

    def known_turn(self, index: int) -> SampledTurn | None:
        """Returns the turn `index` if it was finished earlier."""
        ...

    def known_replies(self, index: int) -> list[ToolResult] | None:
        """Returns the tools' replies to turn `index` if they came earlier."""
        ...

    def start_over(self) -> None:
        """Drops what is known: the tools' state that it led to is gone."""
        ...

    def dropped(self) -> CallTotals:
        """Returns what was paid for and dropped."""
        ...

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps a finished turn; called before anything is done with it."""
        ...

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Keeps the tools' replies; called before the model sees them."""
        ...


class ForgetfulRecorder:
    """Remembers nothing: for rollouts that cost nothing to do again."""

    def known_turn(self, index: int) -> SampledTurn | None:
        """Knows none."""

    def known_replies(self, index: int) -> list[ToolResult] | None:
        """Knows none."""

    def start_over(self) -> None:
        """Has nothing to drop."""

    def dropped(self) -> CallTotals:
        """Has dropped nothing."""
        return CallTotals()

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps nothing."""

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Keeps nothing."""

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Knows none."""
        return ()

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps nothing."""
