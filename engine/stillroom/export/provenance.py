"""The operations that made training rows, followed back through manifests by content hash."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import DataError
from stillroom.home_paths import as_found
from stillroom.lineage import AnsweringModel, FileRecord, Manifest, read_manifest
from stillroom.settings import Workspace
from stillroom.versions import versions_with

ROLLOUTS = "generate_rollouts"
_MOST_FILES = 40


@dataclass(frozen=True, slots=True)
class DataStep:
    """One operation on the way from prompts to training rows."""

    operation: str
    output: str
    counts: dict[str, int]
    teacher: str | None = None
    """The model that answered, if the operation made rollouts."""
    provider: str | None = None
    answered_by: tuple[AnsweringModel, ...] = ()
    """The models that, according to the endpoint, answered in the teacher's name."""


def public_name(workspace: Workspace, name: str) -> str:
    """Returns a model's or file's name without this machine's folders."""
    path = Path(name)
    if not path.is_absolute():
        return name
    shown = workspace.shown(path)
    return path.name if Path(shown).is_absolute() else shown


def data_steps(workspace: Workspace, rows: FileRecord) -> Iterator[DataStep]:
    """Yields the operations that made these rows, latest first, as far as manifests exist."""
    waiting, seen = [rows], {(rows.path, rows.sha256)}
    while waiting and len(seen) <= _MOST_FILES:
        record = waiting.pop(0)
        manifest = _manifest_of(workspace, record)
        if manifest is None:
            continue
        is_made = manifest.operation == ROLLOUTS
        yield DataStep(
            operation=manifest.operation,
            output=public_name(workspace, record.path),
            counts=manifest.counts,
            teacher=_teacher(workspace, manifest.request) if is_made else _foreign(manifest),
            provider=manifest.request.get("provider") if is_made else None,
            answered_by=tuple(_answerers(manifest)),
        )
        # The path too: a filter that keeps everything writes the same content elsewhere.
        new = [source for source in manifest.inputs if (source.path, source.sha256) not in seen]
        waiting += new
        seen.update((source.path, source.sha256) for source in new)


def _foreign(manifest: Manifest) -> str | None:
    """Returns the model that answered in another system, whose rows were converted."""
    return next((model.name for model in manifest.models if model.role == "policy"), None)


def _answerers(manifest: Manifest) -> Iterator[AnsweringModel]:
    for model in manifest.models:
        if model.role == "policy":
            yield from model.answered_by


def _manifest_of(workspace: Workspace, record: FileRecord) -> Manifest | None:
    """Returns the manifest of a recorded content, or None if the file has other content now."""
    try:
        beside = read_manifest(as_found(record.path))
    except DataError:
        beside = None  # a card says less, rather than nothing
    # Rollouts are only ever added to, under the same settings.
    if beside is not None and (
        beside.output.sha256 == record.sha256 or beside.operation == ROLLOUTS
    ):
        return beside
    kept = (version.manifest for version in versions_with(workspace.root, record.sha256))
    manifest = next((manifest for manifest in kept if manifest is not None), None)
    return None if manifest is None else msgspec.convert(manifest, Manifest)


def _teacher(workspace: Workspace, request: dict[str, Any]) -> str:
    provider = request.get("provider", "")
    model = public_name(workspace, request.get("model", ""))
    is_named = model.startswith(f"{provider}/") or provider == "hf"
    return model if is_named else f"{provider}/{model}"
