"""The records of a rollout run's journal: their format, their reader and the recorders."""

from array import array
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
    """The identity of a rollout: the id of its task and the number of its sample."""

    task_id: str
    sample: int


class _RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of one rollout."""

    task_id: str
    sample: int


class TurnRecord(_RolloutRecord, frozen=True, kw_only=True, tag="turn"):
    """A finished model call."""

    index: int
    turn: SampledTurn


class RepliesRecord(_RolloutRecord, frozen=True, kw_only=True, tag="replies"):
    """The tools' replies to a turn."""

    index: int
    replies: list[ToolResult]


class JudgeRecord(_RolloutRecord, frozen=True, kw_only=True, tag="judge"):
    """A finished call of the judge, even if its reply is not a valid judgement."""

    index: int
    turn: SampledTurn


class CriticRecord(_RolloutRecord, frozen=True, kw_only=True, tag="critic"):
    """A finished call of the critic, even if its reply names no turn."""

    index: int
    turn: SampledTurn


class RestartRecord(_RolloutRecord, frozen=True, kw_only=True, tag="restart"):
    """A restart of a rollout, whose earlier records no longer count: its tools' state is gone."""

    dropped: CallTotals | None = None
    """The totals of dropped calls whose records are in another journal; None if there are none."""


class UnconfirmedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="unconfirmed"):
    """The worst-case cost of interrupted calls that may have been billed."""

    tokens: int
    usd: float


class OutstandingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="outstanding"):
    """An upper bound on the calls in flight, valid until the next OutstandingRecord.

    It is written before the calls are sent, so that the journal has them even after a kill.
    """

    calls: int
    tokens: int
    usd: float
    begins: bool = False
    """Whether this is a new process's first record, so that calls outstanding before it are
    lost."""


CallRecord = TurnRecord | JudgeRecord | CriticRecord
StepRecord = CallRecord | RepliesRecord | RestartRecord
Record = StepRecord | UnconfirmedRecord | OutstandingRecord
RECORD: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_T = TypeVar("_T")


class FinishedRow(msgspec.Struct, frozen=True):
    """The fields of a row that a run's counts and its budget need.

    A run may hold millions of rows in memory, so their conversations are left out.
    """

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
        """Returns the row of a rollout, reduced to these fields."""
        return cls(**{name: getattr(rollout, name) for name in cls.__struct_fields__})

    @property
    def judged_by(self) -> tuple[Answerer, ...]:
        """The models that answered the judge's calls for this row."""
        return self.judge.answered_by if self.judge is not None else ()

    @property
    def paid(self) -> CallTotals:
        """The totals of the policy's, the judge's and the dropped calls; `cost_usd` covers all."""
        others = [totals for totals in (self.judge, self.dropped) if totals is not None]
        return CallTotals(
            calls=self.turns + sum(totals.calls for totals in others),
            usage=sum((totals.usage for totals in others), start=self.usage),
            cost_usd=self.cost_usd,
        )

    @property
    def spent(self) -> Cost:
        """The cost of the calls in `paid` as it counts against a budget."""
        return Cost.of(self.paid.usage, self.cost_usd)


@dataclass(slots=True)
class RecordedSteps:
    """The recorded steps of one unfinished rollout."""

    turns: dict[int, SampledTurn] = field(default_factory=dict[int, SampledTurn])
    replies: dict[int, list[ToolResult]] = field(default_factory=dict[int, list[ToolResult]])
    judge: list[SampledTurn] = field(default_factory=list[SampledTurn])
    """The judge's replies, in the order of its calls."""
    critic: list[SampledTurn] = field(default_factory=list[SampledTurn])
    """The critic's replies; they stay valid when the rollout is restarted."""
    dropped: CallTotals = field(default_factory=CallTotals)
    """The totals of the calls that were made before the rollout was restarted."""

    @property
    def unanswered_turn(self) -> int | None:
        """The index of the last turn if it calls tools whose replies are missing, else None."""
        last = len(self.turns) - 1
        if last < 0 or last in self.replies or not self.turns[last].message.get("tool_calls"):
            return None
        return last

    @property
    def next_turn(self) -> int | None:
        """The index of the turn that may come next; None while tool replies are missing."""
        return len(self.turns) if self.unanswered_turn is None else None

    @property
    def paid(self) -> CallTotals:
        """The totals of all calls for this rollout so far, including the dropped ones."""
        return sum(map(CallTotals.of, self.critic), start=self._paid_without_critic)

    @property
    def _paid_without_critic(self) -> CallTotals:
        calls = [*self.turns.values(), *self.judge]
        return sum((CallTotals.of(turn) for turn in calls), start=self.dropped)

    def add(self, record: StepRecord) -> None:
        """Adds the next recorded step.

        A step that does not continue the previous one is ignored: it belongs to an earlier attempt
        at the rollout.
        """
        match record:
            case RestartRecord():
                self.dropped = self._paid_without_critic + (record.dropped or CallTotals())
                self.turns, self.replies, self.judge = {}, {}, []
            case TurnRecord() if record.index == self.next_turn:
                self.turns[record.index] = record.turn
            case RepliesRecord() if record.index == self.unanswered_turn:
                self.replies[record.index] = record.replies
            case JudgeRecord() if record.index == len(self.judge):
                self.judge.append(record.turn)
            case CriticRecord() if record.index == len(self.critic):
                self.critic.append(record.turn)
            case _:
                pass

    def records(self, key: RolloutKey) -> Iterator[StepRecord]:
        """Yields the records that copy these steps into another journal."""
        task_id, sample = key
        if self.dropped.calls:
            yield RestartRecord(task_id=task_id, sample=sample, dropped=self.dropped)
        for index, turn in enumerate(self.critic):
            yield CriticRecord(task_id=task_id, sample=sample, index=index, turn=turn)
        for index, turn in sorted(self.turns.items()):
            yield TurnRecord(task_id=task_id, sample=sample, index=index, turn=turn)
            if index in self.replies:
                replies = self.replies[index]
                yield RepliesRecord(task_id=task_id, sample=sample, index=index, replies=replies)
        for index, turn in enumerate(self.judge):
            yield JudgeRecord(task_id=task_id, sample=sample, index=index, turn=turn)


class PackedCosts:
    """Costs summed per rollout, at about 130 bytes for each rollout."""

    def __init__(self) -> None:
        # The index of each rollout in the two arrays, by a 64-bit hash of its key: a collision is
        # unlikely among a million keys, and would only add up the costs of two rollouts.
        self._indices: dict[int, int] = {}
        self._tokens, self._usd = array("Q"), array("d")

    def add(self, key: RolloutKey, cost: Cost) -> None:
        """Adds a cost to a rollout's total."""
        index = self._indices.setdefault(hash(key), len(self._tokens))
        if index == len(self._tokens):
            self._tokens.append(0)
            self._usd.append(0.0)
        self._tokens[index] += cost.tokens
        self._usd[index] += cost.usd

    def of(self, key: RolloutKey) -> Cost:
        """Returns the cost of a rollout; zero if none was added."""
        index = self._indices.get(hash(key))
        return Cost() if index is None else Cost(self._tokens[index], self._usd[index])


@dataclass(slots=True)
class JournalContent:
    """The content of a journal: recorded steps of unfinished rollouts, and costs of all."""

    recorded_steps: dict[RolloutKey, RecordedSteps] = field(
        default_factory=dict[RolloutKey, RecordedSteps]
    )
    """The recorded steps of each unfinished rollout."""
    paid: dict[RolloutKey, CallTotals] = field(default_factory=dict[RolloutKey, CallTotals])
    """The totals of the recorded calls of each unfinished rollout."""
    spent: dict[RolloutKey, Cost] = field(default_factory=dict[RolloutKey, Cost])
    """The cost of the calls in `paid`, as it counts against a budget; unknown prices count as 0."""
    spent_on_finished: PackedCosts = field(default_factory=PackedCosts)
    """The cost of the recorded calls of each finished rollout."""
    unconfirmed: Cost = field(default_factory=Cost)
    """The summed worst-case cost of interrupted calls that may have been billed."""
    outstanding: Outstanding = field(default_factory=Outstanding)
    """Upper bound on the last process's calls in flight; they are lost if it was killed."""
    lost: Outstanding = field(default_factory=Outstanding)
    """Upper bound on the calls that earlier, killed processes had in flight."""

    def add(self, record: Record, finished: Collection[RolloutKey]) -> None:
        """Adds the next record; of a finished rollout only the cost is kept, not the steps."""
        if isinstance(record, UnconfirmedRecord):
            self.unconfirmed = self.unconfirmed + Cost(record.tokens, record.usd)
            return
        if isinstance(record, OutstandingRecord):
            if record.begins:
                self.lost = self.lost + self.outstanding
            self.outstanding = Outstanding(record.calls, Cost(record.tokens, record.usd))
            return
        key = RolloutKey(record.task_id, record.sample)
        is_finished = key in finished
        if isinstance(record, CallRecord):
            self._add_cost(key, CallTotals.of(record.turn), is_finished=is_finished)
        elif isinstance(record, RestartRecord) and record.dropped is not None:
            self._add_cost(key, record.dropped, is_finished=is_finished)
        if not is_finished:
            self.recorded_steps.setdefault(key, RecordedSteps()).add(record)

    def _add_cost(self, key: RolloutKey, totals: CallTotals, *, is_finished: bool) -> None:
        """Adds the cost of calls to a rollout."""
        if is_finished:
            self.spent_on_finished.add(key, Cost.of(totals.usage, totals.cost_usd))
            return
        self.paid[key] = self.paid.get(key, CallTotals()) + totals
        # Kept apart from the totals, whose cost is None as soon as the price of one call is
        # unknown.
        self.spent[key] = self.spent.get(key, Cost()) + Cost.of(totals.usage, totals.cost_usd)


def read_journal(journal: Path, finished: Collection[RolloutKey]) -> JournalContent:
    """Returns the content of a journal; `finished` are the rollouts that already have a row."""
    content = JournalContent()
    for record in decoded_lines(journal, RECORD, "a valid journal record"):
        content.add(record, finished)
    return content


def decoded_lines(path: Path, decoder: msgspec.json.Decoder[_T], kind: str) -> Iterator[_T]:
    """Yields the decoded lines of an output or a journal; none if the file does not exist.

    Raises DataError for a line that cannot be decoded; `kind` names what it should be.
    """
    for line in read_lines(path) if path.exists() else ():
        try:
            yield decoder.decode(line.data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            # The last line may be incomplete because another process is just writing it.
            if line.offset + len(line.data) == path.stat().st_size:
                return
            raise DataError(
                f"{path}:{line.number} is not {kind}: {error}",
                "delete this line (its rollout or call is then repeated), or choose another output",
            ) from error


class JudgeRecorder(Protocol):
    """Records the judge's calls of one rollout, and returns those of earlier runs."""

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Returns the judge's earlier replies, including invalid ones."""
        ...

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Records a reply of the judge; must be called before the reply is used."""
        ...


class EpisodeRecorder:
    """Records the finished steps of one rollout, so that no step is paid for twice.

    This base class records nothing and has no earlier steps, for rollouts that are never resumed.
    """

    def recorded_turn(self, index: int) -> SampledTurn | None:
        """Returns the turn `index` if it is already on record, else None."""

    def recorded_replies(self, index: int) -> list[ToolResult] | None:
        """Returns the tools' replies to turn `index` if they are already on record, else None."""

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Returns the judge's earlier replies, including invalid ones."""
        return ()

    def critic_turns(self) -> Sequence[SampledTurn]:
        """Returns the critic's earlier replies."""
        return ()

    def start_over(self) -> None:
        """Drops the recorded steps, because their tool state is lost."""

    def dropped(self) -> CallTotals:
        """Returns the totals of the calls that were paid for and then dropped."""
        return CallTotals()

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Records a finished turn; must be called before the turn is used."""

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Records the tools' replies; must be called before the model sees them."""

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Records a reply of the judge; must be called before the reply is used."""

    def record_critic_turn(self, index: int, turn: SampledTurn) -> None:
        """Records a reply of the critic; must be called before the reply is used."""
