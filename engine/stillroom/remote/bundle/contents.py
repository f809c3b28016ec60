"""The contents that a run is sent, by their hashes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import RunError
from stillroom.remote.hash_cache import HashCache
from stillroom.remote.records import RUN_FILE, Blob, JobSpec, PlacedFile
from stillroom.run_folder import RunFolder
from stillroom.versions import FOLDER

_CACHE = "hashes.json"


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
    known = HashCache(root / FOLDER / _CACHE)
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
