"""Settings that transformers 5 renamed, written under their old names too for older readers."""

from pathlib import Path
from typing import Any

import msgspec

from stillroom.files import write_json


def write_old_names(folder: Path) -> None:
    """Adds the settings' old names to a model folder; transformers 5 reads either name."""
    for name, change in (("config.json", model_settings), ("tokenizer_config.json", _tokenizer)):
        path = folder / name
        if path.is_file():
            write_json(path, change(msgspec.json.decode(path.read_bytes())))


def model_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of config.json with their old names beside the new ones.

    Without `rope_theta` and `rope_scaling` older readers take other positions, and say nothing.
    """
    old: dict[str, Any] = {}
    if "dtype" in settings:
        old["torch_dtype"] = settings["dtype"]
    rope: dict[str, Any] = settings.get("rope_parameters") or {}
    # Models with several kinds of layers have one entry for each, and never had old names.
    if "rope_theta" in rope:
        old["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            old["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {**old, **settings}


def _tokenizer(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("tokenizer_class") != "TokenizersBackend":
        return settings
    return {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}
