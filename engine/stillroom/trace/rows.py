"""Follows a row back to its rollout and prompt, or finds where and why it was left out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.curate.convert import reason_to_leave_out
from stillroom.curate.filter.request import DroppedRow
from stillroom.curate.rows import read_curated_rows
from stillroom.data.row_files import read_row_lines
from stillroom.data.row_names import MAX_CANDIDATES, ambiguous_id_error, is_named
from stillroom.errors import InputError
from stillroom.importing.records import Place, imported_from
from stillroom.lines import Line
from stillroom.settings import Workspace
from stillroom.trace.matching import (
    FoundRows,
    Link,
    Match,
    alike,
    ids_of,
    imported_again,
    links_of,
    logs_among,
    name_at,
    named_rows,
    row_at,
)
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.request import RowStep, State

_CODE = (".py", ".yml", ".yaml")
_EARLIER = frozenset(("checkpoint", "student"))
"""The roles of models whose rows are behind a model too: what was exported, and what a training
started from."""
_UNSURE = "the file has changed since it was used: this may not be the row that was used"
IMPORTING = "import_rollouts"
_MAX_CALLS = 20
_DROPPED = msgspec.json.Decoder(DroppedRow)
_KEPT = {
    "filter_dataset": "kept by filter_dataset",
    "convert_rollouts": "converted",
    "score_rollouts": "scored again",
}


@dataclass(frozen=True, slots=True)
class _Lost:
    """The step at which a row was left out of a file, and where the row still is."""

    step: RowStep
    origin: Origin | None = None
    line: Line | None = None
    """The row in the file of `origin`; None if it could not be found."""


class RowTrace:
    """Follows one row back through the files of a lineage."""

    def __init__(self, workspace: Workspace, origins: Origins) -> None:
        self._workspace, self._origins = workspace, origins

    def follow(self, root: Origin, wanted: int | str) -> list[RowStep]:
        """Returns the steps of a row, given by line number, name or id, from the latest
        back.

        Raises InputError if no file of the lineage has the row, or several rows have the id.
        """
        start = self._rows_of(root)
        found = row_at(start.path, wanted) if isinstance(wanted, int) else self._find(start, wanted)
        if isinstance(found, _Lost):
            rest = self._steps(found.origin, found.line) if found.origin and found.line else ()
            return [found.step, *rest]
        if found is not None:
            # If the content has changed since, another row may be at this line now.
            is_sure = start is root or start.state in (State.SAME, State.GROWN)
            return list(self._steps(start, found, decision=None if is_sure else _UNSURE))
        if isinstance(wanted, int):
            raise InputError(
                f"{self._at(start)} has no row at line {wanted}",
                "give a line that holds a row, or a row's name or id",
            )
        raise InputError(
            f"neither {self._at(start)} nor what it was made from has a row {wanted!r}",
            "give a line, a row's name, or the id of a rollout (rollout_id in SFT rows)",
        )

    def _rows_of(self, origin: Origin) -> Origin:
        """Returns the file that holds the rows behind an origin.

        For a checkpoint or an evaluation's result, this is the first file of rows that it was made
        from. Raises InputError if that file is missing.
        """
        found = rows_behind(self._origins, origin)
        if not found or not found[0].path.is_file():
            raise InputError(
                f"the rows behind {self._at(origin)} are missing",
                "give the file that holds the row",
            )
        return found[0]

    def _data_inputs(self, origin: Origin) -> list[Origin]:
        return data_inputs(self._origins, origin)

    def _steps(self, origin: Origin, line: Line, alike_at: list[str] | None = None,
               *, what: str = "row", decision: str | None = None) -> Iterator[RowStep]:  # fmt: skip
        """Yields the step of a row, and then the steps of the rows that it was made from.

        `alike_at` are the places of rows with the same content, and `what` says what the row is to
        the step after it. `decision` replaces the text that follows from the operation.
        """
        ids = ids_of(line.data)
        manifest = origin.manifest
        operation = manifest.operation if manifest else None
        made = decision or (_KEPT.get(operation) if operation else None)
        known_as = ids.id or ids.rollout_id
        yield RowStep(
            what=what,
            at=self._at(origin, line.number),
            state=origin.state,
            id=known_as if isinstance(known_as, str) else None,
            row=name_at(origin.path, line.number),
            decision=made,
            also_at=alike_at or [],
        )
        if operation == IMPORTING:
            yield from self._imported(origin, line)
        for link in links_of(origin):
            yield from self._before(origin, line, link)

    def _imported(self, origin: Origin, line: Line) -> Iterator[RowStep]:
        """Yields the source rows of an imported one: its own, and those of its earlier calls.

        They are named, and not looked for: most sources are no files of lines.
        """
        places = imported_from(self._workspace, line.data)
        if places is None:
            return
        sources = {source.path.resolve(): source for source in origin.inputs(self._origins)}
        yield self._source_step(sources, places.kept, "source row")
        for place in places.others[:_MAX_CALLS]:
            yield self._source_step(sources, place, "joined source row")
        if (more := len(places.others) - _MAX_CALLS) > 0:
            at = self._at(origin, line.number)
            yield RowStep(what=f"{more} more source rows", at=at, state=origin.state)

    def _source_step(self, sources: Mapping[Path, Origin], place: Place, what: str) -> RowStep:
        source = sources.get(place.path.resolve())
        part = f"#{place.part}" if place.part else ""
        return RowStep(
            what=what,
            at=f"{self._workspace.shown(place.path)}:{place.line}{part}",
            state=State.MISSING if source is None else source.state,
            decision=None if source is not None else "the file is no input on record",
        )

    def _before(self, origin: Origin, row: Line, link: Link) -> Iterator[RowStep]:
        def find(file: Path) -> Iterator[Match]:
            return link.sources(file, row)

        inputs = self._data_inputs(origin)
        by_path = {source.path: source for source in inputs if source.path.is_file()}
        matches = alike(list(by_path), find)
        if matches:
            (path, line), *others = matches
            source = by_path[path]
            also_at = [self._at(by_path[p], other.number) for p, other in others]
            yield from self._steps(source, line, also_at, what=link.what)
            return
        steps = self._before_import(origin, list(by_path), find)
        if steps:
            yield from steps
            return
        for source in inputs:
            problem = "is missing" if source.state is State.MISSING else "does not hold it any more"
            yield RowStep(
                what=link.what,
                at=self._at(source),
                state=source.state,
                decision=f"the file {problem}",
            )

    def _before_import(
        self, origin: Origin, files: list[Path], find: Callable[[Path], Iterator[Match]]
    ) -> list[RowStep]:
        """Returns the source rows of a row, if an operation read other systems' files itself."""
        logs = logs_among(self._workspace, origin, files)
        with imported_again(self._workspace, logs) as imported:
            matches = [] if imported is None else alike([imported.path], find)
            return list(self._imported(origin, matches[0][1])) if matches else []

    def _find(self, origin: Origin, wanted: str) -> Line | _Lost | None:
        """Returns a row of a file by name or id; for a row that the file lacks, where it was lost.

        None if neither the file nor anything that it was made from has it. Raises InputError if
        several rows of a file may be meant.
        """
        if origin.path.is_file():
            line = FoundRows(origin.path, wanted).the_one(self._at(origin))
            if line is not None:
                return line
        if origin.manifest is None or not origin.path.exists():
            return None
        for source in self._data_inputs(origin):
            found = self._find(source, wanted)
            if found is not None:
                return found if isinstance(found, _Lost) else self._after(origin, source, found)
        return self._dropped(origin, wanted)

    def _after(self, origin: Origin, source: Origin, line: Line) -> Line | _Lost:
        """Returns the row of a file that a row of its input became, or how that was lost."""
        row, name = next(
            (row, name) for row, name in named_rows(source.path) if row.line.number == line.number
        )
        dropped = self._dropped(origin, name, source, line)
        if dropped is not None:
            return dropped
        operation = origin.manifest.operation if origin.manifest else ""
        for link in links_of(origin):
            if (made := next(link.results(origin.path, row, name), None)) is not None:
                return made
        reason = _why_left_out(operation, source.path, line)
        step = RowStep(
            what="row",
            at=self._at(origin),
            state=origin.state,
            row=name,
            decision=f"left out by {operation}",
            reasons=[reason] if reason else [],
        )
        return _Lost(step, source, line)

    def _dropped(
        self,
        origin: Origin,
        wanted: str | None,
        source: Origin | None = None,
        source_line: Line | None = None,
    ) -> _Lost | None:
        """Returns where a filter noted that it dropped a row; None if there is no such note.

        The row is that of `source_line` in the file of `source`, or where the input is gone, the
        one with the name or id `wanted`. Raises InputError if several notes may be meant.
        """
        manifest = origin.manifest
        if manifest is None or manifest.operation != "filter_dataset" or not manifest.side:
            return None
        record = manifest.side[0]
        side = origin.path.with_name(Path(record.path).name)
        if not side.is_file():
            return None
        notes = list[tuple[Line, DroppedRow]]()
        for line in read_row_lines(side):
            note = _DROPPED.decode(line.data)
            if source is None or source_line is None:
                is_it = wanted is not None and _is_note_of(note, wanted)
            else:
                is_in = origin.move.place(note.file) == source.path
                is_it = is_in and note.line == source_line.number
            if is_it:
                notes.append((line, note))
        if not notes:
            return None
        if len(notes) > 1:
            places = [f"{note.row} ({note.file}:{note.line})" for _, note in notes]
            raise ambiguous_id_error(wanted or "", places[:MAX_CANDIDATES], len(places))
        (line, note), *_ = notes
        step = RowStep(
            what="row",
            at=f"{self._workspace.shown(side)}:{line.number}",
            state=self._origins.of_file(record, side).state,
            id=note.id,
            row=note.row,
            decision="dropped by filter_dataset",
            reasons=note.reasons,
            like=note.like,
        )
        return _Lost(step, source, source_line)

    def _at(self, origin: Origin, number: int | None = None) -> str:
        shown = self._workspace.shown(origin.path)
        return shown if number is None else f"{shown}:{number}"


def data_inputs(origins: Origins, origin: Origin) -> list[Origin]:
    """Returns those inputs that are files with rows, that is, neither models nor code."""
    found = [i for i in origin.inputs(origins) if i.role is None]
    return [i.rows(origins) for i in found if i.path.suffix not in _CODE]


def rows_behind(origins: Origins, origin: Origin) -> list[Origin]:
    """Returns the files of rows behind an origin: the file itself, if it is one.

    For a checkpoint or an evaluation's result these are the files that it was made from, then those
    of the trainings before; for an export they are those of the checkpoint that was exported.
    """
    if origin.path.is_file() and origin.path.suffix != ".json":
        return [origin]
    found = data_inputs(origins, origin)
    for model in origin.inputs(origins):
        if model.role in _EARLIER:
            found += rows_behind(origins, model)
    return list({(file.path, file.record.sha256): file for file in found}.values())


def _is_note_of(note: DroppedRow, wanted: str) -> bool:
    return note.id == wanted or (note.row is not None and is_named(note.row, wanted))


def _why_left_out(operation: str, file: Path, line: Line) -> str | None:
    if operation == "make_dpo_pairs":
        return "no pair was made of it"
    if operation != "convert_rollouts":
        return None
    for rollout in read_curated_rows(file):
        if rollout.line.number == line.number:
            if rollout.facts is None:
                return rollout.problem
            return reason_to_leave_out(rollout.facts, include_failed=False)
    return None
