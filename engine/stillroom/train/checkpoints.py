"""Checkpoints: a folder that is complete or not there."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.demo import DEMO_MODELS
from stillroom.files import write_json
from stillroom.lineage import ModelRecord, Recording, record_folder, write_manifest
from stillroom.models.resolve import (
    CHECKPOINTS,
    FINAL,
    RECORD,
    CheckpointRecord,
    ModelLocation,
)
from stillroom.train.student import Student


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run trains from."""

    files: Recording
    """config.yml, the rows, and the user's Python files, as they are when the run begins."""
    models: Sequence[ModelRecord]
    request: Mapping[str, Any]


def save_checkpoint(
    run: Path,
    student: Student,
    *,
    method: str,
    step: int,
    is_final: bool,
    origin: Origin | None = None,
) -> Path:
    """Writes the student's weights (or adapter) and tokenizer; returns the checkpoint's folder.

    With an `origin` the folder holds its manifest.
    """
    folder = run / CHECKPOINTS / (FINAL if is_final else f"step_{step:06d}")
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model: Any = student.loaded.model
    # Nothing here resizes embeddings, and looking whether they changed would ask the hub.
    model.save_pretrained(
        temporary, **({"save_embedding_layers": False} if student.is_adapter else {})
    )
    student.loaded.tokenizer.save_pretrained(temporary)
    record = CheckpointRecord(
        run_id=run.name, method=method, step=step, base_model=_lasting_name(student.base)
    )
    write_json(temporary / RECORD, record)
    if origin is not None:
        write_manifest(
            temporary,
            written=msgspec.structs.replace(record_folder(temporary), path=str(folder)),
            operation="start_training",
            inputs=[*origin.files.records(), *origin.models],
            request=origin.request,
            counts={"step": step},
            run_id=run.name,
        )
    temporary.rename(folder)
    return folder


def _lasting_name(base: ModelLocation) -> str:
    """Returns a name that finds the base again: a demo or hub name, else the folder's full path."""
    return base.name if base.name in DEMO_MODELS else base.location
