"""The counts of a scoring run, and the journal of judgements that were paid for."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Self

import msgspec

from stillroom.files import AppendLog
from stillroom.lineage import ModelRecord
from stillroom.lines import read_lines
from stillroom.rollout.rescore.rows import InputRow
from stillroom.rollout.results import Answerers, answering_models
from stillroom.rollout.rewards.rewards import Judgement
from stillroom.types import Answerer, CallTotals, SampledTurn, Usage

_MAX_PROBLEMS = 5


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
    judge_calls_replayed: int
    """The number of judge calls that an unfinished run of the same command had already paid for."""
    problems: list[str]
    """The problems of the first rows that are no rollouts or cannot be judged, with file:line."""


class ScoreTally:
    """The counts of a scoring run in progress; it also serves as recorder of the judge's calls."""

    def __init__(self) -> None:
        self.read = self.changed = self.num_success = 0
        self.calls = self.replayed = 0
        self.usage = Usage()
        self.kept: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.before: list[float] = []
        self.after: list[float] = []
        self.problems: list[str] = []
        self.judged_by: Counter[Answerers] = Counter()

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Returns an empty sequence: `ScoreJournal` records judgements, not single replies."""
        return ()

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Counts a reply of the judge, including one that is no valid judgement."""
        self.calls += 1
        self.usage += turn.usage

    def add_problem(self, row: InputRow, problem: str) -> None:
        """Keeps a problem if it is among the first few."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(f"{row.where}: {problem}")

    def with_answerers(self, judges: Sequence[ModelRecord]) -> list[ModelRecord]:
        """Returns the judging models, each with the models that answered in its name."""
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
            mean_before=fmean(self.before) if self.before else None,
            mean_after=fmean(self.after) if self.after else None,
            num_success=self.num_success,
            judge_calls=self.calls,
            judge_usage=self.usage,
            judge_calls_replayed=self.replayed,
            problems=self.problems,
        )


class _KnownVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal: a judgement that was paid for."""

    settings: str
    row: str
    total: float | None
    by_name: dict[str, float]
    calls: int
    answered_by: tuple[Answerer, ...] = ()


_VERDICT = msgspec.json.Decoder(_KnownVerdict)


class ScoreJournal:
    """Keeps judgements that were paid for in a file, until the output is complete."""

    def __init__(self, path: Path, settings: str) -> None:
        self._log = AppendLog(path)
        self._settings = settings
        self._known: dict[str, _KnownVerdict] = {}
        for line in read_lines(path):
            # A damaged line only means that its judgement is paid for again.
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                verdict = _VERDICT.decode(line.data)
                if verdict.settings == settings:
                    self._known[verdict.row] = verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._log.close()

    def known(self, row: str) -> Judgement | None:
        """Returns the judgement of a row if an earlier run has recorded it, else None."""
        verdict = self._known.get(row)
        if verdict is None:
            return None
        paid = CallTotals(calls=verdict.calls, answered_by=verdict.answered_by)
        return Judgement(verdict.total, verdict.by_name, paid)

    def keep(self, row: str, judgement: Judgement) -> None:
        """Records a judgement if the judge was asked for it."""
        if judgement.judge is not None:
            verdict = _KnownVerdict(
                settings=self._settings,
                row=row,
                total=judgement.total,
                by_name=dict(judgement.by_name),
                calls=judgement.judge.calls,
                answered_by=judgement.judge.answered_by,
            )
            self._log.append(verdict, durable=True)
