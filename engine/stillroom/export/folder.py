"""The output folder of an export: written completely or not at all, never over a user's files."""

import math
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from stillroom import bounds
from stillroom.errors import InputError
from stillroom.files import FileLock, file_sha256, wait_for_disk
from stillroom.lineage import FOLDER_MANIFEST, FileRecord
from stillroom.models.precision import Precision
from stillroom.outputs import output_lock
from stillroom.places import make_folder, rename_folder
from stillroom.run_folder import OWNER_LOCK

MANIFEST = "export.json"
# Larger files are compared only by size; files that people edit are small.
_MAX_HASHED_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20


class ExportManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of export.json: the origin of the export, and all its files."""

    format: str
    request: dict[str, Any]
    run_id: str | None
    """The training run; None for a checkpoint that Stillroom did not write."""
    method: str | None
    step: int | None
    base_model: str
    precision: str
    files: list[FileRecord]
    """The files with paths relative to the folder, without the manifests."""
    stillroom_version: str
    created_at: str


def read_export(folder: Path) -> ExportManifest | None:
    """Returns the manifest of an export, or None if the folder is not an export."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=ExportManifest)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def record_files(folder: Path) -> list[FileRecord]:
    """Syncs all files of a folder to the disk, and returns their names, sizes and SHA-256."""
    records: list[FileRecord] = []
    for path in _files(folder):
        # safetensors creates files that only their owner can read.
        path.chmod(0o644)
        wait_for_disk(path)
        name = path.relative_to(folder).as_posix()
        records.append(
            FileRecord(path=name, sha256=file_sha256(path), num_bytes=path.stat().st_size)
        )
    return records


def check_output(folder: Path, *, overwrite: bool = False) -> None:
    """Raises InputError unless the folder is new, empty, or an unchanged export.

    With `overwrite`, the export may have been changed. Other folders are never replaced.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    manifest = read_export(folder) if folder.is_dir() else None
    if manifest is None:
        raise InputError(f"output {str(folder)!r} exists and is not an export", "give a new folder")
    if not overwrite and (changed_files := _changed_files(folder, manifest)):
        listing = ", ".join(changed_files[:4]) + (", …" if len(changed_files) > 4 else "")
        raise InputError(
            f"output {str(folder)!r} has files added or changed since the export: {listing}",
            "move them elsewhere, give another folder, or set overwrite: true (--overwrite)",
        )


def _changed_files(folder: Path, manifest: ExportManifest) -> Sequence[str]:
    """Returns the names of files that were added or changed after the export."""
    records = {record.path: record for record in manifest.files}
    files = [(path, path.relative_to(folder).as_posix()) for path in _files(folder)]
    manifests = (MANIFEST, FOLDER_MANIFEST)
    return [n for path, n in files if n not in manifests and not _is_same(path, records.get(n))]


def _is_same(path: Path, record: FileRecord | None) -> bool:
    if record is None or path.stat().st_size != record.num_bytes:
        return False
    return record.num_bytes > _MAX_HASHED_BYTES or file_sha256(path) == record.sha256


def require_space(output: Path, num_bytes: int) -> None:
    """Raises InputError if the disk does not have enough space for an export of this size."""
    parent = next(parent for parent in output.parents if parent.is_dir())
    free, needed = shutil.disk_usage(parent).free, num_bytes + _SPARE_BYTES
    if free < needed:
        raise InputError(
            f"the export needs about {needed / 1e9:.1f} GB, but {parent} has {free / 1e9:.1f} GB "
            "free",
            "free up disk space, or choose an output on another disk; if the weights are fp32, "
            "precision bf16 halves their size",
        )


@contextmanager
def export_folder(output: Path, *, run: Path, overwrite: bool = False) -> Generator[Path]:
    """Yields a new folder that becomes `output` if the block raises no error.

    An existing export is replaced. run: the folder of the run that writes the export. Partial
    folders of killed runs are removed.
    Raises InputError if another process is writing the output.
    """
    with output_lock(output, "export_model", run_id=run.name):
        _clean_up(output, run)
        yield from _new_folder(output, run, overwrite=overwrite)


def _new_folder(output: Path, run: Path, *, overwrite: bool) -> Generator[Path]:
    """Yields a temporary folder, and renames it to `output` once the block ends."""
    partial = output.with_name(f".{output.name}.partial-{run.name}")
    try:
        make_folder(partial)
        yield partial
        for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            wait_for_disk(folder)
        # The output may have been changed while the export was written.
        check_output(output, overwrite=overwrite)
        put_in_place(partial, output, aside=output.with_name(f".{output.name}.replaced-{run.name}"))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put_in_place(partial: Path, output: Path, *, aside: Path) -> None:
    """Renames a complete folder to `output`.

    An older output is renamed to `aside` first, and then deleted, or restored on failure.
    """
    if output.exists():
        rename_folder(output, aside)
    try:
        rename_folder(partial, output)
    except BaseException:
        if aside.exists():
            aside.rename(output)
        raise
    wait_for_disk(output.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _clean_up(output: Path, run: Path) -> None:
    """Cleans up after killed runs: restores an export moved aside, deletes a partial one."""
    for kind in ("replaced", "partial"):
        prefix = f".{output.name}.{kind}-"
        for leftover in list(output.parent.iterdir()):
            name = leftover.name
            if not name.startswith(prefix) or _is_alive(run.with_name(name.removeprefix(prefix))):
                continue
            if kind == "replaced" and not output.exists():
                leftover.rename(output)
            else:
                shutil.rmtree(leftover)


def _is_alive(run: Path) -> bool:
    """Returns whether the process of a run still holds the run's lock."""
    lock = FileLock(run / OWNER_LOCK)
    if not run.is_dir():
        return False
    if not lock.try_acquire():
        return True
    lock.release()
    return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = bounds.TENSOR_HEADER.limit
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_PRECISION_BITS = {"fp32": 32, "bf16": 16}


class TensorFileError(Exception):
    """A folder's safetensors files cannot be read."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def stored_bytes(folder: Path, precision: Precision) -> int:
    """Returns the size in bytes of a folder's tensors when written in a precision.

    Raises TensorFileError if there are no tensors, or a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TensorFileError(f"{folder} has no .safetensors file")
    return sum(_bytes_of(t, precision) for file in files for t in read_header(file).values())


def read_header(file: Path) -> dict[str, _Tensor]:
    """Returns a safetensors file's tensors by name. Raises TensorFileError if it is damaged."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise TensorFileError(
                f"{file} is damaged: it gives a header length of {length} bytes, more than the "
                f"file's size or the limit of {bounds.TENSOR_HEADER.size}"
            )
        header = stream.read(length)
    try:
        raw: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        raw.pop("__metadata__", None)
        tensors = msgspec.convert(raw, dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TensorFileError(f"{file} is damaged: {error}") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if _LENGTH_BYTES + length + end != size:
        raise TensorFileError(
            f"{file} is damaged: it has {size} bytes, but its header describes "
            f"{_LENGTH_BYTES + length + end}"
        )
    return tensors


def _bytes_of(tensor: _Tensor, precision: Precision) -> int:
    """Returns the size of a tensor when written in a precision."""
    start, end = tensor.data_offsets
    if precision == "auto" or tensor.dtype not in _BITS:
        return end - start
    return math.prod(tensor.shape) * _PRECISION_BITS[precision] // 8
