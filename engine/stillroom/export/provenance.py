"""The operations that made training rows, followed back through manifests by content hash."""

import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from stillroom import bounds
from stillroom.data.row_files import read_row_lines
from stillroom.demo import DEMO_MODELS
from stillroom.errors import DataError
from stillroom.lineage import (
    AnsweringModel,
    FileRecord,
    Manifest,
    is_as_recorded,
    read_manifest,
)
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.versions import copy_of, versions_with
from stillroom.yaml_text import read_yaml

ROLLOUTS = "generate_rollouts"
_CONVERSIONS = ("convert_rollouts", "make_dpo_pairs")
"""The operations that make training rows of rollouts."""
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
    other_models: tuple[str, ...] = ()
    """Further models that wrote rows, each in its own name, as in logs of several models."""

    @property
    def authors(self) -> tuple[str, ...]:
        """All models that wrote rows, as far as is known, each once."""
        return (
            () if self.teacher is None else tuple(dict.fromkeys((self.teacher, *self.other_models)))
        )


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
        first, *others = [None] if is_made else _foreign(manifest) or [None]
        yield DataStep(
            operation=manifest.operation,
            output=public_name(workspace, record.path),
            counts=manifest.counts,
            teacher=_teacher(workspace, manifest.request) if is_made else first,
            provider=manifest.request.get("provider") if is_made else None,
            answered_by=tuple(_answerers(manifest)),
            other_models=tuple(name for name in others if name is not None),
        )
        # The path too: a filter that keeps everything writes the same content elsewhere.
        new = [
            source for source in _row_inputs(manifest) if (source.path, source.sha256) not in seen
        ]
        waiting += new
        seen.update((source.path, source.sha256) for source in new)


def answering_models(
    workspace: Workspace, rows: FileRecord, training_ids: Collection[str]
) -> frozenset[str] | None:
    """Returns the names of the models that answered training rows, as their rollouts give them.

    These are the names by which the models were called, and those by which endpoints answered.
    `training_ids` are the ids of the rollouts that the rows were made of; without any, all rollouts
    that were converted count. None if the rollouts have changed since, or do not say it.
    """
    answering, waiting, seen = set[str](), [rows], set[tuple[str, str | None]]()
    while waiting and len(seen) <= _MOST_FILES:
        record = waiting.pop()
        manifest = _manifest_of(workspace, record)
        if (record.path, record.sha256) in seen or manifest is None:
            continue
        seen.add((record.path, record.sha256))
        inputs = _row_inputs(manifest)
        if manifest.operation not in _CONVERSIONS:
            waiting += inputs
            continue
        for source in inputs:
            path = file_with_content(workspace, source)
            if path is None:
                return None
            for line in read_row_lines(path):
                row = _AnsweredRow.read(line.data)
                if row is None or (training_ids and row.id not in training_ids):
                    continue
                if not (names := row.names):
                    return None
                answering |= {public_name(workspace, name) for name in names}
    return frozenset(answering) or None


class _Named(msgspec.Struct):
    model: str | None = None


class _AnsweredRow(msgspec.Struct):
    """The fields of a rollout that say who answered."""

    id: str | None = None
    teacher: _Named | None = None
    answered_by: list[_Named] | None = None

    @classmethod
    def read(cls, data: bytes) -> "_AnsweredRow | None":
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError):
            return None  # no rollout, which was not converted either

    @property
    def names(self) -> set[str]:
        named = [*(self.answered_by or ()), *([self.teacher] if self.teacher else [])]
        return {one.model for one in named if one.model}


def file_with_content(workspace: Workspace, record: FileRecord) -> Path | None:
    """Returns a file with a recorded content: the file itself, or a kept version of it."""
    kept = (
        copy_of(workspace.root, version) for version in versions_with(workspace.root, record.sha256)
    )
    return next((path for path in (record.file, *kept) if is_as_recorded(path, record)), None)


def _row_inputs(manifest: Manifest) -> list[FileRecord]:
    """Returns the inputs without those that rows were only compared with.

    Rows that a filter kept out of the training rows, such as held-out prompts, are not inputs.
    """
    compared = {Path(name).parts for name in manifest.request.get("decontaminate") or ()}
    compared.discard(Path(str(manifest.request.get("input"))).parts)
    # The project may have moved since, so that the ends of the paths are all that is sure.
    return [
        source
        for source in manifest.inputs
        if not any(Path(source.path).parts[-len(parts) :] == parts for parts in compared)
    ]


def _foreign(manifest: Manifest) -> list[str | None]:
    """Returns the models that answered in another system, whose rows were converted."""
    return [model.name for model in manifest.models if model.role == "policy"]


def _answerers(manifest: Manifest) -> Iterator[AnsweringModel]:
    for model in manifest.models:
        if model.role == "policy":
            yield from model.answered_by


def _manifest_of(workspace: Workspace, record: FileRecord) -> Manifest | None:
    """Returns the manifest of a recorded content, or None if the file has other content now."""
    try:
        manifest = read_manifest(record.file)
    except DataError:
        manifest = None  # a card says less, rather than nothing
    # Rollouts are only ever added to, under the same settings.
    if manifest is not None and (
        manifest.output.sha256 == record.sha256 or manifest.operation == ROLLOUTS
    ):
        return manifest
    kept = (version.manifest for version in versions_with(workspace.root, record.sha256))
    manifest = next((manifest for manifest in kept if manifest is not None), None)
    return None if manifest is None else msgspec.convert(manifest, Manifest)


def _teacher(workspace: Workspace, request: dict[str, Any]) -> str:
    provider = request.get("provider", "")
    model = public_name(workspace, request.get("model", ""))
    is_named = model.startswith(f"{provider}/") or provider == "hf"
    return model if is_named else f"{provider}/{model}"


_CARD = "README.md"
_OWN = "apache-2.0"
"""Of the demo's models, which are part of this package."""
_LONGEST = bounds.LICENCE.most
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
_LICENCE_TEXTS = {
    "apache license version 2.0": "apache-2.0",
    "mit license": "mit",
    "permission is hereby granted, free of charge": "mit",
    "gnu general public license version 3": "gpl-3.0",
}
"""Words with which the texts of common licences begin, and the licences' ids."""


@dataclass(frozen=True, slots=True)
class Licence:
    """The licence fields of a model card's header."""

    id: str
    name: str | None = None
    """The name of a custom licence (`id` is `other`)."""
    link: str | None = None
    source: str = "its maker"
    """Who or what says so."""


def licence_of(base: ModelLocation | None, stated: str | None = None) -> Licence | None:
    """Returns the licence of the base: what its model card names, else what its LICENSE file is.

    If neither says one, it is what the user `stated`; None if nobody did.
    """
    found = None
    if base is not None and base.name in DEMO_MODELS:
        found = Licence(_OWN)
    elif base is not None:
        card = base.folder / _CARD if base.is_local else _card_on_hub(base.location)
        if card is not None and card.is_file():
            found = read_licence(_beginning(card))
        if found is None and base.is_local:
            found = _licence_file(base.folder)
    return found or (None if stated is None else Licence(stated, source="whoever exported it"))


def _beginning(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.read(_LONGEST)


def _licence_file(folder: Path) -> Licence | None:
    """Returns the licence whose text is in a model's folder; `other` if it is no common one."""
    for name in _LICENCE_FILES:
        if (folder / name).is_file():
            text = _beginning(folder / name)
            begins = " ".join(text[:1000].casefold().split())
            known = (licence for words, licence in _LICENCE_TEXTS.items() if words in begins)
            return Licence(next(known, "other"), link=name, source=f"{name} in its folder")
    return None


def read_licence(card: str) -> Licence | None:
    """Returns the licence in the YAML header of a model card."""
    opening, _, rest = card.removeprefix("\ufeff").partition("---")
    header, end, _ = rest.partition("\n---")
    if opening.strip() or not end:
        return None
    try:
        loaded: Any = read_yaml(header)
    except (yaml.YAMLError, ValueError):
        return None
    if not isinstance(loaded, dict):
        return None
    fields = cast("dict[str, Any]", loaded)
    named = fields.get("license")
    listed: list[Any] = named if isinstance(named, list) else [named]
    ids = [text for text in listed if isinstance(text, str) and text]
    if not ids:
        return None
    return Licence(", ".join(ids), _text(fields, "license_name"), _text(fields, "license_link"))


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) and value else None


def _card_on_hub(hub_id: str) -> Path | None:
    # It comes with transformers, without which no hub model is loaded.
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(hub_id, _CARD))
    # Offline, gated, or a model without a card: then the licence is not known here.
    except (OSError, hub.errors.EntryNotFoundError):
        return None
