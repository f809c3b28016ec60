"""Writes and reads checkpoints: folders that are either complete or absent.

Tensors are stored as safetensors only, so that loading a foreign checkpoint runs no code.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stillroom.demo import DEMO_MODELS
from stillroom.errors import ModelError, RunError
from stillroom.files import wait_for_disk, write_json
from stillroom.home_paths import restore_home_paths
from stillroom.lineage import (
    FOLDER_MANIFEST,
    FileRecord,
    ModelRecord,
    Recording,
    record_folder,
    write_manifest,
)
from stillroom.models.load import read_weights
from stillroom.models.multimodal import (
    expand_target_modules,
    is_for_multimodal,
    multimodal_config,
    weight_names,
)
from stillroom.models.resolve import (
    CHECKPOINTS,
    FINAL,
    RECORD,
    CheckpointRecord,
    ModelLocation,
)
from stillroom.places import make_folder, rename_folder
from stillroom.train.config.resume import STATE, TrainingState, step_name
from stillroom.train.student.collective import full_weights, set_weights
from stillroom.train.student.model import Student

_TENSORS = "training_state.safetensors"
_CPU_RANDOM, _CUDA_RANDOM, _OPTIMIZER = "random.cpu", "random.cuda", "optimizer."


@dataclass(frozen=True, slots=True)
class RunSources:
    """The files, models and request of a run, for the manifests of its checkpoints."""

    files: Recording
    """config.yml, the rows and the user's Python files, as of the start of the run."""
    models: Sequence[ModelRecord]
    request: Mapping[str, Any]
    derived: list[FileRecord] = field(default_factory=list[FileRecord])
    """Files that the run derived from its inputs, or reused, before its first step."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run besides its weights; resuming from it is bit-for-bit exact."""

    state: TrainingState
    optimizer: Mapping[str, Tensor]
    random: Sequence[Mapping[str, Tensor]]
    """The state of each process's random number generators, by rank."""


def save_checkpoint(
    run: Path,
    student: Student,
    *,
    method: str,
    step: int,
    is_final: bool,
    sources: RunSources | None = None,
    snapshot: RunSnapshot | None = None,
) -> Path:
    """Writes the student's weights (or adapter) and tokenizer; returns the checkpoint's folder.

    With `sources` it also has a manifest, with a `snapshot` the state to resume from.
    All processes must call this, because weights may be sharded; the first one writes.
    Raises RunError if writing fails; earlier checkpoints stay complete.
    """
    folder = final_checkpoint(run) if is_final else run / CHECKPOINTS / step_name(step)
    weights = None
    if student.root is not None:
        weights = full_weights(
            student.module, is_trained_only=student.is_adapter, is_kept=student.peers.is_first
        )
    if not student.peers.is_first:
        return folder
    record = CheckpointRecord(
        run_id=run.name,
        method=method,
        step=step,
        base_model=_stable_name(student.base),
        text_part_of=_with_hash(student.text_part_of, sources.models if sources else ()),
    )

    def write(temporary: Path) -> None:
        model: Any = student.loaded.model
        # Embeddings are never resized here; peft would query the hub to check that.
        model.save_pretrained(
            temporary,
            **({"save_embedding_layers": False} if student.is_adapter else {}),
            **({"state_dict": weights} if weights is not None else {}),
        )
        if student.is_adapter and student.text_part_of is not None:
            expand_target_modules(temporary)
        student.loaded.tokenizer.save_pretrained(temporary)
        if snapshot is not None:
            _save_snapshot(temporary, snapshot)

    return _write_checkpoint(folder, write, record=record, sources=sources)


def _with_hash(multimodal: ModelRecord | None, hashed: Sequence[ModelRecord]) -> ModelRecord | None:
    """Returns the record of a multimodal model, with the hash from the run's own records."""
    if multimodal is None or multimodal.sha256 or multimodal.revision:
        return multimodal
    same = next((model for model in hashed if model.location == multimodal.location), multimodal)
    return msgspec.structs.replace(multimodal, sha256=same.sha256, revision=same.revision)


def final_checkpoint(run: Path) -> Path:
    """Returns the folder of a run's final checkpoint."""
    return run / CHECKPOINTS / FINAL


def adopt_checkpoint(checkpoint: Path, run: Path) -> None:
    """Copies the checkpoint that a run resumes from into the new run's folder."""
    folder = run / CHECKPOINTS / checkpoint.name
    temporary = _partial_folder(folder)
    make_folder(temporary)
    shutil.copytree(checkpoint, temporary, dirs_exist_ok=True)
    rename_folder(temporary, folder)


def promote_checkpoint(run: Path, *, step: int, sources: RunSources | None = None) -> Path:
    """Copies the checkpoint of an earlier step as the final one; returns the new folder."""
    best, folder = run / CHECKPOINTS / step_name(step), final_checkpoint(run)
    record = msgspec.json.decode((best / RECORD).read_bytes(), type=CheckpointRecord)

    def write(temporary: Path) -> None:
        # A final checkpoint is a model that is not resumed, and has its own manifest.
        ignored = shutil.ignore_patterns(STATE, _TENSORS, FOLDER_MANIFEST)
        shutil.copytree(best, temporary, ignore=ignored, dirs_exist_ok=True)

    return _write_checkpoint(folder, write, record=record, sources=sources)


def prune_checkpoints(run: Path, *, keep: int, best_step: int) -> None:
    """Deletes the oldest checkpoints, except the last `keep` and the best step's."""
    folders = sorted((run / CHECKPOINTS).glob("step_*"))
    for folder in folders[: max(0, len(folders) - keep)]:
        if folder.name != step_name(best_step):
            # Renamed first, so that no half-deleted checkpoint is visible.
            hidden = folder.with_name(f".{folder.name}.going")
            folder.rename(hidden)
            shutil.rmtree(hidden)


def _partial_folder(folder: Path) -> Path:
    """Returns the temporary folder in which a checkpoint is written."""
    return folder.with_name(f".{folder.name}.partial")


def _write_checkpoint(
    folder: Path,
    write: Callable[[Path], None],
    *,
    record: CheckpointRecord,
    sources: RunSources | None,
) -> Path:
    """Writes a checkpoint to a temporary folder, then renames it to `folder`."""
    temporary = _partial_folder(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        make_folder(temporary)
        write(temporary)
        restore_home_paths(temporary)
        write_json(temporary / RECORD, record)
        if sources is not None:
            _write_manifest(temporary, folder, record, sources)
        for path in (*temporary.iterdir(), temporary):
            wait_for_disk(path)
        rename_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        # A partial checkpoint would keep a full disk full.
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {record.step} could not be written: {error}",
            f"free disk space under {folder.parent}, or keep fewer checkpoints "
            "(trainer.keep_checkpoints)",
        ) from error
    return folder


def _write_manifest(
    temporary: Path, folder: Path, record: CheckpointRecord, sources: RunSources
) -> None:
    write_manifest(
        temporary,
        written=record_folder(temporary, final=folder),
        operation="start_training",
        inputs=[*sources.files.records(), *sources.derived, *sources.models],
        request=sources.request,
        counts={"step": record.step},
        run_id=record.run_id,
    )


def _stable_name(base: ModelLocation) -> str:
    """Returns a stable name for the base model: a demo or hub name, else its absolute path."""
    return base.name if base.name in DEMO_MODELS else base.recorded


def random_state() -> dict[str, Tensor]:
    """Returns the state of this process's random number generators."""
    state = {_CPU_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_CUDA_RANDOM] = torch.cuda.get_rng_state()
    return state


def _save_snapshot(folder: Path, snapshot: RunSnapshot) -> None:
    tensors = {_OPTIMIZER + name: t.contiguous() for name, t in snapshot.optimizer.items()}
    for rank, state in enumerate(snapshot.random):
        tensors |= {_rank_key(name, rank): tensor for name, tensor in state.items()}
    save_file(tensors, folder / _TENSORS)
    write_json(folder / STATE, snapshot.state)


def restore_snapshot(folder: Path, *, rank: int = 0) -> dict[str, Tensor]:
    """Restores the state of the random number generators; returns the optimiser's tensors."""
    try:
        tensors = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the training state in the checkpoint {folder} cannot be read: {error}",
            f"delete {folder.name} to resume from the previous checkpoint",
        ) from error
    # Processes beyond the number of the earlier run keep their own random state.
    if (state := tensors.get(_rank_key(_CPU_RANDOM, rank))) is not None:
        torch.set_rng_state(state)
    if (
        torch.cuda.is_available()
        and (state := tensors.get(_rank_key(_CUDA_RANDOM, rank))) is not None
    ):
        torch.cuda.set_rng_state(state)
    return {
        name.removeprefix(_OPTIMIZER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_OPTIMIZER)
    }


def _rank_key(name: str, rank: int) -> str:
    return name if rank == 0 else f"{name}.{rank}"


def restore_weights(student: Student, folder: Path) -> None:
    """Loads the trained weights of a checkpoint into the student, in place.

    Raises ModelError for a checkpoint of a whole multimodal model, since only the text part is
    trained.
    """
    module: Any = student.module
    location = ModelLocation(folder.name, str(folder), is_local=True)
    if student.text_part_of is not None and _is_multimodal(location):
        raise ModelError(
            f"the checkpoint {folder} is of a whole multimodal model, but only the text part is "
            "trained",
            f"start a new run from it with model.path: {folder}",
        )
    if student.is_adapter:
        adapter = load_file(folder / "adapter_model.safetensors")
        if student.root is not None:
            names = {name: name.replace(".default", "") for name, _ in module.named_parameters()}
            set_weights(module, {n: adapter[key] for n, key in names.items() if key in adapter})
            return
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(module, adapter)
        return
    weights = read_weights(location, dtype=module.dtype).state_dict()
    if student.root is not None:
        set_weights(module, weights)
        return
    module.load_state_dict(weights)


def _is_multimodal(location: ModelLocation) -> bool:
    if location.is_adapter:
        return is_for_multimodal(weight_names(location.path))
    return multimodal_config(location) is not None
