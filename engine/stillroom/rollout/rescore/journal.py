"""Judgements that were paid for, on record beside the output until that is there."""

from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from stillroom.files import AppendLog
from stillroom.lines import read_lines
from stillroom.rollout.rewards.rewards import Judgement
from stillroom.types import Answerer, CallTotals


class _KnownVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A judgement that was paid for, as it is kept until the output is there."""

    settings: str
    row: str
    total: float | None
    by_name: dict[str, float]
    calls: int
    answered_by: tuple[Answerer, ...] = ()


_VERDICT = msgspec.json.Decoder(_KnownVerdict)


class ScoreJournal:
    """The judgements that were paid for, on record beside the output until it is there."""

    def __init__(self, path: Path, settings: str) -> None:
        self._log = AppendLog(path)
        self._settings = settings
        self._known: dict[str, _KnownVerdict] = {}
        for line in read_lines(path):
            # A line that was damaged is paid for again; nothing else hangs on it.
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                verdict = _VERDICT.decode(line.data)
                if verdict.settings == settings:
                    self._known[verdict.row] = verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._log.close()

    def known(self, row: str) -> Judgement | None:
        """Returns the judgement of a row if an earlier run came to it."""
        verdict = self._known.get(row)
        if verdict is None:
            return None
        paid = CallTotals(calls=verdict.calls, answered_by=verdict.answered_by)
        return Judgement(verdict.total, verdict.by_name, paid)

    def keep(self, row: str, judgement: Judgement) -> None:
        """Puts a judgement that has cost something on record."""
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
