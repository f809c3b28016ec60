"""Writes a trained text part back into the files of the multimodal model that it belongs to.

All else is taken over as it is: the weights of the other parts byte for byte, the names and the
shards of the weights, the configuration, the tokenizer and the processor.
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
from stillroom.models.multimodal import multimodal_config, text_name
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_KEPT = (
    "*config*.json", "*token*.json", "chat_template.json", "*.jinja", "additional_chat_templates/*",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*",
)  # fmt: skip
_NOT_KEPT = ("adapter_config.json",)
_TEXT_ALONE = "export its text part alone: format text"


@dataclass(frozen=True, slots=True)
class Whole:
    """A multimodal model whose text part was trained."""

    name: str
    """The name for people, without this machine's folders."""
    folder: Path
    """The folder of its files, also if it came from the hub."""
    location: ModelLocation


def find_whole(workspace: Workspace, plan: ExportPlan) -> Whole | None:
    """Returns the multimodal model whose text part is exported; None for a model of text only.

    Raises ModelError if it has been moved or changed since the training.
    """
    known = plan.text_part_of
    source = plan.base or plan.checkpoint
    if known is not None:
        place = str(known.folder or known.location)
        source = ModelLocation(known.name, place, is_local=known.folder is not None)
    elif not is_multimodal(source):
        return None
    if source.is_local:
        _check_unchanged(source.folder, known)
    folder = source.folder if source.is_local else _downloaded(source.location, known)
    return Whole(public_name(workspace, source.location), folder, source)


def is_multimodal(location: ModelLocation) -> bool:
    """Whether a model is a multimodal one whose text part is loaded."""
    try:
        return multimodal_config(location) is not None
    except (OSError, ValueError, KeyError):
        return False  # loading it raises the error that says what to do


def _check_unchanged(folder: Path, known: ModelRecord | None) -> None:
    if known is None:
        return
    if not folder.is_dir():
        raise ModelError(
            f"the multimodal model {known.name!r}, whose text part was trained, is gone: {folder}",
            f"put it back, or {_TEXT_ALONE}",
        )
    if known.sha256 is not None and record_folder(folder).sha256 != known.sha256:
        raise ModelError(
            f"the multimodal model {folder} has changed since its text part was trained",
            f"restore its earlier files, or {_TEXT_ALONE}",
        )


def _downloaded(hub_id: str, known: ModelRecord | None) -> Path:
    """Returns the folder in the hub's cache with a model's files as they were in training."""
    hub: Any = importlib.import_module("huggingface_hub")
    revision = known.revision if known is not None else None
    try:
        return Path(
            hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=["*.safetensors", _INDEX, *_KEPT]
            )
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the files of {hub_id!r}, whose text part was trained, cannot be fetched: {error}",
            f"try again with internet access (and HF_TOKEN if it is gated), or {_TEXT_ALONE}",
        ) from error


@dataclass(frozen=True, slots=True)
class OtherParts:
    """The parts of a multimodal model that were taken over as they were."""

    names: Sequence[str]
    """E.g. `vision_tower`, as its files name them."""
    num_weights: int

    def sentence(self, base: str) -> str:
        """Returns a sentence about them."""
        return f"{', '.join(self.names)}: {self.num_weights} weights, byte for byte those of {base}"


def write_whole(
    whole: Whole, model: Any, tokenizer: Any, target: Path, *, is_converted: bool = False
) -> OtherParts:
    """Writes the multimodal model with this model as its text part to the folder `target`.

    Unless the number format is converted, a text weight that training left alone keeps its bytes
    too. Raises ModelError if the weights
    do not fit together, and RunError if they cannot be written.
    """
    target.mkdir(exist_ok=True)
    files = _weight_files(whole.folder)
    try:
        # As save_pretrained does: experts that the files hold one by one are one tensor in memory.
        text = revert_weight_conversion(model, model.state_dict())
        others = _write_weights(whole, text, files, target, is_converted)
        _check_copied(whole.folder, target, others)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the weights of {whole.name!r} cannot be written: {error}",
            "check the disk's free space and the model's .safetensors files",
        ) from error
    _copy_settings(whole.folder, target)
    _write_settings(whole, model, tokenizer, target)
    names = [name for keys in others.values() for name in keys]
    return OtherParts(sorted({_part(name) for name in names}), len(names))


def _weight_files(folder: Path) -> list[str]:
    """Returns the names of the files that hold a model's weights, as transformers chooses them."""
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    if (folder / _INDEX).is_file():
        return sorted(
            set(msgspec.json.decode((folder / _INDEX).read_bytes())["weight_map"].values())
        )
    raise ModelError(f"{folder} holds no {_ONE_FILE}", "use a model with safetensors files")


def _write_weights(
    whole: Whole,
    text: Mapping[str, Tensor],
    files: Sequence[str],
    target: Path,
    is_converted: bool,
) -> dict[str, list[str]]:
    """Writes the files with the text part's weights in them; returns the other weights by file."""
    names = {file: _names_in(whole.folder / file) for file in files}
    own = _own_names([name for listed in names.values() for name in listed], text)
    _check_all_placed(whole, text, set(own.values()))
    num_bytes = 0
    for file in files:
        with safe_open(whole.folder / file, "pt") as weights:
            tensors = {name: weights.get_tensor(name) for name in names[file]}
            metadata: dict[str, str] = weights.metadata() or {"format": "pt"}
        for name in tensors.keys() & own.keys():
            new = text[own[name]]
            if new.shape != tensors[name].shape:
                raise ModelError(
                    f"{name} of {whole.name!r} has the shape {[*tensors[name].shape]}, "
                    f"and the trained one {[*new.shape]}",
                    _TEXT_ALONE,
                )
            written = new if is_converted else _replaced(tensors[name], new)
            # clone: tied weights share memory, which safetensors refuses to write.
            tensors[name] = written.clone(memory_format=torch.contiguous_format)
        save_file(tensors, target / file, metadata=metadata)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (whole.folder / _INDEX).is_file() and files != [_ONE_FILE]:
        index: dict[str, Any] = msgspec.json.decode((whole.folder / _INDEX).read_bytes())
        index["metadata"] = {**index.get("metadata", {}), "total_size": num_bytes}
        write_json(target / _INDEX, index)
    return {file: [n for n in listed if n not in own] for file, listed in names.items()}


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def _own_names(names: Sequence[str], text: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the text part's own name of each of its weights in the files."""
    renamed = {name: text_name(name) for name in names}
    if any(name != new for name, new in renamed.items()):
        heads = ("lm_head.",)
        renamed = {n: new for n, new in renamed.items() if n != new or n.startswith(heads)}
    return {name: new for name, new in renamed.items() if new in text}


def _check_all_placed(whole: Whole, text: Mapping[str, Tensor], placed: set[str]) -> None:
    """Raises ModelError if a weight of the text part has no place in the files."""
    places = {text[name].data_ptr() for name in placed}
    left = sorted(name for name, tensor in text.items() if tensor.data_ptr() not in places)
    if left:
        raise ModelError(
            f"the files of {whole.name!r} have no place for {len(left)} weights of its "
            f"text part, e.g. {left[0]}",
            _TEXT_ALONE,
        )


def _replaced(original: Tensor, new: Tensor) -> Tensor:
    """Returns the weight to write: the original if the new one is only a rounding of it."""
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
                        f"{name} in {target / file} is not as it is in {source / file}",
                        "check the disk, and export again",
                    )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _copy_settings(source: Path, target: Path) -> None:
    for pattern in _KEPT:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in _NOT_KEPT:
                (target / path.relative_to(source)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(source))


def _write_settings(whole: Whole, model: Any, tokenizer: Any, target: Path) -> None:
    """Changes the settings that training changed: number format, ends of turns, chat template."""
    _set_dtype(target / "config.json", str(model.dtype).removeprefix("torch."))
    file = target / "generation_config.json"
    generation: dict[str, Any] = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
    ends: Any = generation.get("eos_token_id")
    known: list[Any] = ends if isinstance(ends, list) else [ends]
    stops = stop_token_ids(model, tokenizer)
    if frozenset(known) != stops:
        write_json(file, {**generation, "eos_token_id": sorted(stops)})
    original = load_tokenizer(ModelLocation(whole.name, str(whole.folder), is_local=True))
    if (original.get_vocab(), original.chat_template) != (
        tokenizer.get_vocab(),
        tokenizer.chat_template,
    ):
        tokenizer.save_pretrained(target)


def _set_dtype(file: Path, dtype: str) -> None:
    settings: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    parts = [part for part in (settings, settings.get("text_config")) if part is not None]
    named = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if key in part]
    if all(part[key] == dtype for part, key in named):
        return
    for part, key in named:
        part[key] = dtype
    write_json(file, settings)


def _part(name: str) -> str:
    """Returns the part that a weight belongs to, e.g. `visual` for model.visual.blocks.0.weight."""
    words = name.split(".")
    return words[1] if words[0] == "model" and len(words) > 1 else words[0]
