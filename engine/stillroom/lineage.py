"""Manifests: beside every output, what it was made from, how, and by which version."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from stillroom import __version__
from stillroom.files import file_sha256, write_json


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


def record_file(path: Path) -> FileRecord:
    """Returns the path, SHA-256 and size of a file as it is now."""
    return FileRecord(path=str(path), sha256=file_sha256(path), num_bytes=path.stat().st_size)


def manifest_path(output: Path) -> Path:
    """Returns where the manifest of `output` is kept."""
    return output.with_name(output.name + ".manifest.json")


def write_manifest(
    output: Path,
    *,
    operation: str,
    inputs: Sequence[Path],
    request: Mapping[str, Any],
    counts: Mapping[str, int],
    run_id: str | None = None,
) -> Path:
    """Writes the manifest of a finished output file and returns its path."""
    manifest = Manifest(
        operation=operation,
        output=record_file(output),
        inputs=[record_file(path) for path in inputs],
        request=dict(request),
        counts=dict(counts),
        run_id=run_id,
        stillroom_version=__version__,
        created_at=now(),
    )
    path = manifest_path(output)
    write_json(path, manifest)
    return path
