"""Traces a row back to its rollout and prompt, or to the step at which it was left out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.curate.convert import reason_to_leave_out
from stillroom.curate.filter.request import DroppedRow
from stillroom.curate.rows import read_curated_rows
from stillroom.data.row_files import read_row_lines
from stillroom.data.row_names import MAX_CANDIDATES, ambiguous_id_error, matches_name
from stillroom.errors import InputError
from stillroom.importing.records import Location, imported_from
from stillroom.lineage import Manifest
from stillroom.lines import Line
from stillroom.settings import Workspace
from stillroom.trace.matching import (
    Link,
    Match,
    first_matches,
    ids_of,
    inputs_to_import,
    links_of,
    matching_row,
    name_at,
    named_rows,
    reimported,
    row_at,
)
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.request import RowStep, State

_CODE_SUFFIXES = (".py", ".yml", ".yaml")
_EARLIER_ROLES = frozenset(("checkpoint", "student"))
"""The roles of input models whose source rows are also those of a model: the exported checkpoint,
and the student from which a training started."""
_UNSURE_NOTE = "the file has changed since it was used: this may not be the row that was used"
IMPORT_OPERATION = "import_rollouts"
"""The operation whose outputs record the locations of their source rows."""
_MAX_CALLS = 20
_DROPPED = msgspec.json.Decoder(DroppedRow)
_DECISIONS = {
    "run_recipe": "written by run_recipe",
    "filter_dataset": "kept by filter_dataset",
    "convert_rollouts": "converted",
    "score_rollouts": "scored again",
}


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """The step at which a row was left out of a file, and the row in the input of that step."""

    step: RowStep
    origin: Origin | None = None
    """The input file with the row; None if it is unknown."""
    line: Line | None = None
    """The row in the file of `origin`; None if it could not be found."""


class RowTrace:
    """Traces one row back through the files of a lineage."""

    def __init__(self, workspace: Workspace, origins: Origins) -> None:
        self._workspace, self._origins = workspace, origins

    def trace(self, root: Origin, query: int | str) -> list[RowStep]:
        """Returns the steps of a row, latest first; `query` is its line number, name or id.

        Raises InputError if no file of the lineage has the row, or several rows have the id.
        """
        start = self._row_file(root)
        match = (
            row_at(start.path, query) if isinstance(query, int) else self._find_row(start, query)
        )
        if isinstance(match, _LeftOut):
            earlier = self._steps(match.origin, match.line) if match.origin and match.line else ()
            return [match.step, *earlier]
        if match is not None:
            # If the content has changed, another row may be at this line.
            is_sure = start is root or start.state in (State.SAME, State.GROWN)
            return list(self._steps(start, match, decision=None if is_sure else _UNSURE_NOTE))
        if isinstance(query, int):
            raise InputError(
                f"{self._at(start)} has no row at line {query}",
                "give another line, or the name or id of a row",
            )
        raise InputError(
            f"neither {self._at(start)} nor its inputs have a row {query!r}",
            "give the line or name of a row, or the id of a rollout (rollout_id in SFT rows)",
        )

    def _row_file(self, origin: Origin) -> Origin:
        """Returns the file in which the trace of a row starts: that of the origin, if it has rows.

        For a checkpoint or an evaluation's result, this is the first file of rows among its inputs.
        Raises InputError if that file is missing.
        """
        files = source_files(self._origins, origin)
        if not files or not files[0].path.is_file():
            name = self._at(origin)
            raise InputError(
                f"{self._at(files[0])}, from which {name} was made, no longer exists"
                if files
                else f"no data file is recorded for {name}",
                f"call again with the data file that contains the row in place of {name}",
            )
        return files[0]

    def _data_inputs(self, origin: Origin) -> list[Origin]:
        return data_inputs(self._origins, origin)

    def _steps(self, origin: Origin, line: Line, also_at: list[str] | None = None,
               *, kind: str = "row", decision: str | None = None) -> Iterator[RowStep]:  # fmt: skip
        """Yields the step of a row, and then the steps of the rows that it was made from.

        `also_at` are the locations of rows with the same content. `decision` replaces the text for
        the operation.
        """
        ids = ids_of(line.data)
        manifest = origin.manifest
        operation = manifest.operation if manifest else None
        row_id = ids.id or ids.rollout_id
        yield RowStep(
            kind=kind,
            at=self._at(origin, line.number),
            state=origin.state,
            id=row_id if isinstance(row_id, str) else None,
            row=name_at(origin.path, line.number),
            decision=decision or (_DECISIONS.get(operation) if operation else None),
            also_at=also_at or [],
        )
        if operation == IMPORT_OPERATION:
            yield from self._source_steps(origin, line)
        for link in links_of(origin):
            yield from self._input_steps(origin, line, link)

    def _source_steps(self, origin: Origin, line: Line) -> Iterator[RowStep]:
        """Yields the steps of an imported row's source rows: its own, and those of earlier calls.

        The recorded locations are not read, because most sources are not files of lines.
        """
        imported = imported_from(self._workspace, line.data)
        if imported is None:
            return
        sources = {source.path.resolve(): source for source in origin.inputs(self._origins)}
        yield self._source_step(sources, imported.kept, "source row")
        for location in imported.others[:_MAX_CALLS]:
            yield self._source_step(sources, location, "joined source row")
        if (more := len(imported.others) - _MAX_CALLS) > 0:
            at = self._at(origin, line.number)
            yield RowStep(kind=f"{more} more source rows", at=at, state=origin.state)

    def _source_step(
        self, sources: Mapping[Path, Origin], location: Location, kind: str
    ) -> RowStep:
        """Returns the step of the source row at a recorded location."""
        source = sources.get(location.path.resolve())
        part = f"#{location.part}" if location.part else ""
        return RowStep(
            kind=kind,
            at=f"{self._workspace.shown(location.path)}:{location.line}{part}",
            state=State.MISSING if source is None else source.state,
            decision=None if source is not None else "the file is not a recorded input",
        )

    def _input_steps(self, origin: Origin, row: Line, link: Link) -> Iterator[RowStep]:
        """Yields the steps of the input rows that a row was made from."""

        def find(file: Path) -> Iterator[Match]:
            return link.sources(file, row)

        inputs = self._data_inputs(origin)
        by_path = {source.path: source for source in inputs if source.path.is_file()}
        matches = first_matches(list(by_path), find)
        if matches:
            (path, line), *others = matches
            source = by_path[path]
            also_at = [self._at(by_path[p], other.number) for p, other in others]
            yield from self._steps(source, line, also_at, kind=link.kind)
            return
        steps = self._reimported_steps(origin, list(by_path), find)
        if steps:
            yield from steps
            return
        for source in inputs:
            is_missing = source.state is State.MISSING
            problem = "is missing" if is_missing else "does not have the row any more"
            yield RowStep(
                kind=link.kind,
                at=self._at(source),
                state=source.state,
                decision=f"the file {problem}",
            )

    def _reimported_steps(
        self, origin: Origin, files: list[Path], find: Callable[[Path], Iterator[Match]]
    ) -> list[RowStep]:
        """Returns the steps of a row's source rows if its operation imported them from logs."""
        logs = inputs_to_import(self._workspace, origin, files)
        with reimported(self._workspace, logs) as imported:
            matches = [] if imported is None else first_matches([imported.path], find)
            return list(self._source_steps(origin, matches[0][1])) if matches else []

    def _find_row(self, origin: Origin, query: str) -> Line | _LeftOut | None:
        """Returns a row of a file by its name or id, or the step at which it was left out.

        Returns None if neither the file nor its inputs have the row. Raises InputError if several
        rows of a file match.
        """
        if origin.path.is_file():
            line = matching_row(origin.path, query, self._at(origin))
            if line is not None:
                return line
        if origin.manifest is None or not origin.path.exists():
            return None
        for source in self._data_inputs(origin):
            match = self._find_row(source, query)
            if match is not None:
                return (
                    match
                    if isinstance(match, _LeftOut)
                    else self._result_row(origin, source, match)
                )
        return self._find_dropped(origin, query)

    def _result_row(self, origin: Origin, source: Origin, line: Line) -> Line | _LeftOut:
        """Returns the row that was made from an input row, or the step at which it was left out."""
        row, name = next(
            (row, name) for row, name in named_rows(source.path) if row.line.number == line.number
        )
        dropped = self._find_dropped(origin, name, source, line)
        if dropped is not None:
            return dropped
        operation = origin.manifest.operation if origin.manifest else ""
        for link in links_of(origin):
            if (result_row := next(link.results(origin.path, row, name), None)) is not None:
                return result_row
        reason = _left_out_reason(origin.manifest, source.path, line)
        step = RowStep(
            kind="row",
            at=self._at(origin),
            state=origin.state,
            row=name,
            decision=f"left out by {operation}",
            reasons=[reason] if reason else [],
        )
        return _LeftOut(step, source, line)

    def _find_dropped(
        self,
        origin: Origin,
        query: str | None,
        source: Origin | None = None,
        source_line: Line | None = None,
    ) -> _LeftOut | None:
        """Returns the step at which a filter dropped a row; None if no filter recorded that.

        The row is at `source_line` of `source`; without these, because the input is missing, it has
        the name or id `query`. Raises InputError if several records match.
        """
        manifest = origin.manifest
        if manifest is None or manifest.operation != "filter_dataset" or not manifest.side:
            return None
        record = manifest.side[0]
        side = origin.path.with_name(Path(record.path).name)
        if not side.is_file():
            return None
        matches = list[tuple[Line, DroppedRow]]()
        for line in read_row_lines(side):
            dropped = _DROPPED.decode(line.data)
            if source is None or source_line is None:
                is_match = query is not None and _is_dropped_row(dropped, query)
            else:
                is_same_file = origin.move.resolve(dropped.file) == source.path
                is_match = is_same_file and dropped.line == source_line.number
            if is_match:
                matches.append((line, dropped))
        if not matches:
            return None
        if len(matches) > 1:
            locations = [f"{dropped.row} ({dropped.file}:{dropped.line})" for _, dropped in matches]
            raise ambiguous_id_error(query or "", locations[:MAX_CANDIDATES], len(locations))
        (line, dropped), *_ = matches
        step = RowStep(
            kind="row",
            at=f"{self._workspace.shown(side)}:{line.number}",
            state=self._origins.of_file(record, side).state,
            id=dropped.id,
            row=dropped.row,
            decision="dropped by filter_dataset",
            reasons=dropped.reasons,
            like=dropped.like,
        )
        return _LeftOut(step, source, source_line)

    def _at(self, origin: Origin, number: int | None = None) -> str:
        """Returns `file:line` for display, or only the file."""
        shown = self._workspace.shown(origin.path)
        return shown if number is None else f"{shown}:{number}"


def data_inputs(origins: Origins, origin: Origin) -> list[Origin]:
    """Returns the inputs that are files of rows, that is, neither models nor code."""
    files = [i for i in origin.inputs(origins) if i.role is None]
    return [i.with_readable_path(origins) for i in files if i.path.suffix not in _CODE_SUFFIXES]


def source_files(origins: Origins, origin: Origin) -> list[Origin]:
    """Returns the files of source rows of an origin; for a file of rows, the file itself.

    For a checkpoint or an evaluation's result these are its inputs, then the inputs of earlier
    trainings; for an export, the source files of the exported checkpoint.
    """
    if origin.path.is_file() and origin.path.suffix != ".json":
        return [origin]
    files = data_inputs(origins, origin)
    for model in origin.inputs(origins):
        if model.role in _EARLIER_ROLES:
            files += source_files(origins, model)
    return list({(file.path, file.record.sha256): file for file in files}.values())


def _is_dropped_row(dropped: DroppedRow, query: str) -> bool:
    return dropped.id == query or (dropped.row is not None and matches_name(query, dropped.row))


def _left_out_reason(manifest: Manifest | None, file: Path, line: Line) -> str | None:
    """Returns why an operation left out an input row; None if that is unknown."""
    if manifest is not None and manifest.operation == "make_dpo_pairs":
        return "no pair contains it"
    if manifest is None or manifest.operation != "convert_rollouts":
        return None
    include_failed = manifest.request.get("include_failed", False)
    for rollout in read_curated_rows(file):
        if rollout.line.number == line.number:
            if rollout.facts is None:
                return rollout.problem
            return reason_to_leave_out(rollout.facts, include_failed=include_failed)
    return None
