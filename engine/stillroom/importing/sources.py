"""Detects the format of each file of an import."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import InputError
from stillroom.importing.formats.datasets.tables import PAIRS
from stillroom.importing.formats.table import FORMATS
from stillroom.importing.input_files import input_files, open_beginning
from stillroom.importing.json_rows import head_rows, read_head
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
    """The files in folders and globs that have no known format, or that must not be read."""

    @property
    def files(self) -> list[Path]:
        """The files to read."""
        return [file for group in self.formats for file in group.files]


def group_by_format(
    workspace: Workspace, request: ImportRollouts, *, outputs: Collection[Path]
) -> ImportSources:
    """Groups the files of a request by format; leaves out `outputs`, the files that it writes.

    Raises InputError for a named file without a known format, or if there is no file to read.
    """
    by_format: dict[str, FormatFiles] = {}
    unread: list[Path] = []
    for file, is_named in input_files(workspace, request.inputs).items():
        if not is_named and file.resolve() in outputs:
            continue
        try:
            trace_format = detect_format(file, request.format, has_columns=bool(request.columns))
        except InputError:
            if is_named:
                raise
            trace_format = None
        if trace_format is not None:
            group = by_format.setdefault(trace_format.name, FormatFiles(trace_format, []))
            group.files.append(file)
        elif is_named and file.stat().st_size:
            raise unknown_format_error(file)
        elif not is_named:
            unread.append(file)
    if not by_format:
        raise (
            unknown_format_error(unread[0])
            if unread
            else InputError(
                "the input files are empty",
                "give files with rows; check that the program that writes them has finished",
            )
        )
    if request.columns and not any(group.format.read_columns for group in by_format.values()):
        raise InputError("columns is set, but no input is a table", "leave columns out")
    return ImportSources(list(by_format.values()), unread)


def detect_format(file: Path, name: str = AUTO, *, has_columns: bool = False) -> TraceFormat | None:
    """Returns the format with this name, or the first that recognises the file; None if none does.

    Raises InputError if the file must not be read.
    """
    with open_beginning(file) as path:
        if name != AUTO:
            return next(each for each in FORMATS if each.name == name)
        head = read_head(path)
        recognised = next((each for each in FORMATS if each.is_recognised(path, head)), None)
        # With `columns`, rows of an unknown format are read as a table.
        is_table = recognised is None and has_columns and head_rows(head)
        return PAIRS if is_table else recognised


def unknown_format_error(file: Path) -> InputError:
    """Returns the error for a file of an unknown format."""
    names = ", ".join(each.name for each in FORMATS)
    return InputError(
        f"{file}: unknown format",
        f"set format (--format) to one of {names}; `stillroom docs traces` describes each. If it "
        "has feedback, name its columns: columns id=call_id score=thumb",
    )
