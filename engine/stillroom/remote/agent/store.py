"""The store of blobs that were sent to this machine: one file per blob, named by its SHA-256.

A blob is received into `.HASH.partial-sent`, where the next connection resumes, and is renamed once
its hash has been verified. Two senders may write the same blob concurrently without waiting for
each other, since both write the same bytes to the same offsets.

Blobs that no run uses are deleted when they are old, or when the disk runs out of space. The
sender still has them, and sends them again when they are needed.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stillroom.files import file_sha256, partial_name, wait_for_disk
from stillroom.places import add_path_to_errors
from stillroom.remote.frames import BrokenStreamError
from stillroom.remote.records import Piece, PieceStored

_NEVER_EDITED = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".zst", ".parquet"})
"""Suffixes of files that are never edited in place, unlike e.g. a tool's database."""
_MIN_LINKED_BYTES = 1 << 20
_MAX_UNUSED_S = 14 * 86400.0
_MIN_AGE_S = 86400.0
"""The minimum age for deletion; blobs that a run uses have a second hard link and are kept too."""
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class AgentFolder:
    """The folder with all of Stillroom's files on this machine."""

    root: Path

    @property
    def store(self) -> Path:
        """The folder with the blobs, each in a file named by its SHA-256."""
        return self.root / "store"

    @property
    def cache(self) -> Path:
        """The folder with what runs make once for all later ones, such as converted models."""
        return self.root / "cache"

    @property
    def runs(self) -> Path:
        """The folder with one folder for each run."""
        return self.root / "runs"


def have(agent: AgentFolder, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The command `have`: yields how many bytes were received of each incomplete blob, by hash.

    sizes: the sizes of the blobs that a run needs, by hash. Frees disk space for what is missing.
    """
    missing = {
        sha256: _num_received(agent, sha256, num_bytes)
        for sha256, num_bytes in sizes.items()
        if not _is_stored(agent, sha256, num_bytes)
    }
    if sizes and agent.store.is_dir():
        for sha256 in sizes:
            touch_blob(blob_file(agent, sha256))
        num_bytes = sum(sizes[sha256] - received for sha256, received in missing.items())
        keep = {name for sha256 in sizes for name in (sha256, _partial_file(agent, sha256).name)}
        make_room(agent.store, num_bytes, keep=keep, now_s=time.time())
    yield missing


def put(agent: AgentFolder, piece: Piece) -> Iterator[PieceStored]:
    """The command `put`: writes a piece of a blob, and replies to the blob's last piece."""
    _make_private(agent.root)
    _make_private(agent.store)
    if not _is_stored(agent, piece.sha256, piece.num_bytes):
        _write(_partial_file(agent, piece.sha256), piece)
    if piece.offset + len(piece.data) >= piece.num_bytes:
        is_stored = _finish(agent, piece.sha256, piece.num_bytes)
        yield PieceStored(sha256=piece.sha256, is_stored=is_stored)


def blob_file(agent: AgentFolder, sha256: str) -> Path:
    """Returns the path of a blob, which may not be stored yet."""
    return agent.store / sha256


def place_file(
    agent: AgentFolder, sha256: str, target: Path, *, is_executable: bool = False
) -> None:
    """Places a blob at a path of a run, which must not exist.

    Weights are hard-linked; files that a program may edit in place are copied.
    """
    source = blob_file(agent, sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    is_large = source.stat().st_size >= _MIN_LINKED_BYTES
    if is_large and target.suffix in _NEVER_EDITED and not is_executable:
        with suppress(OSError):  # A different file system, or one without hard links.
            os.link(source, target)
            return
    with add_path_to_errors(target):
        shutil.copyfile(source, target)
    target.chmod(0o700 if is_executable else 0o600)


def store_output(agent: AgentFolder, path: Path, sha256: str) -> None:
    """Hard-links a finished file of a run into the store, for later runs that read it."""
    _make_private(agent.store)
    if path.suffix in _NEVER_EDITED and not blob_file(agent, sha256).exists():
        with suppress(OSError):  # Without it, later runs upload the file.
            os.link(path, blob_file(agent, sha256))


def touch_blob(path: Path) -> None:
    """Records the use of a blob by updating its ctime.

    Its mtime is kept, because runs that link to the file recognise it by that.
    """
    with suppress(FileNotFoundError):
        path.chmod(path.stat().st_mode & 0o777)


def make_room(store: Path, num_bytes: int, *, keep: Collection[str], now_s: float) -> list[str]:
    """Deletes blobs that were unused for 14 days, and more if needed until `num_bytes` fit.

    keep: names that are never deleted. Returns the names of deleted blobs.
    """
    free_bytes = shutil.disk_usage(store).free - _SPARE_BYTES
    deleted: list[str] = []
    for last_used, size, name in _unused_blobs(store, keep):
        age_s = now_s - last_used
        if age_s < _MIN_AGE_S or (age_s < _MAX_UNUSED_S and free_bytes >= num_bytes):
            break
        with suppress(FileNotFoundError):
            (store / name).unlink()
            free_bytes += size
            deleted.append(name)
    return deleted


def _unused_blobs(store: Path, keep: Collection[str]) -> list[tuple[float, int, str]]:
    """Returns the blobs that no run links to, least recently used first."""
    blobs: list[tuple[float, int, str]] = []
    for path in store.iterdir():
        with suppress(FileNotFoundError):
            state = path.lstat()
            if path.name not in keep and state.st_nlink == 1:
                blobs.append((state.st_ctime, state.st_size, path.name))
    return sorted(blobs)


def _make_private(folder: Path) -> None:
    """Creates a folder that other users of the machine cannot read."""
    with add_path_to_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_stored(agent: AgentFolder, sha256: str, num_bytes: int) -> bool:
    return _size(blob_file(agent, sha256)) == num_bytes


def _partial_file(agent: AgentFolder, sha256: str) -> Path:
    return agent.store / partial_name(sha256, "sent")


def _num_received(agent: AgentFolder, sha256: str, num_bytes: int) -> int:
    """Returns how many bytes of a blob have been received.

    0 if its partial file is too long, so that the upload starts over.
    """
    size = _size(_partial_file(agent, sha256)) or 0
    return size if size <= num_bytes else 0


def _write(partial: Path, piece: Piece) -> None:
    """Writes a piece of a blob to the blob's partial file."""
    with add_path_to_errors(partial):
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb", buffering=0) as stream:
            size = os.fstat(handle).st_size
            if size < piece.offset:
                # The partial file was deleted since; writing here would leave a permanent gap.
                raise BrokenStreamError(f"{partial} was deleted or truncated during the upload")
            if piece.offset == 0 and size > piece.num_bytes:
                stream.truncate(0)
            unwritten = memoryview(piece.data)
            stream.seek(piece.offset)
            while unwritten:
                unwritten = unwritten[stream.write(unwritten) :]


def _finish(agent: AgentFolder, sha256: str, num_bytes: int) -> bool:
    """Renames a blob if its hash is right, else deletes it; returns whether it is stored."""
    partial = _partial_file(agent, sha256)
    with add_path_to_errors(partial), suppress(FileNotFoundError):  # Another sender was first.
        if partial.stat().st_size == num_bytes and file_sha256(partial) == sha256:
            wait_for_disk(partial)
            partial.replace(blob_file(agent, sha256))
        else:
            partial.unlink()
    return _is_stored(agent, sha256, num_bytes)
