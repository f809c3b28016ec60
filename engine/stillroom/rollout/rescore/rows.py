"""Reads the rows of a rollouts file for judging, and puts new rewards into them."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self, cast

import msgspec

from stillroom.data.checks import Problem, as_number
from stillroom.data.formats import Task
from stillroom.data.layouts.detect import RULES, RolloutLayout, layout_of
from stillroom.data.layouts.foreign import as_object, prompt_length
from stillroom.data.row_files import (
    TOO_LONG,
    decode_line,
    read_row_lines,
    rollout_files,
)
from stillroom.errors import DataError, FailureClass
from stillroom.files import AppendLog
from stillroom.lineage import ModelRecord
from stillroom.lines import Line, read_lines
from stillroom.rollout.journal.finished import Answerers
from stillroom.rollout.results import answering_models
from stillroom.rollout.rewards.rewards import Judgement
from stillroom.types import (
    Answerer,
    CallTotals,
    Message,
    RowReason,
    SampledTurn,
    Usage,
    total_usd,
)

_REWARD_NAME = {RolloutLayout.RNOW: "total_reward"}
_RAW_ROW: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
)
_MAX_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class JudgeableRow:
    """A rollout row that can be judged."""

    row: dict[str, Any]
    layout: RolloutLayout
    task: Task
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class InputRow:
    """A line of the input: its rollout, and why its reward is kept if it is not judged."""

    location: str
    data: bytes
    rollout: JudgeableRow | None
    reason: str

    @property
    def key(self) -> str:
        """A hash of the row's bytes, which identifies the row."""
        return hashlib.sha256(self.data).hexdigest()[:32]


def input_rows(source: Path) -> Iterator[InputRow]:
    """Yields every row of the file or folder `source`, including rows that cannot be judged."""
    for file in rollout_files(source):
        for line in read_row_lines(file):
            location = f"{file}:{line.number}"
            if line.is_cut:
                # Every row must be copied to the output, but this one was too long to read whole.
                raise DataError(f"{location} {TOO_LONG}", "remove that line from the file")
            yield _input_row(location, line)


def _input_row(location: str, line: Line) -> InputRow:
    """Returns a line as a row, with its rollout if it can be judged."""
    row, data = decode_line(line), line.data
    layout = None if isinstance(row, Problem) else layout_of(row)
    if isinstance(row, Problem) or layout is None or any(RULES[layout].problems(row)):
        return InputRow(location, data, None, RowReason.NOT_A_ROLLOUT)
    fields = RULES[layout].to_stillroom(row)
    failure = FailureClass.of(fields.get("error"))
    # A row whose reward alone failed is judged: scoring it again is the remedy.
    if failure is not None and not failure.is_reward_failure:
        return InputRow(location, data, None, RowReason.FAILED)
    messages = cast("list[Message]", fields["messages"])
    task = Task(
        task_id=str(fields.get("task_id") or fields.get("id")),
        messages=messages[: prompt_length(fields["messages"], fields.get("turns"))],
        metadata=fields.get("metadata") or {},
        tool_names=None,
        reward_names=None,
        variables=as_object(fields.get("variables")),
    )
    return InputRow(location, data, JudgeableRow(row, layout, task, messages), RowReason.UNJUDGED)


def reward_of(rollout: JudgeableRow) -> float | None:
    """Returns the reward that a row has now, or None if it has none."""
    return as_number(rollout.row.get(_reward_name(rollout)))


def _reward_name(rollout: JudgeableRow) -> str:
    return _REWARD_NAME.get(rollout.layout, "reward")


def has_same_reward(rollout: JudgeableRow, judgement: Judgement) -> bool:
    """Returns whether a row already has the rewards of a judgement."""
    row = rollout.row
    return (
        reward_of(rollout) == judgement.total
        and row.get("rewards") == judgement.by_name
        and row.get("success") is judgement.success
    )


def with_rewards(row: InputRow, rollout: JudgeableRow, judgement: Judgement) -> bytes:
    """Returns the row's JSON with new rewards; every other value keeps its bytes.

    If an earlier reward of the row failed, a new reward removes that error.
    """
    fields = _RAW_ROW.decode(row.data)
    changed = {
        _reward_name(rollout): judgement.total,
        "rewards": judgement.by_name,
        "success": judgement.success,
    }
    if judgement.total is not None and rollout.row.get("error") is not None:
        changed["error"] = None
    for name, value in changed.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a scoring run: read = changed + kept + failed, and all rows are written."""

    output: str
    read: int
    changed: int
    kept: int
    """The number of rows whose bytes have not changed."""
    kept_by_reason: dict[str, int]
    failed: int
    """The number of rows whose reward could not be computed: it is null now, which is not 0."""
    failed_by_class: dict[str, int]
    mean_before: float | None
    mean_after: float | None
    num_success: int
    """The number of successes among the rows that were judged."""
    judge_calls: int
    judge_usage: Usage
    """The tokens of this run's judge calls."""
    cost_usd: float | None = None
    """The cost of these calls in US dollars; None if the judge's price is unknown."""
    judge_calls_replayed: int
    """The number of judge calls that an unfinished run of the same command had already paid for."""
    problems: list[str]
    """The problems of the first rows that are not rollouts or cannot be judged, with file:line."""


class ScoreTally:
    """The counts of a scoring run in progress; it also serves as recorder of the judge's calls."""

    def __init__(self) -> None:
        self.read = self.changed = self.num_success = 0
        self.calls = self.replayed = 0
        self.usage = Usage()
        self.cost_usd: float | None = 0.0
        self.kept: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rewards_before: list[float] = []
        self.rewards_after: list[float] = []
        self.problems: list[str] = []
        self.judged_by: Counter[Answerers] = Counter()

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Returns an empty sequence: `ScoreJournal` records judgements, not single replies."""
        return ()

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Counts a reply of the judge, even if it is not a valid judgement."""
        self.calls += 1
        self.usage += turn.usage
        self.cost_usd = total_usd((self.cost_usd, turn.cost_usd))

    def add_problem(self, row: InputRow, problem: str) -> None:
        """Keeps a problem if it is among the first few."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(f"{row.location}: {problem}")

    def with_answerers(self, judges: Sequence[ModelRecord]) -> list[ModelRecord]:
        """Returns the judging models, each with the models that answered under its name."""
        answered = answering_models(self.judged_by)
        return [msgspec.structs.replace(judge, answered_by=answered) for judge in judges]

    def result(self, output: str) -> ScoreResult:
        """Returns the counts as the result of the run."""
        return ScoreResult(
            output=output,
            read=self.read,
            changed=self.changed,
            kept=self.kept.total(),
            kept_by_reason=dict(self.kept),
            failed=self.failed.total(),
            failed_by_class=dict(self.failed),
            mean_before=fmean(self.rewards_before) if self.rewards_before else None,
            mean_after=fmean(self.rewards_after) if self.rewards_after else None,
            num_success=self.num_success,
            judge_calls=self.calls,
            judge_usage=self.usage,
            cost_usd=self.cost_usd,
            judge_calls_replayed=self.replayed,
            problems=self.problems,
        )


class _RecordedJudgement(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal: a judgement that was paid for."""

    settings: str
    row: str
    total: float | None
    by_name: dict[str, float]
    calls: int
    usd: float = 0.0
    answered_by: tuple[Answerer, ...] = ()
    preconditions: tuple[str, ...] = ()


_RECORDED_JUDGEMENT = msgspec.json.Decoder(_RecordedJudgement)


def scores_path(output: Path) -> Path:
    """Returns the path of the journal of a scoring run's output."""
    return output.with_name(f".{output.name}.scores")


def recorded_usd(journal: Path) -> float:
    """Returns what the judgements in a journal have cost in US dollars; 0 without a journal."""
    return sum(judgement.usd for judgement in _judgements(journal)) if journal.exists() else 0.0


def _judgements(journal: Path) -> Iterator[_RecordedJudgement]:
    for line in read_lines(journal):
        # A damaged line only means that its judgement is paid for again.
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield _RECORDED_JUDGEMENT.decode(line.data)


class ScoreJournal:
    """Keeps judgements that were paid for in a file, until the output is complete."""

    def __init__(self, path: Path, settings: str) -> None:
        self._log = AppendLog(path)
        self._settings = settings
        self._recorded: dict[str, _RecordedJudgement] = {}
        self.spent_usd = 0.0
        """The cost in US dollars of the calls that the journal's lines record."""
        self._added_usd = 0.0
        """The part of `spent_usd` that this run has added."""
        for judgement in _judgements(path):
            self.spent_usd += judgement.usd
            if judgement.settings == settings:
                self._recorded[judgement.row] = judgement

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._log.close()

    def recorded(self, row_key: str) -> Judgement | None:
        """Returns the judgement of a row if an earlier run has recorded it, else None."""
        line = self._recorded.get(row_key)
        if line is None:
            return None
        paid = CallTotals(calls=line.calls, answered_by=line.answered_by)
        preconditions = line.preconditions
        return Judgement(line.total, line.by_name, paid, preconditions=preconditions)

    def record(self, row_key: str, judgement: Judgement) -> None:
        """Records a judgement if the judge was called for it."""
        if judgement.judge is not None:
            line = _RecordedJudgement(
                settings=self._settings,
                row=row_key,
                total=judgement.total,
                by_name=dict(judgement.by_name),
                calls=judgement.judge.calls,
                usd=judgement.judge.cost_usd or 0.0,
                answered_by=judgement.judge.answered_by,
                preconditions=judgement.preconditions,
            )
            self._added_usd += line.usd
            self._log.append(line, durable=True)

    def record_unused_cost(self, total_usd: float) -> None:
        """Records the part of `total_usd`, the cost of all calls, that led to no judgement."""
        if (unused_usd := total_usd - self._added_usd) > 1e-12:
            unused = _RecordedJudgement(
                settings="", row="", total=None, by_name={}, calls=0, usd=unused_usd
            )
            self._log.append(unused, durable=True)
