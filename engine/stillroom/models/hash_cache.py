"""A cache of file hashes: a file that has not changed is not hashed again."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from stillroom.errors import DataError, EngineError
from stillroom.files import file_sha256, read_json, write_json
from stillroom.versions import FOLDER

_MAX_CACHED = 50_000


class _CachedHash(msgspec.Struct, frozen=True, array_like=True):
    """The hash of a file, and the file's stamp when it was hashed."""

    stamp: str
    sha256: str


class HashCache:
    """The SHA-256 of files by path, stored in a JSON file."""

    def __init__(self, path: Path, *, settled_after_s: float = 2.0) -> None:
        """settled_after_s: the hash of a file that changed more recently is not cached, since it
        may change again within the resolution of its modification time.
        """
        self._path, self._settled_after_s = path, settled_after_s
        self._entries: dict[str, _CachedHash] = {}
        self._is_modified = False
        # A cache that cannot be read is rebuilt.
        with suppress(OSError, DataError):
            self._entries = read_json(path, dict[str, _CachedHash])

    def hash_of(self, path: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
        """Returns the SHA-256 of a file, which is read only if it may have changed.

        Once `is_stopped`, returns early with an invalid hash that is not cached.
        """
        stamp = _stamp(path)
        cached = self._entries.pop(str(path), None)
        if cached is None or cached.stamp != stamp:
            # Judged before the file is read, which may take longer than a file takes to settle.
            is_settled = self._is_settled(path)
            cached = _CachedHash(stamp, file_sha256(path, is_stopped=is_stopped))
            if is_stopped() or _stamp(path) != stamp or not is_settled:
                return cached.sha256
            self._is_modified = True
        # Ordered by last use, so that the least recently used are dropped.
        self._entries[str(path)] = cached
        return cached.sha256

    @classmethod
    def of_workspace(cls, root: Path) -> Self:
        """Returns the cache of the workspace at `root`, which all its runs share."""
        return cls(root / FOLDER / "hashes.json")

    def save(self) -> None:
        """Writes the cache; does nothing if it cannot be written."""
        if self._is_modified:
            newest = dict(list(self._entries.items())[-_MAX_CACHED:])
            with suppress(OSError, EngineError):
                write_json(self._path, newest, durable=False)
                self._is_modified = False

    def _is_settled(self, path: Path) -> bool:
        stat = path.stat()
        changed_s = max(stat.st_mtime_ns, stat.st_ctime_ns) / 1e9
        return abs(time.time() - changed_s) >= self._settled_after_s


def _stamp(path: Path) -> str:
    """Returns a string that changes when the file is written or replaced."""
    stat = path.stat()
    return f"{stat.st_size}.{stat.st_mtime_ns}.{stat.st_ctime_ns}.{stat.st_ino}.{stat.st_dev}"
