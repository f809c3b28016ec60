"""The records of tags, by which `name@tag` and `name@hash` mean the same content elsewhere."""

from pathlib import Path

from stillroom.remote.bundle.places import FileLayout
from stillroom.settings import Workspace
from stillroom.versions import FOLDER, copy_of, record_of, versions_of, versions_with


def add_tags(
    workspace: Workspace,
    places: FileLayout,
    path: Path,
    *,
    sha256: str | None = None,
    has_copies: bool = False,
) -> None:
    """Adds the records of the tags of a file, and of its content if that is known.

    With `has_copies` the kept copy of that content is added too.
    """
    root = workspace.root
    versions = versions_of(root, path)
    if path.parent == root / FOLDER / "datasets":
        sha256 = path.name.partition(".")[0]
    if sha256 is not None:
        versions += versions_with(root, sha256)
    for version in versions:
        places.add(record_of(root, version))
        if has_copies and version.sha256 == sha256:
            places.add_all([copy_of(root, version)])
