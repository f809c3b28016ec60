"""The contents that a run is sent, by their hashes; what has not changed is not hashed again."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.errors import DataError, EngineError, RunError
from stillroom.files import file_sha256, read_json, write_json
from stillroom.remote.records import (
    RUN_FILE,
    Blob,
    JobSpec,
    PlacedFile,
)
from stillroom.run_folder import RunFolder
from stillroom.versions import FOLDER

_CACHE = "hashes.json"
_MOST_KNOWN = 50_000
_SETTLED_AFTER_S = 2.0
"""A file that changed more recently may change again without another time of change."""


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """The hash of a file that had this stamp."""

    stamp: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files of a job hold, and where each lies on the other machine."""

    blobs: list[Blob]
    """Each content once."""
    files: list[PlacedFile]


def read_contents(
    run: RunFolder, spec: JobSpec, *, is_stopped: Callable[[], bool] = lambda: False
) -> Contents:
    """Returns the contents of a run's files as they are now.

    Raises RunError if one of them has changed since the run was started.
    """
    root = Path(run.read_request().workspace)
    known = KnownHashes(root / FOLDER / _CACHE)
    blobs, files = dict[str, Blob](), list[PlacedFile]()
    run.check_inputs()
    for sent in spec.files:
        path = _source(run, sent.source)
        try:
            stat = path.stat()
            sha256 = known.hash_of(path, is_stopped)
        except FileNotFoundError as error:
            raise RunError(
                f"{path} is gone since this run was started",
                "put it back, or start the run again without it",
            ) from error
        blob = Blob(sha256=sha256, num_bytes=stat.st_size, source=str(path))
        blobs.setdefault(sha256, blob)
        is_executable = bool(stat.st_mode & 0o100)
        files.append(PlacedFile(place=sent.place, sha256=sha256, is_executable=is_executable))
    run.check_inputs()
    known.save()
    return Contents(list(blobs.values()), files)


def _source(run: RunFolder, source: str) -> Path:
    if source.startswith(RUN_FILE):
        return run.path / source.removeprefix(RUN_FILE)
    return Path(source)


class KnownHashes:
    """The hashes of files by their paths, kept in the workspace between runs."""

    def __init__(self, path: Path, *, settled_after_s: float = _SETTLED_AFTER_S) -> None:
        self._path, self._settled_after_s = path, settled_after_s
        self._known: dict[str, _Known] = {}
        self._has_news = False
        # One that cannot be read is made anew.
        with suppress(OSError, DataError):
            self._known = read_json(path, dict[str, _Known])

    def hash_of(self, path: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
        """Returns the SHA-256 of a file, from its content only if that may have changed."""
        stamp = _stamp(path)
        known = self._known.pop(str(path), None)
        if known is None or known.stamp != stamp:
            known = _Known(stamp, file_sha256(path, is_stopped=is_stopped))
            self._has_news = True
            if _stamp(path) != stamp or not self._is_settled(path):
                return known.sha256
        # The last used are last, and kept.
        self._known[str(path)] = known
        return known.sha256

    def _is_settled(self, path: Path) -> bool:
        stat = path.stat()
        changed_s = max(stat.st_mtime_ns, stat.st_ctime_ns) / 1e9
        return abs(time.time() - changed_s) >= self._settled_after_s

    def save(self) -> None:
        """Writes the hashes, unless they cannot be written: the next run makes them anew."""
        if not self._has_news:
            return
        kept = dict(list(self._known.items())[-_MOST_KNOWN:])
        try:
            write_json(self._path, kept, durable=False)
        except (OSError, EngineError):
            return


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size}.{stat.st_mtime_ns}.{stat.st_ctime_ns}.{stat.st_ino}.{stat.st_dev}"
