"""Traces training rows to their origin by the hashes in manifests, and finds licences."""

import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

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
    matches_record,
    read_manifest,
)
from stillroom.models.gguf.header import read_header
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.teachers.providers import provider_at
from stillroom.versions import copy_of, versions_with
from stillroom.yaml_text import read_yaml

ROLLOUTS = "generate_rollouts"
_CONVERSIONS = ("convert_rollouts", "make_dpo_pairs")
"""The operations that turn rollouts into training rows."""
_MAX_FILES = 40


@dataclass(frozen=True, slots=True)
class DataStep:
    """One operation on the way from prompts to training rows."""

    operation: str
    output: str
    counts: dict[str, int]
    teacher: str | None = None
    """The model that answered, if the operation generated rollouts."""
    provider: str | None = None
    answered_by: tuple[AnsweringModel, ...] = ()
    """The models that answered under the teacher's name, as the endpoint reported."""
    other_models: tuple[str, ...] = ()
    """Other models that wrote rows, e.g. in logs of several models."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of rows that it left out, by reason."""

    @property
    def authors(self) -> tuple[str, ...]:
        """The known models that wrote rows, without duplicates."""
        return (
            () if self.teacher is None else tuple(dict.fromkeys((self.teacher, *self.other_models)))
        )


def public_name(workspace: Workspace, name: str) -> str:
    """Returns the name of a model or file without local folders."""
    path = Path(name)
    if not path.is_absolute():
        return name
    display_path = workspace.shown(path)
    return path.name if Path(display_path).is_absolute() else display_path


def data_steps(workspace: Workspace, rows: FileRecord) -> Iterator[DataStep]:
    """Yields the operations that made these rows, latest first, as far as manifests exist."""
    waiting, seen = [rows], {(rows.path, rows.sha256)}
    while waiting and len(seen) <= _MAX_FILES:
        record = waiting.pop(0)
        manifest = _manifest_of(workspace, record)
        if manifest is None:
            continue
        is_generated = manifest.operation == ROLLOUTS
        first, *others = [None] if is_generated else _imported_models(manifest) or [None]
        yield DataStep(
            operation=manifest.operation,
            output=public_name(workspace, record.path),
            counts=manifest.counts,
            left_out=manifest.left_out,
            teacher=_teacher(workspace, manifest.request) if is_generated else first,
            provider=_provider(manifest.request) if is_generated else None,
            answered_by=tuple(_reported_models(manifest)),
            other_models=tuple(name for name in others if name is not None),
        )
        # The path is compared too: a filter that keeps all rows writes the same content.
        new_inputs = [
            source for source in _row_inputs(manifest) if (source.path, source.sha256) not in seen
        ]
        waiting += new_inputs
        seen.update((source.path, source.sha256) for source in new_inputs)


def answering_models(
    workspace: Workspace, rows: FileRecord, training_ids: Collection[str]
) -> frozenset[str] | None:
    """Returns the names of the models that answered training rows, according to the rollouts.

    These are the names used in calls and the names that endpoints reported. `training_ids` are the
    ids of the rollouts behind the rows; if it is empty, all converted rollouts count. Returns None
    if the rollouts have changed since, or do not name a model.
    """
    answering, waiting, seen = set[str](), [rows], set[tuple[str, str | None]]()
    while waiting and len(seen) <= _MAX_FILES:
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


class _NamedModel(msgspec.Struct):
    model: str | None = None


class _AnsweredRow(msgspec.Struct):
    """The fields of a rollout that name the models."""

    id: str | None = None
    teacher: _NamedModel | None = None
    answered_by: list[_NamedModel] | None = None

    @classmethod
    def read(cls, data: bytes) -> "_AnsweredRow | None":
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError):
            return None  # not a rollout, so it was not converted either

    @property
    def names(self) -> set[str]:
        models = [*(self.answered_by or ()), *([self.teacher] if self.teacher else [])]
        return {model.model for model in models if model.model}


def file_with_content(workspace: Workspace, record: FileRecord) -> Path | None:
    """Returns a file that still has the recorded content: the file itself, or a tagged copy."""
    copies = (
        copy_of(workspace.root, version) for version in versions_with(workspace.root, record.sha256)
    )
    return next((path for path in (record.file, *copies) if matches_record(path, record)), None)


def _row_inputs(manifest: Manifest) -> list[FileRecord]:
    """Returns the inputs that rows came from.

    Files that a filter used for decontamination, such as held-out prompts, are left out.
    """
    held_out_paths = {Path(name).parts for name in manifest.request.get("decontaminate") or ()}
    inputs = manifest.request.get("input")
    for name in inputs if isinstance(inputs, list) else [inputs]:
        held_out_paths.discard(Path(str(name)).parts)
    # Only the ends of the paths are compared, since the project may have been moved.
    return [
        source
        for source in manifest.inputs
        if not any(Path(source.path).parts[-len(parts) :] == parts for parts in held_out_paths)
    ]


def _imported_models(manifest: Manifest) -> list[str | None]:
    """Returns the models that answered in rows imported from other systems."""
    return [model.name for model in manifest.models if model.role == "policy"]


def _reported_models(manifest: Manifest) -> Iterator[AnsweringModel]:
    for model in manifest.models:
        if model.role == "policy":
            yield from model.answered_by


def _manifest_of(workspace: Workspace, record: FileRecord) -> Manifest | None:
    """Returns the manifest of a file with this recorded content; None if there is none."""
    try:
        manifest = read_manifest(record.file)
    except DataError:
        manifest = None  # the card is then less complete
    # Rollouts files only grow, with the same settings.
    if manifest is not None and (
        manifest.output.sha256 == record.sha256 or manifest.operation == ROLLOUTS
    ):
        return manifest
    tagged_manifests = (
        version.manifest for version in versions_with(workspace.root, record.sha256)
    )
    manifest = next((manifest for manifest in tagged_manifests if manifest is not None), None)
    return None if manifest is None else msgspec.convert(manifest, Manifest)


def _provider(request: dict[str, Any]) -> str | None:
    """Returns a request's provider; for an unknown base_url, a description of the endpoint."""
    provider, address = request.get("provider"), request.get("base_url")
    if not address or provider is None:
        return provider
    return _known_provider(address) or f"an endpoint with the API of {provider}"


def _known_provider(address: str) -> str | None:
    """Returns the provider at an address; None for an unknown address."""
    return provider_at(urlsplit(address).hostname or "")


def _teacher(workspace: Workspace, request: dict[str, Any]) -> str:
    """Returns the display name of a request's model: `provider/model`, or the model's name alone.

    Local models, and models at an address of no known provider, have only their name.
    """
    provider = request.get("provider", "")
    if address := request.get("base_url"):
        provider = _known_provider(address)
    model = public_name(workspace, request.get("model", ""))
    is_named = provider in (None, "hf") or model.startswith(f"{provider}/")
    return model if is_named else f"{provider}/{model}"


_CARD = "README.md"
_DEMO_LICENCE = "apache-2.0"
"""The licence of the demo models, which are part of this package."""
_MAX_LICENCE_CHARS = bounds.LICENCE.limit
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
_LICENCE_TEXTS = {
    "apache license version 2.0": "apache-2.0",
    "mit license": "mit",
    "permission is hereby granted, free of charge": "mit",
    "gnu general public license version 3": "gpl-3.0",
}
"""The ids of common licences, by words near the beginning of their texts."""


@dataclass(frozen=True, slots=True)
class Licence:
    """The licence fields of a model card's header."""

    id: str
    name: str | None = None
    """The name of a custom licence (`id` is `other`)."""
    link: str | None = None
    source: str = "its publisher"
    """The origin of this information, such as a file or the user."""


def licence_of(base: ModelLocation | None, stated: Licence | None = None) -> Licence | None:
    """Returns the licence of the base from its model card, else from its LICENSE file.

    If neither states a licence, returns `stated`, the one that the user gave.
    """
    licence = None
    if base is not None and base.name in DEMO_MODELS:
        licence = Licence(_DEMO_LICENCE)
    elif base is not None and base.is_gguf:
        licence = _licence_in_gguf(base.path)
    elif base is not None:
        card = base.path / _CARD if base.is_local else _card_on_hub(base.location)
        if card is not None and card.is_file():
            licence = read_licence(_read_beginning(card))
        if licence is None and base.is_local:
            licence = _licence_file(base.path)
    return licence or stated


def _licence_in_gguf(path: Path) -> Licence | None:
    """Returns the licence in the metadata of a GGUF file; None if it states none."""
    values = read_header(path).values
    fields = (values.get(f"general.license{part}") for part in ("", ".name", ".link"))
    licence_id, name, link = (text if isinstance(text, str) and text else None for text in fields)
    if licence_id is None:
        return None
    return Licence(licence_id, name, link, source=f"the metadata of {path.name}")


def _read_beginning(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.read(_MAX_LICENCE_CHARS)


def _licence_file(folder: Path) -> Licence | None:
    """Returns the licence of a LICENSE file in a model's folder; `other` if it is uncommon."""
    for name in _LICENCE_FILES:
        if (folder / name).is_file():
            text = _read_beginning(folder / name)
            beginning = " ".join(text[:1000].casefold().split())
            ids = (licence for phrase, licence in _LICENCE_TEXTS.items() if phrase in beginning)
            return Licence(next(ids, "other"), link=name, source=f"{name} in its folder")
    return None


def read_licence(card: str) -> Licence | None:
    """Returns the licence in the YAML header of a model card."""
    opening, _, after_opening = card.removeprefix("\ufeff").partition("---")
    header, end, _ = after_opening.partition("\n---")
    if opening.strip() or not end:
        return None
    try:
        loaded: Any = read_yaml(header)
    except (yaml.YAMLError, ValueError):
        return None
    if not isinstance(loaded, dict):
        return None
    fields = cast("dict[str, Any]", loaded)
    value = fields.get("license")
    values: list[Any] = value if isinstance(value, list) else [value]
    ids = [text for text in values if isinstance(text, str) and text]
    if not ids:
        return None
    return Licence(", ".join(ids), _text(fields, "license_name"), _text(fields, "license_link"))


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) and value else None


def _card_on_hub(hub_id: str) -> Path | None:
    """Downloads the model card of a hub model; returns None if that is not possible."""
    # huggingface_hub is installed with transformers, which every hub model needs.
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(hub_id, _CARD))
    # Offline, a gated model, or a model without a card: the licence is then unknown.
    except (OSError, hub.errors.EntryNotFoundError):
        return None
