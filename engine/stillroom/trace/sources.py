"""Writes every row behind a model or file, so that an auditor can read what it was made of.

From the rows of a file follow those of its inputs that they were made from, back to the prompts.
Each file is read once, whatever its number of rows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.convert import supervised_row
from stillroom.curate.rows import CuratedRow, read_curated_rows
from stillroom.data.instruction import Instruction
from stillroom.data.row_names import RowNames, row_hash
from stillroom.errors import InputError
from stillroom.files import LineWriter, content_hash
from stillroom.importing.records import imported_from
from stillroom.lines import Line
from stillroom.settings import Workspace
from stillroom.trace.matching import (
    ids_of,
    imported_again,
    logs_among,
    messages_of,
    prompt_task_id,
    rows_instruction,
    system_in_ids,
)
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.rows import data_inputs, rows_behind


class SourceRow(msgspec.Struct, frozen=True):
    """A line of the file with all rows behind something."""

    at: str
    """The place of the row as `file:line`."""
    row: str | None
    """The name of the row; None for a line of a log."""
    state: str
    """How its file compares with what was used."""
    made_by: str | None
    """The operation that made the file; None for a file that was given."""
    content: Any
    """The row as it is; a text if it is no JSON.

    None for a line of a log, which is named only: it holds the secrets and personal data that the
    import took out, and maybe other people's conversations.
    """


Keys = Iterable[str | None]


@dataclass(frozen=True, slots=True)
class _Link:
    """How the rows of a file name the rows of its inputs that they were made from."""

    of_output: Callable[[Line], Keys]
    """The keys of the input rows behind a row of the file."""
    of_input: Callable[[CuratedRow, str], Keys]
    """The keys of an input row, given with its name."""
    is_log: bool = False
    """Whether the inputs are logs, whose lines the keys name by `file:line`."""


def write_sources(workspace: Workspace, origins: Origins, subject: Origin, rows: LineWriter) -> int:
    """Writes the rows behind a subject, its own first, and returns the number of files.

    Raises InputError if there is none.
    """
    writer = _Writer(workspace, origins, rows)
    for origin in rows_behind(origins, subject):
        writer.write(origin, None, None)
    if rows.num_rows == 0:
        raise InputError(
            f"there is no row behind {workspace.shown(subject.path)}",
            "give a file of rows, a run, a checkpoint, or an export of one",
        )
    return writer.num_files


class _Writer:
    def __init__(self, workspace: Workspace, origins: Origins, rows: LineWriter) -> None:
        self._workspace, self._origins, self._rows = workspace, origins, rows
        self.num_files = 0

    def write(self, origin: Origin, wanted: set[str] | None, link: _Link | None) -> None:
        """Writes the wanted rows of a file (None: all), and then those that they were made from."""
        if link is not None and link.is_log and origin.manifest is None:
            self._write_places(origin, wanted or set())
            return
        if not origin.path.is_file():
            return
        own = _link_of(origin, self._workspace)
        behind = set[str]()
        num_before = self._rows.num_rows
        for row, name in _named(origin):
            if wanted is not None and link is not None:
                keys = link.of_input(row, name)
                if not any(key in wanted for key in keys if key is not None):
                    continue
            self._write_row(origin, row.line, name)
            if own is not None:
                behind.update(key for key in own.of_output(row.line) if key is not None)
        self.num_files += self._rows.num_rows > num_before
        if own is not None and behind:
            sources = data_inputs(self._origins, origin)
            logs = self._write_imported(origin, sources, behind, own)
            for source in sources:
                if source.path not in logs:
                    self.write(source, behind, own)

    def _write_imported(
        self, origin: Origin, sources: Sequence[Origin], wanted: set[str], link: _Link
    ) -> list[Path]:
        """Writes the places of the wanted rows of other systems' files, and returns the files."""
        files = [source.path for source in sources if source.path.is_file()]
        logs = logs_among(self._workspace, origin, files)
        places, names = set[str](), RowNames()
        with imported_again(self._workspace, logs) as imported:
            for row in () if imported is None else imported.rows():
                keys = link.of_input(row, names.name(row.path, row.line.view))
                if any(key in wanted for key in keys):
                    found = _imported_places(self._workspace, row.line)
                    places.update(key for key in found if key is not None)
        for source in sources:
            if source.path in logs:
                self._write_places(source, places)
        return logs

    def _write_places(self, origin: Origin, wanted: Collection[str]) -> None:
        """Writes the places in a log that are among the wanted ones, in the order of its lines."""
        start, shown = f"{origin.path.resolve()}:", self._workspace.shown(origin.path)
        places = [place.removeprefix(start) for place in wanted if place.startswith(start)]
        for place in sorted(places, key=lambda place: (int(place.partition("#")[0]), place)):
            self._rows.write(SourceRow(f"{shown}:{place}", None, origin.state, None, None))
        self.num_files += bool(places)

    def _write_row(self, origin: Origin, line: Line, name: str) -> None:
        try:
            content = msgspec.json.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            content = line.data.decode("utf-8", errors="replace")
        self._rows.write(
            SourceRow(
                at=f"{self._workspace.shown(origin.path)}:{line.number}",
                row=name,
                state=origin.state,
                made_by=origin.manifest.operation if origin.manifest else None,
                content=content,
            )
        )


def _named(origin: Origin) -> Iterator[tuple[CuratedRow, str]]:
    names = RowNames()
    for row in read_curated_rows(origin.path, with_parts=True):
        yield row, names.name(origin.path, row.line.view)


def _link_of(origin: Origin, workspace: Workspace) -> _Link | None:
    """Returns how the rows of a file lead to those of its inputs; None if it was given."""
    manifest = origin.manifest
    match manifest.operation if manifest is not None else None:
        case "filter_dataset":
            return _Link(_hash_of, lambda _row, name: (name.partition("#")[0],))
        case "convert_rollouts":
            own = rows_instruction(manifest)
            return _Link(_hash_of, lambda row, _name: _converted_hash(row, own))
        case "import_rollouts":
            return _Link(
                lambda line: _imported_places(workspace, line),
                lambda row, _name: (f"{row.path.resolve()}:{row.line.number}",),
                is_log=True,
            )
        case "score_rollouts":
            return _Link(lambda line: (_said(line),), lambda row, _name: (_said(row.line),))
        case "make_dpo_pairs":
            return _Link(_pair_ids, lambda row, name: (name, row.id))
        case "generate_rollouts" | "evaluate_model":
            is_txt = origin.path.suffix == ".txt"
            system = system_in_ids(manifest)
            return _Link(
                lambda line: (_text(ids_of(line.data).task_id),),
                lambda row, _name: (
                    prompt_task_id(row.line, system, is_text=row.path.suffix == ".txt" or is_txt),
                ),
            )
        case _:
            return None


def _imported_places(workspace: Workspace, line: Line) -> Keys:
    places = imported_from(workspace, line.data)
    if places is not None:
        yield from (
            str(replace(place, path=place.path.resolve()))
            for place in (places.kept, *places.others)
        )


def _hash_of(line: Line) -> Keys:
    return (row_hash(line.view),)


def _converted_hash(row: CuratedRow, instruction: Instruction) -> Keys:
    if row.facts is None or row.parts is None:
        return ()
    return (row_hash(b"".join(supervised_row(row.facts, row.parts, instruction))),)


def _pair_ids(line: Line) -> Keys:
    ids = ids_of(line.data)
    return _text(ids.chosen_id), _text(ids.rejected_id)


def _said(line: Line) -> str:
    """Returns a key of a rollout that stays when it is scored again."""
    data = line.data
    return content_hash([ids_of(data).id, messages_of(data)])


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
