"""Finds out which format each file of an import has."""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import InputError
from stillroom.importing.formats.datasets.tables import PAIRS
from stillroom.importing.formats.table import FORMATS
from stillroom.importing.inputs import input_files
from stillroom.importing.json_rows import head_rows, read_head
from stillroom.importing.packed import beginning_of
from stillroom.importing.records import TraceFormat
from stillroom.importing.request import AUTO, ImportRollouts
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class FormatFiles:
    """The files of one format, in the order in which they were found."""

    format: TraceFormat
    files: list[Path]


@dataclass(frozen=True, slots=True)
class ImportSources:
    """All files of an import."""

    formats: list[FormatFiles]
    unread: list[Path]
    """The files in folders and globs that no format recognises, or that must not be read."""

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        return [file for each in self.formats for file in each.files]


def import_sources(
    workspace: Workspace, request: ImportRollouts, *, outputs: Collection[Path]
) -> ImportSources:
    """Returns the files of a request by their formats; `outputs` in its folders are left out.

    Raises InputError for a named file that no format recognises, and if no file is left.
    """
    by_format: dict[str, FormatFiles] = {}
    unread: list[Path] = []
    for file, is_named in input_files(workspace, request.inputs).items():
        if not is_named and file.resolve() in outputs:
            continue
        chosen = _format_of(file, request, is_named=is_named)
        if chosen is not None:
            by_format.setdefault(chosen.name, FormatFiles(chosen, [])).files.append(file)
        elif is_named and file.stat().st_size:
            raise _unrecognised(file)
        elif not is_named:
            unread.append(file)
    if not by_format:
        raise (
            _unrecognised(unread[0])
            if unread
            else InputError("the input files are empty", "check where they are written")
        )
    if request.columns and not any(each.format.read_columns for each in by_format.values()):
        raise InputError("columns are for tables, and no input is one", "leave columns out")
    return ImportSources(list(by_format.values()), unread)


def _format_of(file: Path, request: ImportRollouts, *, is_named: bool) -> TraceFormat | None:
    with ExitStack() as stack:
        try:
            path = stack.enter_context(beginning_of(file))
        except InputError:
            if is_named:
                raise
            return None
        return _recognised(path, request)


def _recognised(path: Path, request: ImportRollouts) -> TraceFormat | None:
    if request.format != AUTO:
        return next(known for known in FORMATS if known.name == request.format)
    head = read_head(path)
    found = next((known for known in FORMATS if known.is_recognised(path, head)), None)
    # Whoever names columns says that rows of unknown fields are a table.
    is_table = found is None and request.columns and head_rows(head)
    return PAIRS if is_table else found


def _unrecognised(file: Path) -> InputError:
    names = ", ".join(known.name for known in FORMATS)
    return InputError(
        f"{file}: no format recognises it",
        f"say which with format (--format), one of {names}; `stillroom docs traces` shows each",
    )
