"""Finds the file, version, run or checkpoint whose lineage a user requests."""

from dataclasses import replace
from pathlib import Path

from stillroom.errors import DataError, InputError
from stillroom.evaluate.files import RESULT_FILE
from stillroom.lineage import FOLDER_MANIFEST, read_manifest, record_file
from stillroom.models.resolve import CHECKPOINTS, FINAL
from stillroom.run_folder import RunFolder, find_run
from stillroom.settings import Workspace
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.request import State

_CHANGED = "the content has changed since {made_by} wrote it"


def find_target(workspace: Workspace, origins: Origins, name: str) -> Origin:
    """Returns the origin with which the lineage of a file, version, run or checkpoint starts.

    Raises an EngineError if it does not exist, or is a folder without a manifest.
    """
    path = workspace.path(name)
    if not path.exists() and "/" not in name and "@" not in name and not path.suffix:
        path = run_output(workspace, find_run(workspace, name))
    else:
        path = workspace.existing(name, label="path")
    if (run := RunFolder(path)).is_run:
        path = run_output(workspace, run)
    return _origin_of(origins, path)


def run_output(workspace: Workspace, run: RunFolder) -> Path:
    """Returns the output of a run: an evaluation's result, the last checkpoint, or its output file.

    Raises InputError if it has not written anything yet.
    """
    evaluation = run.path / RESULT_FILE
    if evaluation.is_file():
        return evaluation
    checkpoints = run.path / CHECKPOINTS
    steps = sorted(path for path in checkpoints.glob("step_*") if path.is_dir())
    for checkpoint in (checkpoints / FINAL, *reversed(steps)):
        if checkpoint.is_dir():
            return checkpoint
    output = _requested_output(run)
    path = workspace.path(output) if output else None
    if path is None or not path.exists():
        raise InputError(
            f"run {run.run_id} has not written anything yet",
            f"check its state with get_run(run_id={run.run_id})",
        )
    return path


def _requested_output(run: RunFolder) -> str | None:
    try:
        output = run.read_request().request.get("output")
    except (FileNotFoundError, DataError) as error:
        raise InputError(
            f"the request of run {run.run_id} cannot be read: {error}",
            "give the file that the run wrote instead",
        ) from error
    return output if isinstance(output, str) else None


def _origin_of(origins: Origins, path: Path) -> Origin:
    """Returns the origin of a file or folder, with a note if it has changed since its manifest.

    Raises InputError for a folder without a manifest.
    """
    manifest = read_manifest(path)
    if manifest is None and path.is_dir():
        raise InputError(
            f"{path} is a folder without {FOLDER_MANIFEST}, so its origin is unknown",
            "give a file, a run id, or a checkpoint that start_training wrote",
        )
    if manifest is None:
        return origins.of_file(record_file(path), path)
    origin = origins.of_file(manifest.output, path)
    if origin.state is not State.CHANGED:
        return origin
    return replace(origin, note=_CHANGED.format(made_by=manifest.operation))
