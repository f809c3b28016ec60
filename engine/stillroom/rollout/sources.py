"""Finds the rollouts that a path or a run id names, and keeps outputs from replacing them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.data.row_files import rollout_files
from stillroom.errors import DataError, InputError
from stillroom.rollout.journal.journal import holds_rollouts
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file with rollouts, and how to name it in results."""

    path: Path
    name: str
    """The path relative to the workspace, after the run id if the user gave one."""
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of other rows, which cannot be read as rollouts, by reason."""
    problems: Sequence[str] = ()
    """The locations and problems of the first rows that `refused` counts."""


def source_files(workspace: Workspace, inputs: str | Sequence[str]) -> list[SourceFile]:
    """Returns the rollouts files that `inputs` name; each input is a file, a folder or a run id.

    No file is returned twice. Raises InputError for an input that is none of these, and DataError
    for a folder without rollouts.
    """
    sources: dict[Path, SourceFile] = {}
    for name in [inputs] if isinstance(inputs, str) else inputs:
        run = run_with_id(workspace, name)
        path = (
            workspace.existing(name, label="input") if run is None else _rollouts_of(workspace, run)
        )
        for file in rollout_files(path):
            shown = workspace.shown(file)
            source = SourceFile(file, shown if run is None else f"{run.run_id}: {shown}")
            sources.setdefault(file.resolve(), source)
    return list(sources.values())


def check_output(output: Path, sources: Sequence[Path]) -> None:
    """Raises InputError if writing the output would replace an input, or a run's rollouts.

    Rollouts are protected because they cost money to make.
    """
    if output.resolve() in {file.resolve() for path in sources for file in rollout_files(path)}:
        raise InputError(f"the output {output} is also an input", "choose another output")
    if holds_rollouts(output):
        raise InputError(
            f"the output {output} holds rollouts that generate_rollouts wrote",
            "choose another output; delete the file yourself if it is no longer needed",
        )


def run_with_id(workspace: Workspace, name: str) -> RunFolder | None:
    """Returns the run with this id, or in this folder; None if there is no such run."""
    path = workspace.path(name)
    if not path.exists() and "/" not in name and name.strip("."):
        path = workspace.runs / name
    run = RunFolder(path)
    return run if run.is_run and run.request_file.is_file() else None


def _rollouts_of(workspace: Workspace, run: RunFolder) -> Path:
    """Returns the file or folder of rollouts that a run wrote.

    Raises InputError if the run wrote none, or its files are damaged.
    """
    try:
        request, result = run.read_request().request, run.read().result
    except DataError as error:
        raise InputError(
            f"the files of run {run.run_id!r} are damaged: {error}", _RUN_FIX
        ) from error
    # An evaluation names its rollouts in its result; a rollout run writes them to the output of
    # its request.
    output = (result or {}).get("rollouts") or request.get("output")
    path = workspace.path(output) if isinstance(output, str) else None
    if path is None or not path.exists():
        raise InputError(f"run {run.run_id!r} has written no rollouts", _RUN_FIX)
    return path


_RUN_FIX = "give a run of generate_rollouts (`stillroom list-runs`), or the file it wrote"
