"""Resolves what a user names (file, version, run or checkpoint) to the origin to trace from."""

from dataclasses import replace
from pathlib import Path

from stillroom.errors import DataError, InputError
from stillroom.evaluate.files import RESULT_FILE
from stillroom.lineage import FOLDER_MANIFEST, Manifest, read_manifest, record_file
from stillroom.models.resolve import CHECKPOINTS, FINAL
from stillroom.run_folder import RunFolder, find_run
from stillroom.settings import Workspace
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.request import State

_CHANGED = "this is not what {made_by} wrote: it was changed since"


def subject_of(workspace: Workspace, origins: Origins, given: str) -> Origin:
    """Returns the origin at which the lineage of a file, version, run or checkpoint starts.

    Raises an EngineError if it does not exist, or is a folder without a manifest.
    """
    path = workspace.path(given)
    if not path.exists() and "/" not in given and "@" not in given and not path.suffix:
        path = output_of(workspace, find_run(workspace, given))
    else:
        path = workspace.existing(given, label="path")
    if (run := RunFolder(path)).is_run:
        path = output_of(workspace, run)
    if path.is_dir():
        return _checkpoint(origins, path)
    return _file(origins, path)


def output_of(workspace: Workspace, run: RunFolder) -> Path:
    """Returns what a run has written: an evaluation's result, the last checkpoint, or its output.

    Raises InputError if it has written nothing yet.
    """
    evaluation = run.path / RESULT_FILE
    if evaluation.is_file():
        return evaluation
    checkpoints = run.path / CHECKPOINTS
    steps = sorted(path for path in checkpoints.glob("step_*") if path.is_dir())
    for checkpoint in (checkpoints / FINAL, *reversed(steps)):
        if checkpoint.is_dir():
            return checkpoint
    output = _asked_output(run)
    path = workspace.path(output) if output else None
    if path is None or not path.exists():
        raise InputError(
            f"run {run.run_id} has written nothing yet",
            f"see its state: get_run(run_id={run.run_id})",
        )
    return path


def _asked_output(run: RunFolder) -> str | None:
    try:
        output = run.read_request().request.get("output")
    except (FileNotFoundError, DataError) as error:
        raise InputError(
            f"the request of run {run.run_id} cannot be read: {error}", "give a file instead"
        ) from error
    return output if isinstance(output, str) else None


def _checkpoint(origins: Origins, folder: Path) -> Origin:
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(
            f"{folder} is a folder without {FOLDER_MANIFEST}: where it comes from is not on record",
            "give a file, a run id, or a checkpoint that start_training wrote",
        )
    return _compared(origins, folder, manifest)


def _file(origins: Origins, path: Path) -> Origin:
    manifest = read_manifest(path)
    if manifest is None:
        return origins.of_file(record_file(path), path)
    return _compared(origins, path, manifest)


def _compared(origins: Origins, path: Path, manifest: Manifest) -> Origin:
    """Returns the origin of something with a manifest, and notes if it was changed since then."""
    origin = origins.of_file(manifest.output, path)
    if origin.state is not State.CHANGED:
        return origin
    return replace(origin, note=_CHANGED.format(made_by=manifest.operation))
