"""Writes every row behind a model or file, so that an auditor can read what it was made of.

From the rows of a file follow those of its inputs that they were made from, back to the prompts.
Each file is read once, whatever its number of rows.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.rows import CuratedRow
from stillroom.data.row_names import RowNames
from stillroom.errors import InputError
from stillroom.files import LineWriter
from stillroom.importing.records import imported_from
from stillroom.lines import Line
from stillroom.settings import Workspace
from stillroom.trace.matching import (
    Keys,
    Link,
    imported_again,
    links_of,
    logs_among,
    named_rows,
)
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.rows import IMPORTING, data_inputs, rows_behind


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


def write_sources(workspace: Workspace, origins: Origins, subject: Origin, rows: LineWriter) -> int:
    """Writes the rows behind a subject, its own first, and returns the number of files.

    Raises InputError if there is none.
    """
    writer = _Writer(workspace, origins, rows)
    for origin in rows_behind(origins, subject):
        writer.write(origin, None, ())
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
        self._to_places = Link(
            "source row",
            lambda line: _imported_places(workspace, line),
            lambda row, _name: (f"{row.path.resolve()}:{row.line.number}",),
        )

    def write(self, origin: Origin, wanted: set[str] | None, links: Sequence[Link]) -> None:
        """Writes the wanted rows of a file (None: all), and then those that they were made from."""
        if not origin.path.is_file():
            return
        is_import = origin.manifest is not None and origin.manifest.operation == IMPORTING
        own = [self._to_places] if is_import else links_of(origin)
        behind = set[str]()
        num_before = self._rows.num_rows
        for row, name in named_rows(origin.path):
            if wanted is None or _has_any(row, name, links, wanted):
                self._write_row(origin, row.line, name)
                keys = (key for link in own for key in link.of_output(row.line))
                behind.update(key for key in keys if key is not None)
        self.num_files += self._rows.num_rows > num_before
        if not behind:
            return
        sources = data_inputs(self._origins, origin)
        logs = self._write_imported(origin, sources, behind, own)
        for source in sources:
            if is_import and source.manifest is None:
                self._write_places(source, behind)
            elif source.path not in logs:
                self.write(source, behind, own)

    def _write_imported(
        self, origin: Origin, sources: Sequence[Origin], wanted: set[str], links: Sequence[Link]
    ) -> list[Path]:
        """Writes the places of the wanted rows of other systems' files, and returns the files."""
        files = [source.path for source in sources if source.path.is_file()]
        logs = logs_among(self._workspace, origin, files)
        places, names = set[str](), RowNames()
        with imported_again(self._workspace, logs) as imported:
            for row in () if imported is None else imported.rows():
                if _has_any(row, names.name(row.path, row.line.view), links, wanted):
                    places.update(filter(None, self._to_places.of_output(row.line)))
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


def _has_any(row: CuratedRow, name: str, links: Iterable[Link], wanted: set[str]) -> bool:
    return any(key in wanted for link in links for key in link.of_input(row, name))


def _imported_places(workspace: Workspace, line: Line) -> Keys:
    places = imported_from(workspace, line.data)
    if places is not None:
        yield from (
            str(replace(place, path=place.path.resolve()))
            for place in (places.kept, *places.others)
        )
