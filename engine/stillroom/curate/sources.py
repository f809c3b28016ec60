"""Opens the inputs of an operation on rollouts, whichever system wrote them.

Files in a layout that curation knows are read in place. Files in any other format that
import_rollouts reads are first imported into a temporary file.
"""

import itertools
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stillroom import fences
from stillroom.curate.rows import CuratedRow, read_curated_rows
from stillroom.data.checks import Problem
from stillroom.data.formats import RowFormat, detect_format
from stillroom.data.layouts.detect import layout_of
from stillroom.data.row_files import decode_line, read_row_lines, rollout_files
from stillroom.errors import DataError, EngineError, InputError
from stillroom.home_paths import home_path
from stillroom.importing.records import Location, imported_from
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.importing.tally import RefusedLine
from stillroom.lineage import FileRecord, ModelRecord, read_manifest
from stillroom.lines import read_lines
from stillroom.places import make_folder
from stillroom.rollout.sources import SourceFile, check_output, run_with_id, source_files
from stillroom.settings import Workspace

if TYPE_CHECKING:
    from stillroom.importing.sources import ImportSources

_NUM_FIRST_ROWS = 20
"""The number of rows at the start of a file that decide which reader is used for the file."""
_ROLLOUTS = "rollouts.jsonl"
_MESSAGES_FORMAT = "openai_fine_tuning"
"""The format whose rows have only `messages`; rows of prompts are therefore detected as this
format, too."""
_STILLROOM_IDS = ("rollout_id", "chosen_id")
"""The fields that convert_rollouts and make_dpo_pairs write into each row."""


@dataclass(frozen=True)
class ImportedFile:
    """A temporary file with the rollouts of other systems' files."""

    path: Path
    records: list[FileRecord | ModelRecord]
    """The records of the original files, and of the models that answered in them."""
    result: ImportResult
    workspace: Workspace

    @cached_property
    def locations(self) -> list[Location | None]:
        """The location of each rollout in the original files; None if it is unknown."""
        origins = (imported_from(self.workspace, row.line.data) for row in self.rows())
        return [None if origin is None else origin.kept for origin in origins]

    def rows(self) -> Iterator[CuratedRow]:
        """Yields the rollouts."""
        return read_curated_rows(self.path, with_raw_fields=True)

    def refused(self) -> Iterator[RefusedLine]:
        """Yields the rows of the original files that are not conversations."""
        for line in read_lines(self.path.with_name(f"{self.path.name}.refused")):
            yield msgspec.json.decode(line.data, type=RefusedLine)


@dataclass(frozen=True)
class RowInputs:
    """The files to read for the inputs of an operation."""

    by_name: dict[str, list[SourceFile]]
    """The files of each input; an imported input has a single file, of rollouts."""
    imported: dict[Path, ImportedFile] = field(default_factory=dict[Path, ImportedFile])
    """The temporary files of imported inputs, by path."""
    notes: list[str] = field(default_factory=list[str])
    """Notes on files of folders that were not read."""

    @property
    def refused(self) -> Iterator[RefusedLine]:
        """The rows of imported files that are not conversations."""
        return itertools.chain.from_iterable(file.refused() for file in self.imported.values())

    @property
    def files(self) -> list[SourceFile]:
        """The files of all inputs, each once."""
        files: dict[Path, SourceFile] = {}
        for file in itertools.chain.from_iterable(self.by_name.values()):
            files.setdefault(file.path.resolve(), file)
        return list(files.values())

    def rows(self, *, with_supervised: bool) -> Iterator[CuratedRow]:
        """Yields the rows of all files."""
        for file in self.files:
            yield from read_curated_rows(file.path, with_supervised=with_supervised)

    def records(self, read_files: Iterable[FileRecord]) -> list[FileRecord | ModelRecord]:
        """Returns the records of the files that were read, for a manifest.

        The record of a temporary file is replaced by those of the original files.
        """
        temporary = {home_path(path): file for path, file in self.imported.items()}
        return [
            record
            for file in read_files
            for record in (temporary[file.path].records if file.path in temporary else [file])
        ]

    def original_location(self, path: Path, line: int) -> tuple[str, int]:
        """Returns the file and the line of a row; for an imported row, those of the original."""
        imported = self.imported.get(path)
        original = None if imported is None else imported.locations[line - 1]
        return (str(path), line) if original is None else (str(original.path), original.line)


@contextmanager
def open_inputs(
    workspace: Workspace,
    names: Sequence[str],
    *,
    outputs: Sequence[Path],
    other_files: Sequence[Path] = (),
    with_supervised: bool = False,
) -> Generator[RowInputs]:
    """Yields the files of inputs, each of which is a file, a folder or a run id.

    Temporary files are next to the first output, and are deleted when the block ends. With
    `with_supervised`, files of supervised rows are read in place. Raises InputError for an input
    that does not exist, or if an output would replace an input, one of `other_files`, or rollouts
    that generate_rollouts wrote.
    """
    to_import = {name: files_to_import(workspace, name, with_supervised=with_supervised)
               for name in names}  # fmt: skip
    in_place = {name: source_files(workspace, name) for name in names if to_import[name] is None}
    inputs = [file.path for files in in_place.values() for file in files]
    inputs += [path for files in to_import.values() for path in files or ()]
    for output in outputs:
        check_output(output, [*inputs, *other_files])
    opened = RowInputs({})
    with ExitStack() as stack:
        for name in names:
            if (files := to_import[name]) is None:
                opened.by_name[name] = in_place[name]
                opened.notes.extend(unread_file_notes(workspace, name))
                continue
            try:
                imported = stack.enter_context(imported_file(workspace, [name], outputs[0]))
            except DataError:
                if not any(map(_may_have_stillroom_rows, files)):
                    raise
                opened.by_name[name] = source_files(workspace, name)
                continue
            opened.imported[imported.path] = imported
            result = imported.result
            opened.by_name[name] = [
                SourceFile(imported.path, name, result.refused_by_reason, result.problems)
            ]
        yield opened


def no_rows_error(files: str) -> DataError:
    """Returns the error for files without any row; `files` are their names."""
    return DataError(
        f"{files}: no rows, as the input is empty",
        "give files with rows; check that the program that writes them has finished",
    )


NEED_IMPORT = "need an import"
"""The words in a note on files of a folder that are not read without an import."""


def unread_file_notes(workspace: Workspace, name: str) -> list[str]:
    """Returns a note about a folder's files that only import_rollouts reads, if others are read."""
    path = workspace.path(name)
    try:
        sources = _import_sources(workspace, name) if path.is_dir() else None
    except OSError:
        sources = None  # Another file of the folder cannot be opened, and is not needed.
    if sources is None:
        return []
    read_files = set(_row_files(path))
    unread = [file for file in sources.files if file not in read_files or _is_json_list(file)]
    if not read_files or not unread:
        return []
    note = (
        f"{len(unread)} files in {fences.safe_name(name)} {NEED_IMPORT} and were not read: "
        f"{fences.safe_name(unread[0].name)}{', …' if len(unread) > 1 else ''}; a folder is "
        "imported only if all of its files need it: give these files as the input, or import them"
    )
    return [note]


@contextmanager
def open_rows(workspace: Workspace, name: str, *, output: Path) -> Generator[RowInputs]:
    """Yields the files with rows of any format at a path, prompts included.

    Files that only import_rollouts can read are imported into a temporary file next to `output`.
    """
    files = files_to_import_for_validation(workspace, name)
    if files is None:
        paths = rollout_files(workspace.existing(name, label="path"))
        yield RowInputs({name: [SourceFile(path, workspace.shown(path)) for path in paths]})
        return
    with imported_file(workspace, [name], output) as imported:
        yield RowInputs({name: [SourceFile(imported.path, name)]}, {imported.path: imported})


def data_files(workspace: Workspace, name: str) -> list[Path]:
    """Returns the files that `open_rows` reads for a path."""
    files = files_to_import_for_validation(workspace, name)
    return rollout_files(workspace.existing(name, label="file")) if files is None else files


@contextmanager
def imported_file(
    workspace: Workspace, names: Sequence[str], output: Path
) -> Generator[ImportedFile]:
    """Yields a temporary file next to an output, with the rollouts of other systems' files.

    `names` are the inputs. Raises DataError if they have no conversation.
    """
    # Imported here, so that the server does not load the readers before they are needed.
    from stillroom.importing.run import import_rollouts

    make_folder(output.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.imported-", dir=output.parent))
    try:
        path = folder / _ROLLOUTS
        request = ImportRollouts(input=tuple(names), output=str(path))
        # These operations have no option to interpret ratings, but older versions accepted them.
        result = import_rollouts(workspace, request, accepts_ratings=True)
        manifest = read_manifest(path)
        records = [] if manifest is None else [*manifest.inputs, *manifest.models]
        yield ImportedFile(path, records, result, workspace)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files_to_import(
    workspace: Workspace, name: str, *, with_supervised: bool = False
) -> list[Path] | None:
    """Returns the files of an input that only import_rollouts can read; None for any other input.

    All files of a folder are read in place if one of them can be.
    """
    path = workspace.path(name)
    if run_with_id(workspace, name) is not None:
        return None
    if path.exists() and any(
        _is_readable_in_place(file, with_supervised=with_supervised) for file in _row_files(path)
    ):
        return None
    sources = _import_sources(workspace, name)
    return None if sources is None else sources.files


def check_needs_no_import(workspace: Workspace, name: str) -> None:
    """Raises InputError for a file or folder that must be imported before it can be used."""
    if workspace.path(name).exists() and files_to_import(workspace, name) is not None:
        raise InputError(
            f"{name} holds rows of another system, which must be imported first",
            f"call import_rollouts(input={name}, output=rollouts/imported.jsonl), then give "
            "rollouts/imported.jsonl instead",
        )


def files_to_import_for_validation(workspace: Workspace, name: str) -> list[Path] | None:
    """Returns what `files_to_import` does, for calls that also accept prompts (validate, inspect).

    Returns None if the first rows could be prompts: if, apart from prompts, they could only be a
    table or OpenAI's fine-tuning format.
    """
    formats = set[RowFormat | None]()
    for file in _row_files(workspace.path(name)):
        formats |= set(map(detect_format, _first_rows(file)))
    if formats - {RowFormat.PROMPTS, None}:
        return None
    sources = _import_sources(workspace, name)
    if sources is None:
        return None
    may_be_prompts = any(
        source.format.read_columns or source.format.name == _MESSAGES_FORMAT
        for source in sources.formats
    )
    return None if formats - {None} and may_be_prompts else sources.files


def has_answers(workspace: Workspace, name: str) -> bool:
    """Returns whether an input is a folder, or has answers in any format: logs, pairs, rollouts.

    A table never counts as answers, whatever its columns are.
    """
    path = workspace.existing(name, label="input")
    if path.is_dir():
        return True
    formats = set(map(detect_format, _first_rows(path))) if path.suffix == ".jsonl" else set()
    if formats & {RowFormat.ROLLOUTS, RowFormat.SFT, RowFormat.DPO}:
        return True
    sources = _import_sources(workspace, name)
    return sources is not None and not any(
        source.format.read_columns or source.format.name == _MESSAGES_FORMAT
        for source in sources.formats
    )


def _is_json_list(file: Path) -> bool:
    """Returns whether a .json file holds a list of rows, which only import_rollouts reads."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as stream:
        return stream.read(256).lstrip().startswith(b"[")


def _import_sources(workspace: Workspace, name: str) -> "ImportSources | None":
    """Returns the files of an input by format; None if import_rollouts cannot read it."""
    # Imported here, so that the server does not load the readers before they are needed.
    from stillroom.importing.sources import group_by_format

    try:
        return group_by_format(workspace, ImportRollouts(input=name, output=""), outputs=())
    except EngineError:
        return None


def _row_files(path: Path) -> list[Path]:
    """Returns the files with rows at a path; none for a folder without .jsonl and .json files."""
    try:
        return rollout_files(path)
    except DataError:
        return []


def _first_rows(file: Path) -> Iterator[dict[str, Any]]:
    rows = map(decode_line, itertools.islice(read_row_lines(file), _NUM_FIRST_ROWS))
    return (row for row in rows if not isinstance(row, Problem))


def _is_readable_in_place(file: Path, *, with_supervised: bool) -> bool:
    """Returns whether curation can read, or wrote, one of the first rows of a file."""
    formats = (RowFormat.SFT, RowFormat.DPO) if with_supervised else ()
    return any(
        layout_of(row) is not None
        or any(row.get(name) is not None for name in _STILLROOM_IDS)
        or detect_format(row) in formats
        for row in _first_rows(file)
    )


def _may_have_stillroom_rows(file: Path) -> bool:
    """Returns whether a file has a row in one of Stillroom's formats, or only invalid JSON rows."""
    rows = list(_first_rows(file))
    is_broken = not rows and file.suffix in (".jsonl", ".json")
    return is_broken or any(detect_format(row) is not None for row in rows)
