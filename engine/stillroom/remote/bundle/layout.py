"""The files of a run, and their paths on another machine.

The workspace becomes `workspace/`; any other file is put below `outside/` under its absolute path,
so that remote paths are unique. Stillroom's own package is on the machine already.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import stillroom
from stillroom.errors import RunError
from stillroom.lineage import FOLDER_MANIFEST, folder_files, manifest_path, pending_manifest_path
from stillroom.models.hash_cache import HashCache
from stillroom.remote.records import (
    PACKAGE_PREFIX,
    RUN_FILE_PREFIX,
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

_WORKSPACE, _OUTSIDE = "workspace", "outside"
_CONFIG = f"{_OUTSIDE}/~config"
"""The remote path of the folder with keys.yml; no local path can be mapped to it."""


class FileLayout:
    """Collects the files of a run, without duplicates, with their paths on the other machine."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files: dict[str, SentFile] = {}
        """The files by their remote paths."""
        package = Path(stillroom.__file__).resolve().parent
        self._roots = [(str(package), PACKAGE_PREFIX), (str(workspace.root), _WORKSPACE)]
        # The folder of keys.yml is mapped even if it is not sent: the machine may have a home
        # folder of the same path, which the run may not enter.
        config = str(Path.home() / ".config" / "stillroom")
        self._mappings = {**dict(self._roots), "~": str(Path.home()), config: _CONFIG}
        """Remote paths by local path, as in `PathMapping`."""

    @property
    def files(self) -> list[SentFile]:
        """The files that are sent."""
        return list(self._files.values())

    @property
    def home_paths(self) -> list[PathMapping]:
        """The mappings of local paths to remote paths; the first match applies."""
        return [
            PathMapping(home_path=home, remote_path=remote_path)
            for home, remote_path in self._mappings.items()
        ]

    def __contains__(self, path: Path) -> bool:
        return self._remote_path(_normalized(path)) in self._files

    def add(self, path: Path, *, source: str | None = None, is_optional: bool = False) -> None:
        """Adds a file; if `source` is given, that file's content is sent instead.

        is_optional: as in `SentFile`. Raises InputError for a file that contains keys according to
        its name, such as `.env`.
        """
        check_readable(path)
        remote_path = self._remote_path(_normalized(path))
        if remote_path.startswith(PACKAGE_PREFIX):
            return
        if remote_path.startswith(f"{_OUTSIDE}/"):
            self._mappings.setdefault(_normalized(path), remote_path)
        self._place(source or str(path), remote_path, is_optional=is_optional)

    def add_all(self, paths: Iterable[Path]) -> None:
        """Adds files, and all files of folders; skips paths that do not exist."""
        for path in paths:
            if path.is_dir():
                self.add_folder(path)
            elif path.is_file():
                self.add(path)

    def add_folder(self, folder: Path, *, max_bytes: int | None = None) -> None:
        """Adds a folder's files as listed by `lineage.folder_files`, and its manifest.

        Skips files larger than `max_bytes`. Raises InputError for a file that contains keys
        according to its name.
        """
        remote_path = self._remote_path(_normalized(folder))
        if remote_path.startswith(PACKAGE_PREFIX):
            return
        if remote_path.startswith(f"{_OUTSIDE}/"):
            self._mappings.setdefault(_normalized(folder), remote_path)
        manifest = folder / FOLDER_MANIFEST
        for path in [*folder_files(folder), *([manifest] if manifest.is_file() else [])]:
            if max_bytes is None or path.stat().st_size <= max_bytes:
                check_readable(path)
                self._place(str(path), f"{remote_path}/{path.relative_to(folder).as_posix()}")

    def add_manifests(self, path: Path) -> None:
        """Adds the manifest of a file, or its pending manifest, if they exist."""
        if not path.is_dir():
            self.add_all([manifest_path(path), pending_manifest_path(path)])

    def add_keys_file(self) -> None:
        """Adds the user's keys.yml, which lists the hosts of each key, but contains no keys."""
        if (path := keys_file()).is_file():
            self._place(str(path), f"{_CONFIG}/{path.name}")

    def add_alias(self, name: str, path: Path) -> None:
        """Maps a path, as written in a request or in config.yml, to the remote path of `path`."""
        alias = _normalized(self._workspace.root / Path(name).expanduser())
        if alias != _normalized(path):
            self._mappings.setdefault(alias, self._remote_path(_normalized(path)))

    def relative_to_workspace(self, path: Path) -> str | None:
        """Returns the path of an output relative to the workspace; None if it is outside."""
        root, _, relative = self._remote_path(_normalized(path)).partition("/")
        return relative if root == _WORKSPACE and relative else None

    def _place(self, source: str, remote_path: str, *, is_optional: bool = False) -> None:
        """Adds a file at a remote path, unless there is one."""
        file = SentFile(source=source, remote_path=remote_path, is_optional=is_optional)
        self._files.setdefault(remote_path, file)

    def _remote_path(self, path: str) -> str:
        """Returns the path on the other machine for an absolute local path."""
        for home, remote_path in self._roots:
            if path == home:
                return remote_path
            if path.startswith(home + "/"):
                separator = "" if remote_path == PACKAGE_PREFIX else "/"
                return remote_path + separator + path.removeprefix(home + "/")
        return _OUTSIDE + path


def _normalized(path: Path) -> str:
    """Returns an absolute path without `..`; links are kept, as requests and records name them."""
    return os.path.normpath(path.absolute())


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a run's files, and the files' paths on the other machine."""

    blobs: list[Blob]
    """The distinct contents."""
    files: list[PlacedFile]


def read_contents(
    run: RunFolder, spec: JobSpec, *, is_stopped: Callable[[], bool] = lambda: False
) -> Contents:
    """Hashes a run's files; returns their contents and their paths on the other machine.

    Raises RunError if a file has changed since the run was started.
    """
    root = Path(run.read_request().workspace)
    hashes = HashCache.of_workspace(root)
    blobs, files = dict[str, Blob](), list[PlacedFile]()
    run.check_inputs()
    for sent in spec.files:
        path = _source_path(run, sent.source)
        try:
            stat = path.stat()
            sha256 = hashes.hash_of(path, is_stopped)
        except FileNotFoundError as error:
            if sent.is_optional:
                continue
            raise RunError(
                f"{path} was deleted since this run was started",
                "restore the file, or start the run again without it",
            ) from error
        blob = Blob(sha256=sha256, num_bytes=stat.st_size, source=str(path))
        blobs.setdefault(sha256, blob)
        is_executable = bool(stat.st_mode & 0o100)
        files.append(
            PlacedFile(remote_path=sent.remote_path, sha256=sha256, is_executable=is_executable)
        )
    run.check_inputs()
    hashes.save()
    return Contents(list(blobs.values()), files)


def _source_path(run: RunFolder, source: str) -> Path:
    """Returns the local path of a `SentFile.source`."""
    if source.startswith(RUN_FILE_PREFIX):
        return run.path / source.removeprefix(RUN_FILE_PREFIX)
    return Path(source)
