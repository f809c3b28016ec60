"""Manifests: beside every output, what it was made from, how, and by which version."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from stillroom import __version__
from stillroom.errors import DataError
from stillroom.files import LineWriter, file_sha256, write_json

FOLDER_MANIFEST = "stillroom.manifest.json"
"""Of a folder, inside it: a copy of the folder keeps it."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was when it was read or written."""

    path: str
    sha256: str
    num_bytes: int


class AnsweringModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that an endpoint says has answered."""

    model: str
    rows: int
    """Rows of the output in which it has."""
    fingerprints: list[str] = []
    """How it was served, as far as that is said: the first ones."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was when it was used."""

    role: str
    """What it did: `policy`, `student`, `teacher`; `checkpoint` of an export."""
    name: str
    """As it was asked for."""
    location: str
    """Its folder, hub id, or the endpoint that serves it."""
    sha256: str | None = None
    """Of a folder's files; None of what is elsewhere."""
    revision: str | None = None
    """The hub's commit, where it is known."""
    answered_by: list[AnsweringModel] = []
    """What the endpoint says has answered in its name."""
    terms: str | None = None
    """Where its provider says what its outputs may be used for."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """How one output came to be."""

    operation: str
    output: FileRecord
    inputs: list[FileRecord]
    request: dict[str, Any]
    counts: dict[str, int]
    run_id: str | None
    stillroom_version: str
    created_at: str
    models: list[ModelRecord] = []
    side: list[FileRecord] = []
    """Files written with the output: what was dropped, and why."""


def now() -> str:
    """Returns the current UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_file(path: Path, *, is_stopped: Callable[[], bool] = lambda: False) -> FileRecord:
    """Returns the path, SHA-256 and size of a file as it is now."""
    sha256 = file_sha256(path, is_stopped=is_stopped)
    return FileRecord(path=str(path), sha256=sha256, num_bytes=path.stat().st_size)


def record_folder(folder: Path) -> FileRecord:
    """Returns the path, hash and size of a model's folder as it is now.

    The hash is that of what `sha256sum` prints of its files, in the order of their names.
    """
    files: list[FileRecord] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != FOLDER_MANIFEST and not any(part.startswith(".") for part in name.split("/")):
            record = record_file(path)
            files.append(FileRecord(path=name, sha256=record.sha256, num_bytes=record.num_bytes))
    return folder_record(folder, files)


def folder_record(folder: Path, files: Sequence[FileRecord]) -> FileRecord:
    """Returns the record of a folder from those of its files, in the order of their paths."""
    listed = "".join(f"{file.sha256}  {file.path}\n" for file in files)
    return FileRecord(
        path=str(folder),
        sha256=hashlib.sha256(listed.encode()).hexdigest(),
        num_bytes=sum(file.num_bytes for file in files),
    )


def record_written(path: Path, written: LineWriter) -> FileRecord:
    """Returns the record of a file from its closed writer, which has hashed it already."""
    return FileRecord(path=str(path), sha256=written.sha256, num_bytes=written.num_bytes)


def _recorded(file: Path | FileRecord) -> FileRecord:
    return file if isinstance(file, FileRecord) else record_file(file)


class Recording:
    """Records files in a thread of its own, while they are read for something else."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._is_over = False
        self._records = self._thread.submit(self._record, list(files))

    def _record(self, files: list[Path]) -> list[FileRecord]:
        return [record_file(file, is_stopped=lambda: self._is_over) for file in files]

    def records(self) -> list[FileRecord]:
        """Waits for the hashes, and returns the files with them."""
        return self._records.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.shutdown()


def manifest_path(output: Path) -> Path:
    """Returns where the manifest of `output` is kept: beside a file, inside a folder."""
    if output.is_dir():
        return output / FOLDER_MANIFEST
    return output.with_name(output.name + ".manifest.json")


def read_manifest(output: Path) -> Manifest | None:
    """Returns the manifest of a file or folder, whether or not it is still about its content."""
    path = manifest_path(output)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} is damaged: {error}", "delete it; what it said about the file is lost"
        ) from error


def write_manifest(
    output: Path,
    *,
    written: LineWriter | FileRecord | None = None,
    operation: str,
    inputs: Sequence[Path | FileRecord | ModelRecord],
    request: Mapping[str, Any],
    counts: Mapping[str, int],
    run_id: str | None = None,
    side: Sequence[Path | FileRecord] = (),
) -> Path:
    """Writes the manifest of a finished output and returns its path.

    `written` is the closed writer of the output, which has hashed it already, or its record.
    """
    if isinstance(written, LineWriter):
        written = record_written(output, written)
    manifest = Manifest(
        operation=operation,
        output=written or record_file(output),
        inputs=[_recorded(i) for i in inputs if not isinstance(i, ModelRecord)],
        request=dict(request),
        counts=dict(counts),
        run_id=run_id,
        stillroom_version=__version__,
        created_at=now(),
        models=[model for model in inputs if isinstance(model, ModelRecord)],
        side=[_recorded(file) for file in side],
    )
    path = manifest_path(output)
    write_json(path, manifest)
    return path
