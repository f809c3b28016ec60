"""Where rollouts come from: files, folders, and the runs that wrote them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.row_files import rollout_files
from stillroom.errors import InputError
from stillroom.settings import Workspace


class _Asked(msgspec.Struct, frozen=True):
    request: dict[str, Any] = {}


class _Result(msgspec.Struct, frozen=True):
    rollouts: str | None = None


class _State(msgspec.Struct, frozen=True):
    result: _Result | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file with rollouts."""

    path: Path
    name: str
    """As a user knows it: relative to the workspace, with the run whose id was given."""


def source_files(workspace: Workspace, given: str | Sequence[str]) -> list[SourceFile]:
    """Returns the files of what was given, each a file, a folder or a run id; no file twice.

    Raises InputError for what is none of them, and DataError for a folder without rollouts.
    """
    found: dict[Path, SourceFile] = {}
    for name in [given] if isinstance(given, str) else given:
        run = _run_folder(workspace, name)
        path = workspace.existing(name, what="input") if run is None else _output(workspace, run)
        for file in rollout_files(path):
            shown = workspace.shown(file)
            source = SourceFile(file, shown if run is None else f"{run.name}: {shown}")
            found.setdefault(file.resolve(), source)
    return list(found.values())


def _run_folder(workspace: Workspace, name: str) -> Path | None:
    """Returns the folder of a run that was given by its id or its folder."""
    path = workspace.path(name)
    if not path.exists() and "/" not in name and name.strip("."):
        path = workspace.runs / name
    return path if (path / "request.json").is_file() and (path / "run.json").is_file() else None


def _output(workspace: Workspace, run: Path) -> Path:
    """Returns the rollouts that a run has written."""
    try:
        asked = msgspec.json.decode((run / "request.json").read_bytes(), type=_Asked)
        state = msgspec.json.decode((run / "run.json").read_bytes(), type=_State)
    except msgspec.DecodeError as error:
        raise InputError(f"the files of run {run.name!r} are damaged: {error}", _GIVE) from error
    told = state.result.rollouts if state.result else None
    output = told or asked.request.get("output")
    path = workspace.path(output) if isinstance(output, str) else None
    if path is None or not path.exists():
        raise InputError(f"run {run.name!r} has written no rollouts", _GIVE)
    return path


_GIVE = "give a run of generate_rollouts (`stillroom list-runs`), or the file it wrote"
