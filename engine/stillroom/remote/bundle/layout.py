"""The files of a run, and their paths ("places") on another machine.

The workspace becomes `workspace/`; any other file is put below `outside/` under its absolute path,
so that places are unique. Stillroom's own package is on the machine already.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import stillroom
from stillroom.errors import RunError
from stillroom.lineage import FOLDER_MANIFEST, folder_files, manifest_path, pending_manifest
from stillroom.remote.hash_cache import HashCache
from stillroom.remote.records import (
    PACKAGE,
    RUN_FILE,
    Blob,
    JobSpec,
    PathMapping,
    PlacedFile,
    SentFile,
)
from stillroom.run_folder import RunFolder
from stillroom.secrecy.keys import keys_file
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace
from stillroom.versions import FOLDER

_WORKSPACE, _OUTSIDE = "workspace", "outside"
_CONFIG = f"{_OUTSIDE}/~config"
"""The place of the folder with keys.yml; it cannot collide with that of a local path."""


class FileLayout:
    """Collects the files of a run, without duplicates, with their places on the other machine."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files: dict[str, str] = {}
        """The source of each file by its place."""
        package = Path(stillroom.__file__).resolve().parent
        self._roots = [(str(package), PACKAGE), (str(workspace.root), _WORKSPACE)]
        self._home = {**dict(self._roots), "~": str(Path.home())}

    @property
    def files(self) -> list[SentFile]:
        """The files that are sent."""
        return [SentFile(source=source, place=place) for place, source in self._files.items()]

    @property
    def home_paths(self) -> list[PathMapping]:
        """Maps local paths to their places; the first match counts."""
        return [PathMapping(home=home, place=place) for home, place in self._home.items()]

    def __contains__(self, path: Path) -> bool:
        return self._place(_normalized(path)) in self._files

    def add(self, path: Path, *, source: str | None = None) -> None:
        """Adds a file; if `source` is given, that file's content is sent instead.

        Raises InputError for a file that contains keys according to its name, such as `.env`.
        """
        check_readable(path)
        place = self._place(_normalized(path))
        if place.startswith(PACKAGE):
            return
        if place.startswith(f"{_OUTSIDE}/"):
            self._home.setdefault(_normalized(path), place)
        self._files.setdefault(place, source or str(path))

    def add_all(self, paths: Iterable[Path]) -> None:
        """Adds files, and all files of folders; skips paths that do not exist."""
        for path in paths:
            if path.is_dir():
                self.add_folder(path)
            elif path.is_file():
                self.add(path)

    def add_folder(self, folder: Path, *, most_bytes: int | None = None) -> None:
        """Adds a folder's files as listed by `lineage.folder_files`, and its manifest.

        Skips files larger than `most_bytes`. Raises InputError for a file that contains keys
        according to its name.
        """
        place = self._place(_normalized(folder))
        if place.startswith(PACKAGE):
            return
        if place.startswith(f"{_OUTSIDE}/"):
            self._home.setdefault(_normalized(folder), place)
        manifest = folder / FOLDER_MANIFEST
        for path in [*folder_files(folder), *([manifest] if manifest.is_file() else [])]:
            if most_bytes is None or path.stat().st_size <= most_bytes:
                check_readable(path)
                self._files.setdefault(f"{place}/{path.relative_to(folder).as_posix()}", str(path))

    def add_manifests(self, path: Path) -> None:
        """Adds the manifest of a file, or its pending manifest, if they exist."""
        if not path.is_dir():
            self.add_all([manifest_path(path), pending_manifest(path)])

    def add_keys_file(self) -> None:
        """Adds the user's keys.yml, which lists the hosts that each key may be sent to, no keys."""
        # Mapped even if there is none: the machine may have a home folder of this path that the run
        # may not read.
        self._home.setdefault(str(Path.home() / ".config" / "stillroom"), _CONFIG)
        if (path := keys_file()).is_file():
            self._files.setdefault(f"{_CONFIG}/{path.name}", str(path))

    def add_alias(self, name: str, path: Path) -> None:
        """Maps a path, as written in a request or in config.yml, to the place of `path`."""
        written = _normalized(self._workspace.root / Path(name).expanduser())
        if written != _normalized(path):
            self._home.setdefault(written, self._place(_normalized(path)))

    def relative(self, path: Path) -> str | None:
        """Returns the path of an output relative to the workspace; None if it is outside."""
        first, _, rest = self._place(_normalized(path)).partition("/")
        return rest if first == _WORKSPACE and rest else None

    def _place(self, path: str) -> str:
        for home, place in self._roots:
            if path == home:
                return place
            if path.startswith(home + "/"):
                rest = path.removeprefix(home + "/")
                return place + rest if place == PACKAGE else f"{place}/{rest}"
        return _OUTSIDE + path


def _normalized(path: Path) -> str:
    """Returns an absolute path without `..`; links are kept, as requests and records name them."""
    return os.path.normpath(path.absolute())


_CACHE = "hashes.json"


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a run's files, and the files' places on the other machine."""

    blobs: list[Blob]
    """The distinct contents."""
    files: list[PlacedFile]


def read_contents(
    run: RunFolder, spec: JobSpec, *, is_stopped: Callable[[], bool] = lambda: False
) -> Contents:
    """Hashes a run's files and returns their contents and places.

    Raises RunError if a file has changed since the run was started.
    """
    root = Path(run.read_request().workspace)
    known = HashCache(root / FOLDER / _CACHE)
    blobs, files = dict[str, Blob](), list[PlacedFile]()
    run.check_inputs()
    for sent in spec.files:
        path = _source_path(run, sent.source)
        try:
            stat = path.stat()
            sha256 = known.hash_of(path, is_stopped)
        except FileNotFoundError as error:
            raise RunError(
                f"{path} was deleted since this run was started",
                "restore the file, or start the run again without it",
            ) from error
        blob = Blob(sha256=sha256, num_bytes=stat.st_size, source=str(path))
        blobs.setdefault(sha256, blob)
        is_executable = bool(stat.st_mode & 0o100)
        files.append(PlacedFile(place=sent.place, sha256=sha256, is_executable=is_executable))
    run.check_inputs()
    known.save()
    return Contents(list(blobs.values()), files)


def _source_path(run: RunFolder, source: str) -> Path:
    if source.startswith(RUN_FILE):
        return run.path / source.removeprefix(RUN_FILE)
    return Path(source)
