"""Opens the inputs of an operation on rollouts, whichever system wrote them.

Files of rows that curation knows are read where they are. All else that import_rollouts reads is
imported into a temporary file, which is then read in its place.
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
from stillroom.home_paths import as_recorded
from stillroom.importing.records import Place, imported_from
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.importing.tally import RefusedRow
from stillroom.lineage import FileRecord, ModelRecord, read_manifest
from stillroom.lines import read_lines
from stillroom.places import make_folder
from stillroom.rollout.sources import SourceFile, check_output, run_with_id, source_files
from stillroom.settings import Workspace

if TYPE_CHECKING:
    from stillroom.importing.sources import ImportSources

_LOOKED_AT = 20
"""If curation knows none of so many first rows of a file, another reader is looked for."""
_ROLLOUTS = "rollouts.jsonl"
_MESSAGES = "openai_fine_tuning"
"""The format of rows that have messages and little else, as rows of prompts do."""
_OUR_IDS = ("rollout_id", "chosen_id")
"""The fields that convert_rollouts and make_dpo_pairs write into each row."""


@dataclass(frozen=True)
class ImportedFile:
    """A temporary file with the rollouts of other systems' files."""

    path: Path
    originals: list[Path]
    records: list[FileRecord | ModelRecord]
    """The records of the original files, and of the models that answered in them."""
    result: ImportResult
    workspace: Workspace

    @cached_property
    def places(self) -> list[Place | None]:
        """The place of each rollout in the original files."""
        found = (imported_from(self.workspace, row.line.data) for row in self.rows())
        return [None if one is None else one.kept for one in found]

    def rows(self) -> Iterator[CuratedRow]:
        """Yields the rollouts."""
        return read_curated_rows(self.path, with_parts=True)

    def refused(self) -> Iterator[RefusedRow]:
        """Yields the rows of the original files that are no conversations."""
        for line in read_lines(self.path.with_name(f"{self.path.name}.refused")):
            yield msgspec.json.decode(line.data, type=RefusedRow)


@dataclass(frozen=True)
class RowInputs:
    """The files to read for the inputs of an operation."""

    by_name: dict[str, list[SourceFile]]
    """The files of each input; other systems' files are one file of rollouts."""
    imported: dict[Path, ImportedFile] = field(default_factory=dict[Path, ImportedFile])
    notes: list[str] = field(default_factory=list[str])
    """Notes on files of folders that were not read."""

    @property
    def refused(self) -> Iterator[RefusedRow]:
        """The rows of other systems' files that are no conversations."""
        return itertools.chain.from_iterable(one.refused() for one in self.imported.values())

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

    def records(self, read: Iterable[FileRecord]) -> list[FileRecord | ModelRecord]:
        """Returns the records of the files that were read, for a manifest.

        In place of a temporary file these are the records of what was imported to it.
        """
        temporary = {as_recorded(path): file for path, file in self.imported.items()}
        return [
            record
            for one in read
            for record in (temporary[one.path].records if one.path in temporary else [one])
        ]

    def place(self, path: Path, line: int) -> tuple[str, int]:
        """Returns the file and the line of a row, in the original file if it was imported."""
        imported = self.imported.get(path)
        place = None if imported is None else imported.places[line - 1]
        return (str(path), line) if place is None else (str(place.path), place.line)


@contextmanager
def open_inputs(
    workspace: Workspace,
    names: Sequence[str],
    *,
    outputs: Sequence[Path],
    others: Sequence[Path] = (),
    with_supervised: bool = False,
) -> Generator[RowInputs]:
    """Yields the files of inputs, each of which is a file, a folder or a run id.

    Temporary files are next to the first output, and are deleted when the block ends. Supervised
    rows are read where they are if `with_supervised` is true. Raises InputError for an input that
    is none of these, or if an output would replace an input, one of the `others`, or rollouts that
    generate_rollouts wrote.
    """
    foreign = {name: foreign_files(workspace, name, with_supervised=with_supervised)
               for name in names}  # fmt: skip
    own = {name: source_files(workspace, name) for name in names if foreign[name] is None}
    inputs = [file.path for files in own.values() for file in files]
    inputs += [path for files in foreign.values() for path in files or ()]
    for output in outputs:
        check_output(output, [*inputs, *others])
    opened = RowInputs({})
    with ExitStack() as stack:
        for name in names:
            if (files := foreign[name]) is None:
                opened.by_name[name] = own[name]
                opened.notes.extend(folder_notes(workspace, name))
                continue
            try:
                imported = stack.enter_context(imported_file(workspace, [name], files, outputs[0]))
            except DataError:
                if not any(map(_might_be_ours, files)):
                    raise
                opened.by_name[name] = source_files(workspace, name)
                continue
            opened.imported[imported.path] = imported
            result = imported.result
            opened.by_name[name] = [
                SourceFile(imported.path, name, result.refused_by_reason, result.problems)
            ]
        yield opened


def folder_notes(workspace: Workspace, name: str) -> list[str]:
    """Returns a note if a folder that is read where it is has files that only an import reads."""
    path = workspace.path(name)
    if not path.is_dir() or (sources := _sources_of(workspace, name)) is None:
        return []
    read = set(_row_files(path))
    left = [file for file in sources.files if file not in read]
    if not read or not left:
        return []
    note = (
        f"{len(left)} files in {fences.name(name)} were not read, as its other files need no "
        f"import: {fences.name(left[0].name)}{', …' if len(left) > 1 else ''}; name them as the "
        "input, or import them with import_rollouts"
    )
    return [note]


@contextmanager
def open_rows(workspace: Workspace, name: str, *, output: Path) -> Generator[RowInputs]:
    """Yields the files with rows of any format at a path, prompts included.

    Files that only import_rollouts can read are imported into a temporary file next to `output`.
    """
    files = foreign_files_to_validate(workspace, name)
    if files is None:
        found = rollout_files(workspace.existing(name, label="path"))
        yield RowInputs({name: [SourceFile(file, workspace.shown(file)) for file in found]})
        return
    with imported_file(workspace, [name], files, output) as imported:
        yield RowInputs({name: [SourceFile(imported.path, name)]}, {imported.path: imported})


def data_files(workspace: Workspace, name: str) -> list[Path]:
    """Returns the files that `open_rows` reads for a path."""
    files = foreign_files_to_validate(workspace, name)
    return rollout_files(workspace.existing(name, label="file")) if files is None else files


@contextmanager
def imported_file(
    workspace: Workspace, names: Sequence[str], files: Sequence[Path], output: Path
) -> Generator[ImportedFile]:
    """Yields a temporary file next to an output, with the rollouts of other systems' files.

    `files` are those that the names stand for. Raises DataError if they hold no conversation.
    """
    # Imported here, so that the server does not load the readers before they are needed.
    from stillroom.importing.run import import_rollouts

    make_folder(output.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.imported-", dir=output.parent))
    try:
        path = folder / _ROLLOUTS
        request = ImportRollouts(input=tuple(names), output=str(path))
        result = import_rollouts(workspace, request)
        manifest = read_manifest(path)
        records = [] if manifest is None else [*manifest.inputs, *manifest.models]
        yield ImportedFile(path, list(files), records, result, workspace)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def foreign_files(
    workspace: Workspace, name: str, *, with_supervised: bool = False
) -> list[Path] | None:
    """Returns the files of an input that only import_rollouts can read; None for any other input.

    The files of a folder are read by one or the other: where they are, if one of them can be.
    """
    path = workspace.path(name)
    if run_with_id(workspace, name) is not None:
        return None
    if path.exists() and any(
        _can_be_read(file, with_supervised=with_supervised) for file in _row_files(path)
    ):
        return None
    sources = _sources_of(workspace, name)
    return None if sources is None else sources.files


def refuse_foreign(workspace: Workspace, name: str) -> None:
    """Raises InputError for a file or folder that must be imported before it can be used."""
    if workspace.path(name).exists() and foreign_files(workspace, name) is not None:
        raise InputError(
            f"{name} holds rows of another system, which must be imported first",
            f"import_rollouts(input={name}, output=rollouts/imported.jsonl), then give that file",
        )


def foreign_files_to_validate(workspace: Workspace, name: str) -> list[Path] | None:
    """Returns the files of a path that only import_rollouts can read; None for any other path.

    A row that might be a prompt is one, unless it has all that a certain system writes.
    """
    formats = set[RowFormat | None]()
    for file in _row_files(workspace.path(name)):
        formats |= set(map(detect_format, _first_rows(file)))
    if formats - {RowFormat.PROMPTS, None}:
        return None
    sources = _sources_of(workspace, name)
    if sources is None:
        return None
    might_be_prompts = any(
        one.format.read_columns or one.format.name == _MESSAGES for one in sources.formats
    )
    return None if formats - {None} and might_be_prompts else sources.files


def _sources_of(workspace: Workspace, name: str) -> "ImportSources | None":
    # Imported here, so that the server does not load the readers before they are needed.
    from stillroom.importing.sources import group_by_format

    try:
        return group_by_format(workspace, ImportRollouts(input=name, output=""), outputs=())
    except EngineError:
        return None


def _row_files(path: Path) -> list[Path]:
    """Returns the files with rows at a path; none of a folder without .jsonl and .json."""
    try:
        return rollout_files(path)
    except DataError:
        return []


def _first_rows(file: Path) -> Iterator[dict[str, Any]]:
    rows = map(decode_line, itertools.islice(read_row_lines(file), _LOOKED_AT))
    return (row for row in rows if not isinstance(row, Problem))


def _can_be_read(file: Path, *, with_supervised: bool) -> bool:
    """Returns whether one of the first rows of a file is one that curation knows, or wrote."""
    known = (RowFormat.SFT, RowFormat.DPO) if with_supervised else ()
    return any(
        layout_of(row) is not None
        or any(row.get(name) is not None for name in _OUR_IDS)
        or detect_format(row) in known
        for row in _first_rows(file)
    )


def _might_be_ours(file: Path) -> bool:
    """Returns whether a file has a row of one of our formats, or JSON rows that are all broken."""
    rows = list(_first_rows(file))
    is_broken = not rows and file.suffix in (".jsonl", ".json")
    return is_broken or any(detect_format(row) is not None for row in rows)
