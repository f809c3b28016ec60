"""Reads the verdicts of a review, and matches each of them to its row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from stillroom.curate.rows import CuratedRow, conversation_digest
from stillroom.data.row_files import read_row_lines
from stillroom.data.row_names import MAX_CANDIDATES, RowNames, ambiguous_id_error, is_row_name
from stillroom.errors import DataError

ReviewVerdict = Literal["keep", "drop"]
RowLocation = tuple[Path, int]
"""The file of a row, and the number of its line."""


class _ReviewedRow(msgspec.Struct):
    id: str
    verdict: Any = None
    where: str | None = None


_REVIEWED_ROW = msgspec.json.Decoder(_ReviewedRow)


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """One line of a file of verdicts."""

    id: str
    """The row's name; in older files the row's own id, or a hash of its conversation."""
    verdict: ReviewVerdict
    where: str | None
    """The `file:line` from which the row was sampled; it distinguishes equal rows of two files."""


def read_verdicts(path: Path) -> list[VerdictLine]:
    """Returns the verdicts in a file; a row whose verdict is null counts as not reviewed.

    Raises DataError for a verdict other than keep, drop or null, and for a file without verdicts.
    """
    verdicts: list[VerdictLine] = []
    for line in read_row_lines(path):
        where = f"{path}:{line.number}"
        try:
            row = _REVIEWED_ROW.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{where}: not a reviewed row: {error}",
                'write {"id": "<id of the row>", "verdict": "keep"} on each line, or "drop" in '
                'place of "keep"',
            ) from error
        match row.verdict:
            case None:
                continue
            case "keep" | "drop":
                verdicts.append(VerdictLine(row.id, row.verdict, row.where))
            case other:
                raise DataError(
                    f"{where}: verdict {other!r} is unknown", 'write "keep", "drop" or null'
                )
    if not verdicts:
        raise DataError(
            f"{path} has no verdicts", "review its rows first: set verdict to keep or drop"
        )
    return verdicts


@dataclass(frozen=True, slots=True)
class RowVerdicts:
    """The verdicts of a review, by the row of the input that each of them is about."""

    by_location: Mapping[RowLocation, ReviewVerdict] = field(
        default_factory=dict[RowLocation, ReviewVerdict]
    )
    by_conversation: Mapping[bytes, ReviewVerdict] = field(
        default_factory=dict[bytes, ReviewVerdict]
    )
    """The verdicts by conversation digest if they also apply to copies; otherwise empty."""
    num_verdicts: int = 0
    num_unmatched: int = 0
    """The number of verdicts whose id matches no row of the input."""

    def verdict_on(self, row: CuratedRow) -> ReviewVerdict | None:
        """Returns the verdict on a row, or else the one on a row with the same conversation."""
        verdict = self.by_location.get((row.path, row.line.number))
        if verdict is None and self.by_conversation:
            return self.by_conversation.get(conversation_digest(row))
        return verdict


class _Candidates:
    """The rows that the id of a verdict matches."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.rows: list[tuple[CuratedRow, str]] = []
        """The first rows, each with its name."""

    def add(self, row: CuratedRow, name: str) -> None:
        self.num_rows += 1
        if len(self.rows) < MAX_CANDIDATES:
            self.rows.append((row, name))


def find_reviewed_rows(
    verdicts: Sequence[VerdictLine],
    rows: Iterable[CuratedRow],
    shown_path: Callable[[Path], str],
    *,
    with_copies: bool,
) -> RowVerdicts:
    """Matches verdicts to rows; a later verdict on a row replaces an earlier one.

    With `with_copies`, a verdict also applies to rows with the same conversation and no verdict of
    their own; these are dropped if any of their copies is. `shown_path` returns the path of a file
    as results show it. Raises InputError for an id that several rows have.
    """
    candidates_by_id = {verdict.id: _Candidates() for verdict in verdicts}
    has_old_ids = any(not is_row_name(verdict.id) for verdict in verdicts)
    names = RowNames()
    for row in rows:
        name = names.name(row.path, row.line.view)
        ids = {name, name.partition("#")[0], row.review_id} if has_old_ids else {name}
        for row_id in ids & candidates_by_id.keys():
            candidates_by_id[row_id].add(row, name)
    by_location: dict[RowLocation, ReviewVerdict] = {}
    by_conversation: dict[bytes, ReviewVerdict] = {}
    num_unmatched = 0
    for verdict in verdicts:
        row = _matching_row(verdict, candidates_by_id[verdict.id], shown_path)
        if row is None:
            num_unmatched += 1
            continue
        by_location[row.path, row.line.number] = verdict.verdict
        if with_copies and row.facts is not None:
            digest = conversation_digest(row)
            if by_conversation.get(digest) != "drop":
                by_conversation[digest] = verdict.verdict
    return RowVerdicts(by_location, by_conversation, len(verdicts), num_unmatched)


def _matching_row(
    verdict: VerdictLine, candidates: _Candidates, shown_path: Callable[[Path], str]
) -> CuratedRow | None:
    """Returns the row that a verdict is about; None if no row matches its id."""
    rows = candidates.rows
    if candidates.num_rows > 1 and is_row_name(verdict.id) and verdict.where is not None:
        # Several files of the input have this row: the verdict is about the file that was sampled.
        file = verdict.where.rpartition(":")[0]
        rows = [(row, name) for row, name in rows if shown_path(row.path) == file] or rows
    if len(rows) > 1:
        locations = [f"{name} ({shown_path(row.path)}:{row.line.number})" for row, name in rows]
        raise ambiguous_id_error(verdict.id, locations, candidates.num_rows)
    return rows[0][0] if rows else None
