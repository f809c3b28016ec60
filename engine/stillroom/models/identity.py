"""Which model it was: what a manifest says of a model that was used."""

import importlib
from pathlib import Path
from typing import Any

from stillroom.lineage import ModelRecord, record_folder
from stillroom.models.resolve import ModelLocation


def identify(location: ModelLocation, *, role: str) -> ModelRecord:
    """Returns a model's record: the hash of a local folder's files, the commit of a hub model."""
    if location.is_local:
        sha256 = record_folder(location.folder).sha256
        return ModelRecord(role=role, name=location.name, location=location.location, sha256=sha256)
    revision = _hub_commit(location.location)
    return ModelRecord(role=role, name=location.name, location=location.location, revision=revision)


def _hub_commit(hub_id: str) -> str | None:
    """Returns the commit that was loaded from the hub's cache; None where nothing is cached."""
    # It comes with transformers, without which no hub model is loaded.
    hub: Any = importlib.import_module("huggingface_hub")
    cached = hub.try_to_load_from_cache(hub_id, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None
