"""Manifests: the files next to outputs that record inputs, models, request and version."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from stillroom import __version__
from stillroom.errors import DataError
from stillroom.files import LineWriter, file_sha256, read_json, write_json
from stillroom.home_paths import home_path, local_path

FOLDER_MANIFEST = "stillroom.manifest.json"
"""The name of a folder's manifest; it is in the folder, so copies of the folder have it too."""
MANIFEST_SUFFIX = ".manifest.json"
"""What the name of a file's manifest adds to the name of the file."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The path, hash and size of a file when it was read or written."""

    path: str
    """The path on the user's machine, even if another machine did the work."""
    sha256: str
    num_bytes: int

    @property
    def file(self) -> Path:
        """The path of the file on this machine."""
        return local_path(self.path)


class AnsweringModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answered the calls for some rows, as the endpoint reported it."""

    model: str
    rows: int
    """The number of output rows that it answered, alone or with other models."""
    fingerprints: list[str] = []
    """The first few system fingerprints that the endpoint reported."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a model as it was when it was used."""

    role: str
    """How it was used: `policy`, the `base` of an adapter that is the policy, `judge`, `student`,
    `critic`, `teacher`, an export's `checkpoint`, or `multimodal` for the model whose text part was
    used."""
    name: str
    """The name of the model in the request."""
    location: str
    """The model's folder, its hub id, or the endpoint that serves it."""
    sha256: str | None = None
    """The hash of the folder's files; None if the model is not in a local folder."""
    revision: str | None = None
    """The commit on the hub; None if unknown."""
    answered_by: list[AnsweringModel] = []
    """The models that answered under this name, as the endpoint reported; most frequent first."""
    terms: str | None = None
    """The URL of the provider's terms for using outputs; None if unknown."""

    @property
    def folder(self) -> Path | None:
        """The model's folder on this machine; None for a hub id or an endpoint."""
        return local_path(self.location) if Path(self.location).is_absolute() else None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A record of how one output was made."""

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
    """Files that were written with the output, e.g. the dropped rows with their reasons."""
    left_out: dict[str, int] = {}
    """The number of rows that the operation left out, by reason."""


def seconds_between(start: str, end: str) -> float | None:
    """Returns the seconds between two times from `now`; None if one of them is malformed."""
    try:
        difference = datetime.fromisoformat(end) - datetime.fromisoformat(start)
    except (ValueError, TypeError):
        return None
    return round(difference.total_seconds(), 3)


def now() -> str:
    """Returns the current UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_file(path: Path, *, hash_of: Callable[[Path], str] = file_sha256) -> FileRecord:
    """Returns the current path, SHA-256 and size of a file.

    hash_of: returns a file's SHA-256, e.g. from a cache.
    """
    sha256 = hash_of(path)
    return FileRecord(path=home_path(path), sha256=sha256, num_bytes=path.stat().st_size)


def record_folder(
    folder: Path, *, final: Path | None = None, hash_of: Callable[[Path], str] = file_sha256
) -> FileRecord:
    """Returns the current path, hash and size of a model's folder.

    final: the final path of the folder, if it still has a temporary name. hash_of: as for
    `record_file`.

    The hash is the SHA-256 of the output of `sha256sum` for its files, sorted by path.
    Hidden files and the folder's manifest are left out.
    """
    records = [
        (path.relative_to(folder), record_file(path, hash_of=hash_of))
        for path in folder_files(folder)
    ]
    return combine_records(
        final or folder,
        [msgspec.structs.replace(record, path=name.as_posix()) for name, record in records],
    )


def folder_files(folder: Path) -> list[Path]:
    """Returns the files of a model's folder, sorted, without hidden files and the manifest."""

    def is_listed(path: Path) -> bool:
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        return path.is_file() and not is_hidden and str(name) != FOLDER_MANIFEST

    return sorted(filter(is_listed, folder.rglob("*")))


def combine_records(folder: Path, files: Sequence[FileRecord]) -> FileRecord:
    """Returns the record of a folder from the records of its files, sorted by path."""
    sha256sum_lines = "".join(f"{file.sha256}  {file.path}\n" for file in files)
    return FileRecord(
        path=home_path(folder),
        sha256=hashlib.sha256(sha256sum_lines.encode()).hexdigest(),
        num_bytes=sum(file.num_bytes for file in files),
    )


def record_written(path: Path, writer: LineWriter) -> FileRecord:
    """Returns the record of a file from its writer, which has hashed it."""
    return FileRecord(path=home_path(path), sha256=writer.sha256, num_bytes=writer.num_bytes)


def _record_of(file: Path | FileRecord) -> FileRecord:
    """Returns a record unchanged; for a path, returns the record of the file as it is now."""
    return file if isinstance(file, FileRecord) else record_file(file)


def _record_beginning(path: Path) -> FileRecord:
    """Returns the record of the current bytes of a growing file."""
    num_bytes = bytes_left = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while bytes_left and (block := stream.read(min(bytes_left, 1 << 20))):
            digest.update(block)
            bytes_left -= len(block)
    sha256 = digest.hexdigest()
    return FileRecord(path=home_path(path), sha256=sha256, num_bytes=num_bytes - bytes_left)


def _size_and_mtime(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


class Recording:
    """Hashes input files in a thread while other code reads them."""

    def __init__(
        self,
        files: Sequence[Path],
        *,
        copies: Mapping[Path, Path] | None = None,
        may_grow: bool = False,
    ) -> None:
        """Starts hashing.

        copies: the copies to hash instead of some of the files, by file.
        may_grow: whether files may grow while they are read. Such a file is recorded with its
        content at the end of the read, and added to `grown`.
        """
        self._may_grow = may_grow
        self.grown: list[Path] = []
        self._thread = ThreadPoolExecutor(1)
        self._is_done = self._is_checked = False
        self._initial_stats = {
            file: _size_and_mtime(file) for file in files if file not in (copies or {})
        }
        self._files = list(dict.fromkeys(files))
        self._records = self._thread.submit(self._record, self._files, copies or {})

    def _record(self, files: list[Path], copies: Mapping[Path, Path]) -> list[FileRecord]:
        sources = {file: copies.get(file, file) for file in files}
        hash_of = partial(file_sha256, is_stopped=lambda: self._is_done)
        records = [record_file(file, hash_of=hash_of) for file in sources.values()]
        return [
            msgspec.structs.replace(record, path=home_path(file))
            for file, record in zip(sources, records, strict=True)
        ]

    def records(self) -> list[FileRecord]:
        """Returns the records of all files, once they are hashed.

        Call this after the files have been read. The first call raises DataError if a file has
        changed since the beginning, because it is then unknown which content was read.
        """
        records = self._records.result()
        if not self._is_checked:
            for file, (size, mtime_ns) in self._initial_stats.items():
                if _size_and_mtime(file) == (size, mtime_ns):
                    continue
                if not self._may_grow or file.stat().st_size < size:
                    raise DataError(
                        f"{file} changed while it was being read",
                        "repeat the call once no other program is writing to the file",
                    )
                self.grown.append(file)
            self._is_checked = True
        if self.grown:
            records = [
                _record_beginning(file) if file in self.grown else record
                for file, record in zip(self._files, records, strict=True)
            ]
        return records

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done = True
        self._thread.shutdown()


def manifest_path(output: Path) -> Path:
    """Returns the path of an output's manifest: next to a file, or inside a folder."""
    if output.is_dir():
        return output / FOLDER_MANIFEST
    return output.with_name(output.name + MANIFEST_SUFFIX)


def pending_manifest_path(output: Path) -> Path:
    """Returns the path of the new manifest of a file that is about to be replaced.

    After a crash it may still exist, and describes the files that were already replaced.
    """
    return output.with_name(f".{output.name}.new")


def read_manifest(output: Path) -> Manifest | None:
    """Returns the manifest of a file or folder; None if it has none.

    The output may have changed since its manifest was written.
    Raises DataError if the manifest is damaged.
    """
    pending = _read_manifest_file(pending_manifest_path(output))
    if pending is not None and matches_record(output, pending.output):
        return pending
    return _read_manifest_file(manifest_path(output))


def matches_record(path: Path, record: FileRecord) -> bool:
    """Returns whether a file has the size and SHA-256 of a record."""
    has_size = path.is_file() and path.stat().st_size == record.num_bytes
    return has_size and file_sha256(path) == record.sha256


def recorded_files(output: Path) -> list[FileRecord]:
    """Returns the records of an output and its side files from its manifests."""
    manifests = (
        _read_manifest_file(pending_manifest_path(output)),
        _read_manifest_file(manifest_path(output)),
    )
    return [r for manifest in manifests if manifest for r in (manifest.output, *manifest.side)]


def _read_manifest_file(path: Path) -> Manifest | None:
    try:
        return read_json(
            path, Manifest, fix="delete it; this loses the record of how the file was made"
        )
    except FileNotFoundError:
        return None


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

    written: the output's closed writer, or its record; None: the file is hashed now. side: files
    that were written with the output, such as the dropped rows.
    """
    if isinstance(written, LineWriter):
        written = record_written(output, written)
    manifest = Manifest(
        operation=operation,
        output=written or record_file(output),
        inputs=[_record_of(i) for i in inputs if not isinstance(i, ModelRecord)],
        request=dict(request),
        counts=dict(counts),
        run_id=run_id,
        stillroom_version=__version__,
        created_at=now(),
        models=[model for model in inputs if isinstance(model, ModelRecord)],
        side=[_record_of(file) for file in side],
    )
    path = manifest_path(output)
    write_json(path, manifest)
    return path
