"""The files of models: their weights, what their runs recorded, and what a model card says."""

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

_OF_A_RUN = ("run.json", "request.json", "config.json", "given_config.yml", "given_config.json")
_SMALL_BYTES = 1 << 20
"""What a card needs of earlier models is smaller: configurations, records, licences."""
_TOKENIZER_BYTES = 64 << 20
_MOST_STAGES = 12
_MOST_MANIFESTS = 40

_Kind = TypeVar("_Kind")


def add_model(workspace: Workspace, places: FileLayout, model: ModelLocation) -> None:
    """Adds a local model, with its run's records and, of an adapter, its base model."""
    if not model.is_local:
        return
    places.add_folder(model.folder)
    _name(workspace, places, model)
    _add_run_of(workspace, places, model.folder)
    if model.is_adapter:
        base = adapter_base(workspace, model)
        add_model(workspace, places, base)
    record = model.record
    whole = record.text_part_of if record is not None else None
    if whole is not None and (folder := Path(whole.location)).is_absolute() and folder.is_dir():
        # Only its configuration and tokenizer are read, but by an export.
        places.add_folder(folder, most_bytes=_SMALL_BYTES)


def add_tokenizer(workspace: Workspace, places: FileLayout, name: str) -> None:
    """Adds the small files of a local model whose weights a server has."""
    with suppress(EngineError):
        model = locate_model(workspace, name)
        if model.is_local:
            places.add_folder(model.folder, most_bytes=_TOKENIZER_BYTES)
            _name(workspace, places, model)


def _name(workspace: Workspace, places: FileLayout, model: ModelLocation) -> None:
    """Lets the name of a model in config.yml or a request lead to its folder on the machine."""
    named = workspace.path(model.name)
    if named.is_dir() and not RunFolder(named).is_run:
        places.name(model.name, model.folder)


def add_run(workspace: Workspace, places: FileLayout, run_id: str) -> None:
    """Adds the small files of a run's folder, by which the machine recognises it as a run."""
    folder = workspace.runs / run_id
    places.add_all(folder / name for name in _OF_A_RUN)


def add_resumed(workspace: Workspace, places: FileLayout, run_id: str) -> None:
    """Adds what a run needs to resume another one: its checkpoint and its metrics."""
    point = find_resume_point(workspace, run_id)
    resumed = RunFolder(workspace.runs / run_id)
    for run in chain([resumed], resumed.earlier_runs()):
        add_run(workspace, places, run.run_id)
        if run.run_id == point.run_id:
            break
    places.add_folder(point.checkpoint)
    places.add_all([RunFolder(workspace.runs / point.run_id).events])


def add_history(workspace: Workspace, places: FileLayout, model: ModelLocation) -> None:
    """Adds what the card of an export says: the runs before, their rows, the evaluations."""
    for stage in _stages(workspace, model):
        if stage.folder != model.folder:
            places.add_folder(stage.folder, most_bytes=_SMALL_BYTES)
        _add_run_of(workspace, places, stage.folder)
        if stage.record is not None:
            places.add_all([RunFolder(workspace.runs / stage.record.run_id).events])
        manifest = _manifest(stage.folder)
        if manifest is not None and len(manifest.inputs) > 1:
            rows = manifest.inputs[1]
            places.add_all([Path(rows.path)])
            _add_manifests(workspace, places, rows)
    whole = model.record.text_part_of if model.record is not None else None
    if whole is not None and Path(whole.location).is_dir():
        places.add_folder(Path(whole.location))
    for file in sorted(workspace.runs.glob(f"*/{RESULT_FILE}")):
        places.add(file)
        add_run(workspace, places, file.parent.name)
        evaluation = _document(file, Evaluation)
        if evaluation is not None and _is_of(workspace, evaluation.result.model, model):
            places.add_all([workspace.path(evaluation.result.rollouts)])


def _stages(workspace: Workspace, model: ModelLocation) -> Iterator[ModelLocation]:
    """Yields a model and those it was trained from, as far as they still exist."""
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
        config = _document(workspace.runs / record.run_id / "config.json", dict[str, Any]) or {}
        section: Mapping[str, Any] = config.get("model") or {}
        name = section.get("path") or record.base_model
        location = None
        with suppress(EngineError):
            location = locate_model(workspace, name)


def _add_manifests(workspace: Workspace, places: FileLayout, rows: FileRecord) -> None:
    """Adds the manifests that say how rows were made, without the files they are about."""
    waiting, seen = [rows], {rows.path}
    while waiting and len(seen) <= _MOST_MANIFESTS:
        record = waiting.pop(0)
        path = Path(record.path)
        is_first = record is rows
        add_tags(workspace, places, path, sha256=record.sha256, has_copies=is_first)
        places.add_manifests(path)
        manifest = _manifest(path)
        for source in manifest.inputs if manifest is not None else []:
            if source.path not in seen:
                seen.add(source.path)
                waiting.append(source)


def _add_run_of(workspace: Workspace, places: FileLayout, folder: Path) -> None:
    """Adds the records of the run to whose checkpoints a folder belongs, if it is one."""
    run = folder.parent.parent
    if folder.parent.name == CHECKPOINTS and run.parent == workspace.runs:
        add_run(workspace, places, run.name)


def _is_of(workspace: Workspace, name: str, model: ModelLocation) -> bool:
    with suppress(EngineError):
        return locate_model(workspace, name).location == model.location
    return False


def _manifest(path: Path) -> Manifest | None:
    with suppress(EngineError):
        return read_manifest(path)
    return None


def _document(path: Path, kind: type[_Kind]) -> _Kind | None:
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
    """Adds the records of the tags of a file, and of its content if that is known.

    With `has_copies` the kept copy of that content is added too.
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
