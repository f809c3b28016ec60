"""Finds whether files and models have changed since they were used, by hashing them again."""

import hashlib
from pathlib import Path

from stillroom.files import file_sha256
from stillroom.lineage import FileRecord, ModelRecord, record_folder
from stillroom.trace.request import State

MAX_BYTES = 16 << 30
"""The most bytes to hash in one call, nearest files first; the rest is `unchecked`."""
_BLOCK = 4 << 20


class Checker:
    """Compares records with what is on disk now; each path and hash is compared only once."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._left = max_bytes
        self._known: dict[tuple[Path, str], State] = {}

    def file(self, record: FileRecord, path: Path) -> State:
        """Returns the state of a file, or of a model's folder, compared with its record."""
        key = (path, record.sha256)
        if key not in self._known:
            self._known[key] = self._compared(record, path)
        return self._known[key]

    def model(self, record: ModelRecord) -> State:
        """Returns the state of a model compared with its record.

        It is unchecked if the record has no hash, as for models on the hub or behind an endpoint.
        """
        folder = Path(record.location)
        if record.sha256 is None:
            return State.UNCHECKED
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        return self.file(
            FileRecord(path=record.location, sha256=record.sha256, num_bytes=size), folder
        )

    def _compared(self, record: FileRecord, path: Path) -> State:
        if not path.exists():
            return State.MISSING
        if record.num_bytes > self._left:
            return State.UNCHECKED
        if path.is_dir():
            self._left -= record.num_bytes
            is_same = record_folder(path).sha256 == record.sha256
            return State.SAME if is_same else State.CHANGED
        size = path.stat().st_size
        if size < record.num_bytes:
            return State.CHANGED
        self._left -= record.num_bytes
        if size == record.num_bytes:
            return State.SAME if file_sha256(path) == record.sha256 else State.CHANGED
        is_grown = _beginning_sha256(path, record.num_bytes) == record.sha256
        return State.GROWN if is_grown and record.num_bytes else State.CHANGED


def _beginning_sha256(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while num_bytes and (block := stream.read(min(_BLOCK, num_bytes))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()
