"""The licence of a base model, read from its own model card and never guessed."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from stillroom.demo import DEMO_MODELS
from stillroom.models.resolve import ModelLocation
from stillroom.yaml_text import read_yaml

_CARD = "README.md"
_OWN = "apache-2.0"
"""Of the demo's models, which are part of this package."""
_LONGEST = 200_000


@dataclass(frozen=True, slots=True)
class Licence:
    """The licence fields of a model card's header."""

    id: str
    name: str | None = None
    """The name of a custom licence (`id` is `other`)."""
    link: str | None = None


def licence_of(base: ModelLocation | None) -> Licence | None:
    """Returns the licence that the base's own model card names, or None if it names none."""
    if base is None:
        return None
    if base.name in DEMO_MODELS:
        return Licence(_OWN)
    card = base.folder / _CARD if base.is_local else _card_on_hub(base.location)
    if card is None or not card.is_file():
        return None
    return read_licence(card.read_text(encoding="utf-8", errors="replace")[:_LONGEST])


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
