"""Where the files of a run lie on another machine, and which paths here they stand for.

The workspace becomes `workspace/`, and every other file lies below `outside/` by its whole path, so
that no two files ever meet. What is part of Stillroom's own package is there already.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import stillroom
from stillroom.lineage import FOLDER_MANIFEST, folder_files, manifest_path, pending_manifest
from stillroom.remote.records import PathMapping, SentFile
from stillroom.secrecy.keys import keys_file
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace

_WORKSPACE, _OUTSIDE, _PACKAGE = "workspace", "outside", "package:"
_CONFIG = f"{_OUTSIDE}/~config"
"""Where keys.yml lies: no path here begins so."""


class FileLayout:
    """Collects the files of a run, each once, with its place on the other machine."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files: dict[str, str] = {}
        """The source of each file by its place."""
        self._home: dict[str, str] = {}
        package = Path(stillroom.__file__).resolve().parent
        self._roots = [(str(package), _PACKAGE), (str(workspace.root), _WORKSPACE)]
        for home, place in self._roots:
            self._home[home] = place
        self._home["~"] = str(Path.home())

    @property
    def files(self) -> list[SentFile]:
        """The files that are sent, without those that are there already."""
        return [SentFile(source=source, place=place) for place, source in self._files.items()]

    @property
    def home_paths(self) -> list[PathMapping]:
        """The paths here, each with the place that stands for it; of several the first counts."""
        return [PathMapping(home=home, place=place) for home, place in self._home.items()]

    def __contains__(self, path: Path) -> bool:
        return self._place(_plain(path)) in self._files

    def add(self, path: Path, *, source: str | None = None) -> None:
        """Adds a file; `source` is what is sent in its stead.

        Raises InputError for a file that holds keys by its name.
        """
        check_readable(path)
        place = self._place(_plain(path))
        if place.startswith(_PACKAGE):
            return
        if place.startswith(f"{_OUTSIDE}/"):
            self._home.setdefault(_plain(path), place)
        self._files.setdefault(place, source or str(path))

    def add_all(self, paths: Iterable[Path]) -> None:
        """Adds files, and the files of folders."""
        for path in paths:
            if path.is_dir():
                self.add_folder(path)
            elif path.is_file():
                self.add(path)

    def add_folder(self, folder: Path, *, most_bytes: int | None = None) -> None:
        """Adds the files of a folder as `lineage.folder_files` lists them, and its manifest.

        With `most_bytes` only those that are no larger. Raises InputError for one that holds keys
        by its name.
        """
        place = self._place(_plain(folder))
        if place.startswith(_PACKAGE):
            return
        if place.startswith(f"{_OUTSIDE}/"):
            self._home.setdefault(_plain(folder), place)
        manifest = folder / FOLDER_MANIFEST
        for path in [*folder_files(folder), *([manifest] if manifest.is_file() else [])]:
            if most_bytes is None or path.stat().st_size <= most_bytes:
                check_readable(path)
                self._files.setdefault(f"{place}/{path.relative_to(folder).as_posix()}", str(path))

    def add_manifests(self, path: Path) -> None:
        """Adds the manifest beside a file, also one that is about to be put in place."""
        if not path.is_dir():
            self.add_all([manifest_path(path), pending_manifest(path)])

    def add_keys_file(self) -> None:
        """Adds the user's keys.yml, which says which key may go where; it holds no keys."""
        if (path := keys_file()).is_file():
            self._home.setdefault(str(Path.home() / ".config" / "stillroom"), _CONFIG)
            self._files.setdefault(f"{_CONFIG}/{path.name}", str(path))

    def name(self, name: str, path: Path) -> None:
        """Lets a name of a request or of config.yml lead to what stands for `path` there."""
        written = _plain(self._workspace.root / Path(name).expanduser())
        if written != _plain(path):
            self._home.setdefault(written, self._place(_plain(path)))

    def relative(self, path: Path) -> str | None:
        """Returns the path of an output relative to the workspace; None if it is outside."""
        first, _, rest = self._place(_plain(path)).partition("/")
        return rest if first == _WORKSPACE and rest else None

    def _place(self, path: str) -> str:
        for home, place in self._roots:
            if path == home:
                return place
            if path.startswith(home + "/"):
                rest = path.removeprefix(home + "/")
                return place + rest if place == _PACKAGE else f"{place}/{rest}"
        return _OUTSIDE + path


def _plain(path: Path) -> str:
    """Returns a path without `..`; links stay, since requests and records name them."""
    return os.path.normpath(path.absolute())
