"""Writes every row from which a model or file was made, for audits.

It starts with the rows of a file, then writes those of its inputs, and so on back to the prompts.
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
    inputs_to_import,
    links_of,
    named_rows,
    reimported,
)
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.rows import IMPORT_OPERATION, data_inputs, source_files


class SourceLine(msgspec.Struct, frozen=True):
    """A line of the file of source rows."""

    at: str
    """The location of the row as `file:line`."""
    row: str | None
    """The name of the row; None for a line of a log."""
    state: str
    """How its file compares with the content that was used."""
    made_by: str | None
    """The operation that wrote the file; None for the user's own files."""
    content: Any
    """The row, decoded; the undecoded text if it is not JSON.

    None for a line of a log: it contains the secrets and personal data that the import removed, and
    maybe other people's conversations.
    """


def write_sources(workspace: Workspace, origins: Origins, target: Origin, rows: LineWriter) -> int:
    """Writes the source rows of a target, latest first, and returns the number of files.

    Raises InputError if there are none.
    """
    writer = _Writer(workspace, origins, rows)
    for origin in source_files(origins, target):
        writer.write(origin, None, ())
    if rows.num_rows == 0:
        raise InputError(
            f"{workspace.shown(target.path)} has no source rows",
            "give a file of rows, a run, a checkpoint, or an exported model",
        )
    return writer.num_files


class _Writer:
    """Writes the rows of a file and, file by file, the input rows that they were made from."""

    def __init__(self, workspace: Workspace, origins: Origins, rows: LineWriter) -> None:
        self._workspace, self._origins, self._rows = workspace, origins, rows
        self.num_files = 0
        self._source_link = Link(
            "source row",
            lambda line: _source_locations(workspace, line),
            lambda row, _name: (f"{row.path.resolve()}:{row.line.number}",),
        )

    def write(self, origin: Origin, keys: set[str] | None, links: Sequence[Link]) -> None:
        """Writes the rows of a file with these keys (None: all rows), and their source rows."""
        if not origin.path.is_file():
            return
        is_import = origin.manifest is not None and origin.manifest.operation == IMPORT_OPERATION
        own_links = [self._source_link] if is_import else links_of(origin)
        source_keys = set[str]()
        num_before = self._rows.num_rows
        for row, name in named_rows(origin.path):
            if keys is None or _has_any(row, name, links, keys):
                self._write_row(origin, row.line, name)
                row_keys = (key for link in own_links for key in link.output_keys(row.line))
                source_keys.update(key for key in row_keys if key is not None)
        self.num_files += self._rows.num_rows > num_before
        if not source_keys:
            return
        sources = data_inputs(self._origins, origin)
        logs = self._write_log_locations(origin, sources, source_keys, own_links)
        for source in sources:
            if is_import and source.manifest is None:
                self._write_locations(source, source_keys)
            elif source.path not in logs:
                self.write(source, source_keys, own_links)

    def _write_log_locations(
        self,
        origin: Origin,
        sources: Sequence[Origin],
        keys: set[str],
        links: Sequence[Link],
    ) -> list[Path]:
        """Writes where in the imported logs the rows with these keys came from.

        Returns the logs, which need no further tracing.
        """
        files = [source.path for source in sources if source.path.is_file()]
        logs = inputs_to_import(self._workspace, origin, files)
        locations, names = set[str](), RowNames()
        with reimported(self._workspace, logs) as imported:
            for row in () if imported is None else imported.rows():
                if _has_any(row, names.name(row.path, row.line.view), links, keys):
                    locations.update(filter(None, self._source_link.output_keys(row.line)))
        for source in sources:
            if source.path in logs:
                self._write_locations(source, locations)
        return logs

    def _write_locations(self, origin: Origin, locations: Collection[str]) -> None:
        """Writes the locations (`file:line`) that are in a log, in the order of its lines."""
        prefix, shown = f"{origin.path.resolve()}:", self._workspace.shown(origin.path)
        lines = [text.removeprefix(prefix) for text in locations if text.startswith(prefix)]
        for line in sorted(lines, key=lambda line: (int(line.partition("#")[0]), line)):
            self._rows.write(SourceLine(f"{shown}:{line}", None, origin.state, None, None))
        self.num_files += bool(lines)

    def _write_row(self, origin: Origin, line: Line, name: str) -> None:
        try:
            content = msgspec.json.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            content = line.data.decode("utf-8", errors="replace")
        self._rows.write(
            SourceLine(
                at=f"{self._workspace.shown(origin.path)}:{line.number}",
                row=name,
                state=origin.state,
                made_by=origin.manifest.operation if origin.manifest else None,
                content=content,
            )
        )


def _has_any(row: CuratedRow, name: str, links: Iterable[Link], keys: set[str]) -> bool:
    """Returns whether an input row has one of the keys."""
    return any(key in keys for link in links for key in link.input_keys(row, name))


def _source_locations(workspace: Workspace, line: Line) -> Keys:
    """Yields the recorded locations of an imported row's source rows."""
    imported = imported_from(workspace, line.data)
    if imported is not None:
        yield from (
            str(replace(location, path=location.path.resolve()))
            for location in (imported.kept, *imported.others)
        )
