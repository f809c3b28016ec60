"""Reads the verdicts of a review, and finds the one row that each of them is about."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from stillroom.curate.rows import CuratedRow, conversation_digest
from stillroom.data.row_files import read_row_lines
from stillroom.data.row_names import MAX_CANDIDATES, RowNames, ambiguous, is_row_name
from stillroom.errors import DataError

ReviewVerdict = Literal["keep", "drop"]
Place = tuple[Path, int]
"""The file of a row, and the number of its line."""


class _ReviewedRow(msgspec.Struct):
    id: str
    verdict: Any = None
    where: str | None = None


_REVIEWED = msgspec.json.Decoder(_ReviewedRow)


@dataclass(frozen=True, slots=True)
class GivenVerdict:
    """A verdict as a file gives it."""

    id: str
    """The row's name; in older files an id of its own, or a hash of its conversation."""
    verdict: ReviewVerdict
    where: str | None
    """The `file:line` of the row when it was sampled, which tells equal rows of files apart."""


def read_verdicts(path: Path) -> list[GivenVerdict]:
    """Returns the verdicts in a file; a row whose verdict is null counts as not reviewed.

    Raises DataError for a line whose verdict is anything else than keep, drop or null, and for a
    file without any verdict.
    """
    verdicts: list[GivenVerdict] = []
    for line in read_row_lines(path):
        where = f"{path}:{line.number}"
        try:
            row = _REVIEWED.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{where}: not a reviewed row: {error}",
                'write {"id": "<id of the row>", "verdict": "keep"} or "drop" on each line',
            ) from error
        match row.verdict:
            case None:
                continue
            case "keep" | "drop":
                verdicts.append(GivenVerdict(row.id, row.verdict, row.where))
            case other:
                raise DataError(
                    f"{where}: verdict {other!r} is unknown", 'write "keep", "drop" or null'
                )
    if not verdicts:
        raise DataError(
            f"{path} holds no verdict", "review its rows first: set verdict to keep or drop"
        )
    return verdicts


@dataclass(frozen=True, slots=True)
class RowVerdicts:
    """The verdicts of a review, each on one row of the input."""

    by_place: Mapping[Place, ReviewVerdict] = field(default_factory=dict[Place, ReviewVerdict])
    by_conversation: Mapping[bytes, ReviewVerdict] = field(
        default_factory=dict[bytes, ReviewVerdict]
    )
    """The verdicts by digest of the conversation, if they are to hold for copies; else empty."""
    num_given: int = 0
    num_unmatched: int = 0
    """The number of verdicts whose id no row of the input has."""

    def of(self, row: CuratedRow) -> ReviewVerdict | None:
        """Returns the verdict on a row, or else the one on a row with the same conversation."""
        verdict = self.by_place.get((row.path, row.line.number))
        if verdict is None and self.by_conversation:
            return self.by_conversation.get(conversation_digest(row))
        return verdict


class _Candidates:
    """The rows that an id may mean."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.rows: list[tuple[CuratedRow, str]] = []
        """The first rows, each with its name."""

    def add(self, row: CuratedRow, name: str) -> None:
        self.num_rows += 1
        if len(self.rows) < MAX_CANDIDATES:
            self.rows.append((row, name))


def find_reviewed_rows(
    given: Sequence[GivenVerdict],
    rows: Iterable[CuratedRow],
    shown: Callable[[Path], str],
    *,
    with_copies: bool,
) -> RowVerdicts:
    """Returns the rows that verdicts are about; a later verdict on a row replaces an earlier one.

    With `with_copies` a verdict also holds for rows with the same conversation that have none of
    their own; if copies of it have different verdicts, they are dropped. `shown` returns a file's
    name as results show it. Raises InputError for an id that several rows have.
    """
    wanted = {verdict.id: _Candidates() for verdict in given}
    are_old = any(not is_row_name(verdict.id) for verdict in given)
    names = RowNames()
    for row in rows:
        name = names.name(row.path, row.line.view)
        ids = {name, name.partition("#")[0], row.review_id} if are_old else {name}
        for candidates in (wanted[row_id] for row_id in ids if row_id in wanted):
            candidates.add(row, name)
    by_place: dict[Place, ReviewVerdict] = {}
    by_conversation: dict[bytes, ReviewVerdict] = {}
    num_unmatched = 0
    for verdict in given:
        row = _meant(verdict, wanted[verdict.id], shown)
        if row is None:
            num_unmatched += 1
            continue
        by_place[row.path, row.line.number] = verdict.verdict
        if with_copies and row.facts is not None:
            digest = conversation_digest(row)
            if by_conversation.get(digest) != "drop":
                by_conversation[digest] = verdict.verdict
    return RowVerdicts(by_place, by_conversation, len(given), num_unmatched)


def _meant(
    verdict: GivenVerdict, candidates: _Candidates, shown: Callable[[Path], str]
) -> CuratedRow | None:
    """Returns the row that a verdict is about; None if there is none."""
    rows = candidates.rows
    if candidates.num_rows > 1 and is_row_name(verdict.id) and verdict.where is not None:
        # Files of one input hold equal rows: the verdict is about that of the sampled file.
        file = verdict.where.rpartition(":")[0]
        rows = [(row, name) for row, name in rows if shown(row.path) == file] or rows
    if len(rows) > 1:
        places = [f"{name} ({shown(row.path)}:{row.line.number})" for row, name in rows]
        raise ambiguous(verdict.id, places, candidates.num_rows)
    return rows[0][0] if rows else None
