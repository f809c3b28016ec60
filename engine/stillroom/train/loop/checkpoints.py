"""Checkpoints: a folder that is complete or not there."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from stillroom.demo import DEMO_MODELS
from stillroom.errors import RunError
from stillroom.files import write_json
from stillroom.lineage import (
    FOLDER_MANIFEST,
    ModelRecord,
    Recording,
    record_folder,
    write_manifest,
)
from stillroom.models.resolve import (
    CHECKPOINTS,
    FINAL,
    RECORD,
    CheckpointRecord,
    ModelLocation,
)
from stillroom.train.config.resume import STATE, TrainingState
from stillroom.train.loop.snapshot import TENSORS, save_snapshot
from stillroom.train.student.model import Student
from stillroom.train.student.sharding import whole_weights


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run trains from."""

    files: Recording
    """config.yml, the rows, and the user's Python files, as they are when the run begins."""
    models: Sequence[ModelRecord]
    request: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What a checkpoint holds beside the weights, for the run to go on bit for bit."""

    state: TrainingState
    optimizer: Mapping[str, Tensor]
    random: Sequence[Mapping[str, Tensor]]
    """The random numbers of each process."""


def save_checkpoint(
    run: Path,
    student: Student,
    *,
    method: str,
    step: int,
    is_final: bool,
    origin: Origin | None = None,
    snapshot: RunSnapshot | None = None,
) -> Path:
    """Writes the student's weights (or adapter) and tokenizer; returns the checkpoint's folder.

    With an `origin` the folder holds its manifest, with a `snapshot` what a run goes on from.
    Of several processes all call this, for weights may be shared out, and the first one writes.
    Raises RunError if it cannot be written; the checkpoints before it are whole.
    """
    folder = final_checkpoint(run) if is_final else run / CHECKPOINTS / step_name(step)
    weights = None
    if student.root is not None:
        weights = whole_weights(student.module, is_trained_only=student.is_adapter)
    if not student.peers.is_first:
        return folder
    record = CheckpointRecord(
        run_id=run.name, method=method, step=step, base_model=_lasting_name(student.base)
    )

    def write(temporary: Path) -> None:
        model: Any = student.loaded.model
        # Nothing here resizes embeddings, and looking whether they changed would ask the hub.
        model.save_pretrained(
            temporary,
            **({"save_embedding_layers": False} if student.is_adapter else {}),
            **({"state_dict": weights} if weights is not None else {}),
        )
        student.loaded.tokenizer.save_pretrained(temporary)
        if snapshot is not None:
            save_snapshot(temporary, snapshot.optimizer, snapshot.random)
            write_json(temporary / STATE, snapshot.state)

    return _written(folder, write, record=record, origin=origin)


def step_name(step: int) -> str:
    """Returns the name of a step's checkpoint; names sort as the steps do."""
    return f"step_{step:06d}"


def final_checkpoint(run: Path) -> Path:
    """Returns the folder of a run's final checkpoint."""
    return run / CHECKPOINTS / FINAL


def adopt_checkpoint(checkpoint: Path, run: Path) -> None:
    """Copies a checkpoint of the run that this one goes on from into this run's folder."""
    folder = run / CHECKPOINTS / checkpoint.name
    temporary = _partial(folder)
    shutil.copytree(checkpoint, temporary, dirs_exist_ok=True)
    temporary.rename(folder)


def promote_checkpoint(run: Path, *, step: int, origin: Origin | None = None) -> Path:
    """Makes the checkpoint of an earlier step the final one; returns the final one's folder."""
    best, folder = run / CHECKPOINTS / step_name(step), final_checkpoint(run)
    record = msgspec.json.decode((best / RECORD).read_bytes(), type=CheckpointRecord)

    def write(temporary: Path) -> None:
        left_out = shutil.ignore_patterns(STATE, TENSORS, FOLDER_MANIFEST)
        shutil.copytree(best, temporary, ignore=left_out, dirs_exist_ok=True)

    return _written(folder, write, record=record, origin=origin)


def prune_checkpoints(run: Path, *, keep: int, also: Collection[int]) -> None:
    """Deletes the oldest checkpoints of steps beyond the last `keep`, but not the steps `also`."""
    kept = {step_name(step) for step in also}
    found = sorted((run / CHECKPOINTS).glob("step_*"))
    for folder in found[: max(0, len(found) - keep)]:
        if folder.name not in kept:
            # Renamed first: no half of a checkpoint is ever seen.
            going = folder.with_name(f".{folder.name}.going")
            folder.rename(going)
            shutil.rmtree(going)


def _partial(folder: Path) -> Path:
    """Returns where a checkpoint is written until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def _written(
    folder: Path,
    write: Callable[[Path], None],
    *,
    record: CheckpointRecord,
    origin: Origin | None,
) -> Path:
    """Has a checkpoint written beside its place and moves it there once it is whole."""
    temporary = _partial(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        write_json(temporary / RECORD, record)
        if origin is not None:
            _write_manifest(temporary, folder, record, origin)
        _wait_for_disk(temporary)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        # What is left of it would keep a full disk full.
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {record.step} could not be written: {error}",
            f"free disk space under {folder.parent} or set trainer.keep_checkpoints",
        ) from error
    return folder


def _write_manifest(
    temporary: Path, folder: Path, record: CheckpointRecord, origin: Origin
) -> None:
    write_manifest(
        temporary,
        written=msgspec.structs.replace(record_folder(temporary), path=str(folder)),
        operation="start_training",
        inputs=[*origin.files.records(), *origin.models],
        request=origin.request,
        counts={"step": record.step},
        run_id=record.run_id,
    )


def _wait_for_disk(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lasting_name(base: ModelLocation) -> str:
    """Returns a name that finds the base again: a demo or hub name, else the folder's full path."""
    return base.name if base.name in DEMO_MODELS else base.location
