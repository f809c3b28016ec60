"""Finds the files behind the inputs of an import: files, folders and globs."""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.errors import InputError
from stillroom.settings import Workspace

_OURS = (".manifest.json", ".lock", ".refused", ".dropped")
_GLOB = frozenset("*?[")


def input_files(workspace: Workspace, inputs: Sequence[str]) -> dict[Path, bool]:
    """Returns the files behind inputs; True for those that an input names itself.

    Raises InputError for an input without files, or a file that must not be read.
    """
    files: dict[Path, bool] = {}
    for name in inputs:
        if name == "-":
            raise InputError(
                "- is standard input, which only the command line has",
                "give a file, a folder or a glob",
            )
        found = list(_files_of(workspace, name))
        if not found:
            raise InputError(f"input {name!r} holds no files", "check the path, or the pattern")
        for file, is_named in found:
            files[file] = files.get(file, False) or is_named
    return files


def _files_of(workspace: Workspace, name: str) -> Iterator[tuple[Path, bool]]:
    path = workspace.path(name)
    if not path.exists() and _GLOB.intersection(name):
        # Not Path.glob, which needs a pattern below a folder.
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207
        yield from ((match, False) for match in matches if match.is_file())
        return
    path = workspace.existing(name, label="input")
    if not path.is_dir():
        yield path, True
        return
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not is_hidden and not file.name.endswith(_OURS) and file.is_file():
            yield file, False
