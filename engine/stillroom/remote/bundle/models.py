"""Adds models to the files that are sent: weights, their runs' records, model card inputs."""

from contextlib import suppress
from itertools import chain
from pathlib import Path

from stillroom.errors import EngineError
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.export.history import (
    evaluated_model,
    models_behind,
    optional_document,
    optional_manifest,
)
from stillroom.lineage import FileRecord
from stillroom.models.resolve import CHECKPOINTS, ModelLocation, adapter_base, locate_model
from stillroom.remote.bundle.layout import FileLayout
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.train.config.resume import find_resume_point
from stillroom.versions import FOLDER, copy_of, record_of, versions_of, versions_with

_RUN_RECORDS = ("run.json", "request.json", "config.json", "given_config.yml", "given_config.json")
_SMALL_BYTES = 1 << 20
"""The maximum size of the files of earlier models that a model card needs, e.g. licences."""
_TOKENIZER_BYTES = 64 << 20
_MAX_MANIFESTS = 40


def add_model(workspace: Workspace, layout: FileLayout, model: ModelLocation) -> None:
    """Adds a local model with its run's records and, if it is an adapter, its base model."""
    if not model.is_local:
        return
    layout.add_all([model.path])
    _add_alias(workspace, layout, model)
    _add_checkpoint_run(workspace, layout, model.path)
    if model.is_adapter:
        add_model(workspace, layout, adapter_base(workspace, model))
    record = model.record
    multimodal = record.text_part_of if record is not None else None
    if (
        multimodal is not None
        and (folder := Path(multimodal.location)).is_absolute()
        and folder.is_dir()
    ):
        # Only an export reads more of the multimodal model than its configuration and tokenizer.
        layout.add_folder(folder, max_bytes=_SMALL_BYTES)


def needs_gguf(workspace: Workspace, model: ModelLocation) -> bool:
    """Returns whether loading a model reads a GGUF file: its own, or that of an adapter's base."""
    return model.is_gguf or (
        model.is_adapter and needs_gguf(workspace, adapter_base(workspace, model))
    )


def needs_gguf_for(workspace: Workspace, name: str) -> bool:
    """Returns `needs_gguf` for a model by its name; False for what is no model here."""
    with suppress(EngineError):
        return needs_gguf(workspace, locate_model(workspace, name))
    return False


def add_tokenizer_files(workspace: Workspace, layout: FileLayout, name: str) -> None:
    """Adds the tokenizer and configuration of a local model whose weights are served elsewhere."""
    with suppress(EngineError):
        model = locate_model(workspace, name)
        if model.is_local:
            # The tokenizer of a GGUF file is in the file.
            if model.is_gguf:
                layout.add(model.path)
            else:
                layout.add_folder(model.path, max_bytes=_TOKENIZER_BYTES)
            _add_alias(workspace, layout, model)


def _add_alias(workspace: Workspace, layout: FileLayout, model: ModelLocation) -> None:
    """Maps the model's name, as in config.yml or a request, to the remote path of its files.

    A GGUF file may be named by its Python package, which the machine does not have.
    """
    path = workspace.path(model.name)
    if model.is_gguf or (path.exists() and not RunFolder(path).is_run):
        layout.add_alias(model.name, model.path)


def add_run_records(workspace: Workspace, layout: FileLayout, run_id: str) -> None:
    """Adds the records of a run: its request, state and configuration."""
    folder = workspace.runs / run_id
    layout.add_all(folder / name for name in _RUN_RECORDS)


def add_resume_files(workspace: Workspace, layout: FileLayout, run_id: str) -> None:
    """Adds the files needed to resume a run: its records, metrics, newest and best checkpoint."""
    point = find_resume_point(workspace, run_id)
    resumed = RunFolder(workspace.runs / run_id)
    for run in chain([resumed], resumed.earlier_runs()):
        add_run_records(workspace, layout, run.run_id)
        if run.run_id == point.run_id:
            break
    layout.add_folder(point.checkpoint)
    if point.best_checkpoint is not None:
        layout.add_folder(point.best_checkpoint)
    layout.add_all([RunFolder(workspace.runs / point.run_id).events])


def add_card_inputs(workspace: Workspace, layout: FileLayout, model: ModelLocation) -> None:
    """Adds the inputs of an export's model card: earlier runs, their rows, and evaluations."""
    for stage in models_behind(workspace, model):
        if not stage.is_local:
            continue
        if stage.path != model.path and not stage.is_gguf:
            layout.add_folder(stage.path, max_bytes=_SMALL_BYTES)
        _add_checkpoint_run(workspace, layout, stage.path)
        if stage.record is not None:
            layout.add_all([RunFolder(workspace.runs / stage.record.run_id).events])
        manifest = optional_manifest(stage.path)
        if manifest is not None and len(manifest.inputs) > 1:
            # The first input is config.yml, the second the file of training rows.
            rows = manifest.inputs[1]
            layout.add_all([Path(rows.path)])
            _add_manifests(workspace, layout, rows)
    multimodal = model.record.text_part_of if model.record is not None else None
    if multimodal is not None and Path(multimodal.location).is_dir():
        layout.add_folder(Path(multimodal.location))
    _add_evaluations(workspace, layout, model)


def _add_evaluations(workspace: Workspace, layout: FileLayout, model: ModelLocation) -> None:
    """Adds all evaluation results, and the rollouts of those of this model and its exports."""
    for file in sorted(workspace.runs.glob(f"*/{RESULT_FILE}")):
        layout.add(file)
        add_run_records(workspace, layout, file.parent.name)
        evaluation = optional_document(file, Evaluation)
        evaluated = evaluated_model(workspace, evaluation, model) if evaluation else None
        if evaluation is None or evaluated is None:
            continue
        layout.add_all([workspace.path(evaluation.result.rollouts)])
        if evaluated.path != model.path:
            layout.add_folder(evaluated.path, max_bytes=_SMALL_BYTES)
            _add_alias(workspace, layout, evaluated)


def _add_manifests(workspace: Workspace, layout: FileLayout, rows: FileRecord) -> None:
    """Adds the manifests of a row file and of its sources, without the files they describe."""
    queue, seen = [rows], {rows.path}
    while queue and len(seen) <= _MAX_MANIFESTS:
        record = queue.pop(0)
        path = Path(record.path)
        is_first = record is rows
        add_tags(workspace, layout, path, sha256=record.sha256, with_copies=is_first)
        layout.add_manifests(path)
        manifest = optional_manifest(path)
        for source in manifest.inputs if manifest is not None else []:
            if source.path not in seen:
                seen.add(source.path)
                queue.append(source)


def _add_checkpoint_run(workspace: Workspace, layout: FileLayout, folder: Path) -> None:
    """Adds the records of a checkpoint's run, if the folder is a checkpoint."""
    run = folder.parent.parent
    if folder.parent.name == CHECKPOINTS and run.parent == workspace.runs:
        add_run_records(workspace, layout, run.name)


def add_tags(
    workspace: Workspace,
    layout: FileLayout,
    path: Path,
    *,
    sha256: str | None = None,
    with_copies: bool = False,
) -> None:
    """Adds the version records of a file's tags, and of its content if `sha256` is given.

    With `with_copies`, also adds the stored copy of that content.
    """
    root = workspace.root
    versions = versions_of(root, path)
    # A stored copy of a dataset is named by its hash.
    if path.parent == root / FOLDER / "datasets":
        sha256 = path.name.partition(".")[0]
    if sha256 is not None:
        versions += versions_with(root, sha256)
    for version in versions:
        layout.add(record_of(root, version))
        if with_copies and version.sha256 == sha256:
            layout.add_all([copy_of(root, version)])
