"""The files of models that are sent: weights, the records of their runs, and model card inputs."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from stillroom.errors import DataError, EngineError
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.files import read_json
from stillroom.lineage import FileRecord, Manifest, read_manifest
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
_MOST_STAGES = 12
_MOST_MANIFESTS = 40

_Kind = TypeVar("_Kind")


def add_model(workspace: Workspace, places: FileLayout, model: ModelLocation) -> None:
    """Adds a local model with its run's records and, if it is an adapter, its base model."""
    if not model.is_local:
        return
    places.add_all([model.folder])
    _add_alias(workspace, places, model)
    _add_checkpoint_run(workspace, places, model.folder)
    if model.is_adapter:
        base = adapter_base(workspace, model)
        add_model(workspace, places, base)
    record = model.record
    whole = record.text_part_of if record is not None else None
    if whole is not None and (folder := Path(whole.location)).is_absolute() and folder.is_dir():
        # Only an export reads more of it than its configuration and tokenizer.
        places.add_folder(folder, most_bytes=_SMALL_BYTES)


def add_tokenizer_files(workspace: Workspace, places: FileLayout, name: str) -> None:
    """Adds the tokenizer and configuration of a local model whose weights are served elsewhere."""
    with suppress(EngineError):
        model = locate_model(workspace, name)
        if model.is_local:
            # The tokenizer of a GGUF file is in the file.
            if model.is_gguf:
                places.add(model.folder)
            else:
                places.add_folder(model.folder, most_bytes=_TOKENIZER_BYTES)
            _add_alias(workspace, places, model)


def _add_alias(workspace: Workspace, places: FileLayout, model: ModelLocation) -> None:
    """Maps the model's name, as written in config.yml or a request, to the place of its files."""
    named = workspace.path(model.name)
    if named.exists() and not RunFolder(named).is_run:
        places.add_alias(model.name, model.folder)


def add_run_records(workspace: Workspace, places: FileLayout, run_id: str) -> None:
    """Adds the records of a run: its request, state and configuration."""
    folder = workspace.runs / run_id
    places.add_all(folder / name for name in _RUN_RECORDS)


def add_resume_files(workspace: Workspace, places: FileLayout, run_id: str) -> None:
    """Adds the files needed to resume a run: its records, last checkpoint and metrics."""
    point = find_resume_point(workspace, run_id)
    resumed = RunFolder(workspace.runs / run_id)
    for run in chain([resumed], resumed.earlier_runs()):
        add_run_records(workspace, places, run.run_id)
        if run.run_id == point.run_id:
            break
    places.add_folder(point.checkpoint)
    places.add_all([RunFolder(workspace.runs / point.run_id).events])


def add_card_inputs(workspace: Workspace, places: FileLayout, model: ModelLocation) -> None:
    """Adds the inputs of an export's model card: earlier runs, their rows, and evaluations."""
    for stage in _stages(workspace, model):
        if stage.folder != model.folder and not stage.is_gguf:
            places.add_folder(stage.folder, most_bytes=_SMALL_BYTES)
        _add_checkpoint_run(workspace, places, stage.folder)
        if stage.record is not None:
            places.add_all([RunFolder(workspace.runs / stage.record.run_id).events])
        manifest = _optional_manifest(stage.folder)
        if manifest is not None and len(manifest.inputs) > 1:
            rows = manifest.inputs[1]
            places.add_all([Path(rows.path)])
            _add_manifests(workspace, places, rows)
    whole = model.record.text_part_of if model.record is not None else None
    if whole is not None and Path(whole.location).is_dir():
        places.add_folder(Path(whole.location))
    for file in sorted(workspace.runs.glob(f"*/{RESULT_FILE}")):
        places.add(file)
        add_run_records(workspace, places, file.parent.name)
        evaluation = _read_optional(file, Evaluation)
        if evaluation is not None and _is_same_model(workspace, evaluation.result.model, model):
            places.add_all([workspace.path(evaluation.result.rollouts)])


def _stages(workspace: Workspace, model: ModelLocation) -> Iterator[ModelLocation]:
    """Yields a model and the models that it was trained from, as far as they still exist."""
    seen = set[str]()
    location: ModelLocation | None = model
    while location is not None and location.is_local and location.location not in seen:
        if len(seen) == _MOST_STAGES:
            return
        seen.add(location.location)
        yield location
        record = location.record
        if record is None:
            return
        config = (
            _read_optional(workspace.runs / record.run_id / "config.json", dict[str, Any]) or {}
        )
        section: Mapping[str, Any] = config.get("model") or {}
        name = section.get("path") or record.base_model
        location = None
        with suppress(EngineError):
            location = locate_model(workspace, name)


def _add_manifests(workspace: Workspace, places: FileLayout, rows: FileRecord) -> None:
    """Adds the manifests in the lineage of a row file, without the files they describe."""
    waiting, seen = [rows], {rows.path}
    while waiting and len(seen) <= _MOST_MANIFESTS:
        record = waiting.pop(0)
        path = Path(record.path)
        is_first = record is rows
        add_tags(workspace, places, path, sha256=record.sha256, has_copies=is_first)
        places.add_manifests(path)
        manifest = _optional_manifest(path)
        for source in manifest.inputs if manifest is not None else []:
            if source.path not in seen:
                seen.add(source.path)
                waiting.append(source)


def _add_checkpoint_run(workspace: Workspace, places: FileLayout, folder: Path) -> None:
    """Adds the records of a checkpoint's run, if the folder is a checkpoint."""
    run = folder.parent.parent
    if folder.parent.name == CHECKPOINTS and run.parent == workspace.runs:
        add_run_records(workspace, places, run.name)


def _is_same_model(workspace: Workspace, name: str, model: ModelLocation) -> bool:
    with suppress(EngineError):
        return locate_model(workspace, name).location == model.location
    return False


def _optional_manifest(path: Path) -> Manifest | None:
    with suppress(EngineError):
        return read_manifest(path)
    return None


def _read_optional(path: Path, kind: type[_Kind]) -> _Kind | None:
    with suppress(OSError, DataError):
        return read_json(path, kind)
    return None


def add_tags(
    workspace: Workspace,
    places: FileLayout,
    path: Path,
    *,
    sha256: str | None = None,
    has_copies: bool = False,
) -> None:
    """Adds the version records of a file's tags, and of its content if `sha256` is given.

    With `has_copies`, also adds the stored copy of that content.
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
