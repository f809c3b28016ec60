"""Exports a trained text part as the multimodal model that it belongs to.

Everything else is copied: the weights of the other parts byte for byte, the names and shards of
the weights, the configuration, the tokenizer and the processor.
"""

import importlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from stillroom.errors import ModelError, RunError
from stillroom.export.provenance import public_name
from stillroom.export.request import ExportPlan
from stillroom.files import write_json
from stillroom.lineage import ModelRecord, record_folder
from stillroom.models.load import load_tokenizer, stop_token_ids
from stillroom.models.multimodal import language_model_name, multimodal_config
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COPIED = (
    "*config*.json", "*token*.json", "chat_template.json", "*.jinja", "additional_chat_templates/*",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*",
)  # fmt: skip
_NOT_COPIED = ("adapter_config.json",)
_TEXT_ONLY = "export only its text part with format text"


@dataclass(frozen=True, slots=True)
class MultimodalBase:
    """A multimodal model whose text part was trained."""

    name: str
    """The display name, without local folders."""
    folder: Path
    """The local folder of its files; for a hub model, in the hub's cache."""
    location: ModelLocation


def find_multimodal_base(workspace: Workspace, plan: ExportPlan) -> MultimodalBase | None:
    """Returns the multimodal model whose text part is exported; None for a text-only model.

    Raises ModelError if it was moved or changed after training.
    """
    record = plan.text_part_of
    source = plan.base or plan.checkpoint
    if record is not None:
        location = str(record.folder or record.location)
        source = ModelLocation(record.name, location, is_local=record.folder is not None)
    elif not is_multimodal(source):
        return None
    if source.is_local:
        _check_unchanged(source.path, record)
    folder = source.path if source.is_local else _download(source.location, record)
    return MultimodalBase(public_name(workspace, source.location), folder, source)


def is_multimodal(location: ModelLocation) -> bool:
    """Returns whether a model is multimodal, so that only its text part is loaded."""
    try:
        return multimodal_config(location) is not None
    except (OSError, ValueError, KeyError):
        return False  # loading the model reports the problem


def _check_unchanged(folder: Path, record: ModelRecord | None) -> None:
    """Raises ModelError if the model's folder differs from its record in training."""
    if record is None:
        return
    if not folder.is_dir():
        raise ModelError(
            f"the multimodal model {record.name!r}, whose text part was trained, no longer exists "
            f"at {folder}",
            f"restore it, or {_TEXT_ONLY}",
        )
    if record.sha256 is not None and record_folder(folder).sha256 != record.sha256:
        raise ModelError(
            f"the multimodal model {folder} has changed since its text part was trained",
            f"restore the original files, or {_TEXT_ONLY}",
        )


def _download(hub_id: str, record: ModelRecord | None) -> Path:
    """Downloads the files of the revision used in training, and returns their cache folder."""
    hub: Any = importlib.import_module("huggingface_hub")
    revision = record.revision if record is not None else None
    try:
        return Path(
            hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=["*.safetensors", _INDEX, *_COPIED]
            )
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the files of {hub_id!r}, whose text part was trained, cannot be downloaded: {error}",
            f"try again with internet access (and HF_TOKEN if it is gated), or {_TEXT_ONLY}",
        ) from error


@dataclass(frozen=True, slots=True)
class OtherParts:
    """The parts of a multimodal model that were copied unchanged."""

    names: Sequence[str]
    """The names of the parts in the files, e.g. `vision_tower`."""
    num_weights: int

    def sentence(self, base: str) -> str:
        """Returns a sentence about the parts for the model card."""
        return f"{', '.join(self.names)}: {self.num_weights} weights, copied unchanged from {base}"


def write_multimodal(
    base: MultimodalBase, model: Any, tokenizer: Any, target: Path, *, is_converted: bool = False
) -> OtherParts:
    """Writes the multimodal model with `model` as its text part to the folder `target`.

    Unless the number format is converted, untrained text weights also keep their bytes. Raises
    ModelError if the weights do not fit together, and RunError if they cannot be written.
    """
    target.mkdir(exist_ok=True)
    files = _weight_files(base.folder)
    try:
        # As in save_pretrained: experts are one tensor in memory, but separate in the files.
        text = revert_weight_conversion(model, model.state_dict())
        others = _write_weights(base, text, files, target, is_converted)
        _check_copied(base.folder, target, others)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the weights of {base.name!r} cannot be written: {error}",
            "check the disk's free space and the model's .safetensors files",
        ) from error
    _copy_settings(base.folder, target)
    _write_settings(base, model, tokenizer, target)
    names = [name for keys in others.values() for name in keys]
    return OtherParts(sorted({_part_of(name) for name in names}), len(names))


def _weight_files(folder: Path) -> list[str]:
    """Returns the names of a model's weight files, chosen as transformers does."""
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    if (folder / _INDEX).is_file():
        return sorted(
            set(msgspec.json.decode((folder / _INDEX).read_bytes())["weight_map"].values())
        )
    raise ModelError(f"{folder} has no {_ONE_FILE}", "use a model with safetensors files")


def _write_weights(
    base: MultimodalBase,
    text: Mapping[str, Tensor],
    files: Sequence[str],
    target: Path,
    is_converted: bool,
) -> dict[str, list[str]]:
    """Writes the weight files with the trained text part; returns the other weights by file."""
    names = {file: _names_in(base.folder / file) for file in files}
    text_names = _text_names([name for file_names in names.values() for name in file_names], text)
    _check_none_missing(base, text, set(text_names.values()))
    num_bytes = 0
    for file in files:
        with safe_open(base.folder / file, "pt") as weights:
            tensors = {name: weights.get_tensor(name) for name in names[file]}
            metadata: dict[str, str] = weights.metadata() or {"format": "pt"}
        for name in tensors.keys() & text_names.keys():
            new = text[text_names[name]]
            if new.shape != tensors[name].shape:
                raise ModelError(
                    f"{name} of {base.name!r} has the shape {[*tensors[name].shape]}, "
                    f"but the trained weight has {[*new.shape]}",
                    _TEXT_ONLY,
                )
            written = new if is_converted else _weight_to_write(tensors[name], new)
            # clone: safetensors refuses to write tied weights, which share memory.
            tensors[name] = written.clone(memory_format=torch.contiguous_format)
        save_file(tensors, target / file, metadata=metadata)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (base.folder / _INDEX).is_file() and files != [_ONE_FILE]:
        index: dict[str, Any] = msgspec.json.decode((base.folder / _INDEX).read_bytes())
        index["metadata"] = {**index.get("metadata", {}), "total_size": num_bytes}
        write_json(target / _INDEX, index)
    return {
        file: [n for n in file_names if n not in text_names] for file, file_names in names.items()
    }


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def _text_names(names: Sequence[str], text: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the text weights among the names in the files, with their names in the text model."""
    renamed = {name: language_model_name(name) for name in names}
    if any(name != new for name, new in renamed.items()):
        renamed = {n: new for n, new in renamed.items() if n != new or n.startswith("lm_head.")}
    return {name: new for name, new in renamed.items() if new in text}


def _check_none_missing(
    base: MultimodalBase, text: Mapping[str, Tensor], in_files: set[str]
) -> None:
    """Raises ModelError if a weight of the text model is missing in the files.

    in_files: the names of the text weights that the files have. Of tied weights, which share
    memory, one is enough.
    """
    addresses = {text[name].data_ptr() for name in in_files}
    missing = sorted(name for name, tensor in text.items() if tensor.data_ptr() not in addresses)
    if missing:
        raise ModelError(
            f"the files of {base.name!r} have no entry for {len(missing)} weights of its "
            f"text part, e.g. {missing[0]}",
            _TEXT_ONLY,
        )


def _weight_to_write(original: Tensor, new: Tensor) -> Tensor:
    """Returns the weight to write: the original if the new weight is only a rounded copy of it."""
    if new.dtype == original.dtype:
        return new
    if torch.equal(original.to(new.dtype), new):
        return original
    return new.to(torch.promote_types(new.dtype, original.dtype))


def _check_copied(source: Path, target: Path, others: Mapping[str, Sequence[str]]) -> None:
    """Raises RunError unless the weights of the other parts were written byte for byte."""
    for file, names in others.items():
        with safe_open(source / file, "pt") as before, safe_open(target / file, "pt") as after:
            for name in names:
                old, new = before.get_tensor(name), after.get_tensor(name)
                if old.dtype != new.dtype or not torch.equal(_bytes_of(old), _bytes_of(new)):
                    raise RunError(
                        f"{name} in {target / file} differs from {source / file}",
                        "check the disk, and export again",
                    )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _copy_settings(source: Path, target: Path) -> None:
    """Copies the configuration, tokenizer, processor and licence files of a model."""
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in _NOT_COPIED:
                (target / path.relative_to(source)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(source))


def _write_settings(base: MultimodalBase, model: Any, tokenizer: Any, target: Path) -> None:
    """Updates the settings that training changed: number format, stop tokens, chat template."""
    _set_dtype(target / "config.json", str(model.dtype).removeprefix("torch."))
    file = target / "generation_config.json"
    generation: dict[str, Any] = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
    eos: Any = generation.get("eos_token_id")
    old_stops: list[Any] = eos if isinstance(eos, list) else [eos]
    stops = stop_token_ids(model, tokenizer)
    if frozenset(old_stops) != stops:
        write_json(file, {**generation, "eos_token_id": sorted(stops)})
    original = load_tokenizer(ModelLocation(base.name, str(base.folder), is_local=True))
    if (original.get_vocab(), original.chat_template) != (
        tokenizer.get_vocab(),
        tokenizer.chat_template,
    ):
        tokenizer.save_pretrained(target)


def _set_dtype(file: Path, dtype: str) -> None:
    """Sets the number format in a config.json, wherever the file states it."""
    settings: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    parts = [part for part in (settings, settings.get("text_config")) if part is not None]
    entries = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if key in part]
    if all(part[key] == dtype for part, key in entries):
        return
    for part, key in entries:
        part[key] = dtype
    write_json(file, settings)


def _part_of(weight: str) -> str:
    """Returns the part that a weight belongs to: `visual` for model.visual.blocks.0.weight."""
    parts = weight.split(".")
    return parts[1] if parts[0] == "model" and len(parts) > 1 else parts[0]
