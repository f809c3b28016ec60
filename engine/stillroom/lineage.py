"""Manifests: beside every output, what it was made from, how, and by which version."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from stillroom import __version__
from stillroom.files import LineWriter, file_sha256, write_json


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was when it was read or written."""

    path: str
    sha256: str
    num_bytes: int


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


def now() -> str:
    """Returns the current UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_file(path: Path, *, is_stopped: Callable[[], bool] = lambda: False) -> FileRecord:
    """Returns the path, SHA-256 and size of a file as it is now."""
    sha256 = file_sha256(path, is_stopped=is_stopped)
    return FileRecord(path=str(path), sha256=sha256, num_bytes=path.stat().st_size)


def _record_written(path: Path, written: LineWriter) -> FileRecord:
    return FileRecord(path=str(path), sha256=written.sha256, num_bytes=written.num_bytes)


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
    """Returns where the manifest of `output` is kept."""
    return output.with_name(output.name + ".manifest.json")


def write_manifest(
    output: Path,
    *,
    written: LineWriter | None = None,
    operation: str,
    inputs: Sequence[Path | FileRecord],
    request: Mapping[str, Any],
    counts: Mapping[str, int],
    run_id: str | None = None,
) -> Path:
    """Writes the manifest of a finished output file and returns its path.

    `written` is the closed writer of the output, which has hashed it already.
    """
    manifest = Manifest(
        operation=operation,
        output=_record_written(output, written) if written else record_file(output),
        inputs=[f if isinstance(f, FileRecord) else record_file(f) for f in inputs],
        request=dict(request),
        counts=dict(counts),
        run_id=run_id,
        stillroom_version=__version__,
        created_at=now(),
    )
    path = manifest_path(output)
    write_json(path, manifest)
    return path
