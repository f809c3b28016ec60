"""Writes a model folder as one GGUF file, one tensor at a time."""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stillroom.errors import ModelError, RunError, missing_extra
from stillroom.export.gguf.families import (
    ARCHITECTURES,
    FAMILY_NAMES,
    Value,
    find_unsupported,
    head_size,
    hyperparameters,
    rope_settings,
)
from stillroom.export.gguf.vocabulary import Vocabulary, read_vocabulary
from stillroom.models.gguf.folder import pretrained_path
from stillroom.models.load import load_tokenizer
from stillroom.models.resolve import ModelLocation
from stillroom.reporting import Reporter, stop_if_cancelled

if TYPE_CHECKING:
    import gguf

_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {
    "fp32": "ALL_F32",
    "fp16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
}
_LARGEST_FP16 = 65504.0
_Q8_BLOCK = 32
_TOKENIZER = "tokenizer.ggml"
_GGUF_NAMES = {"unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a GGUF file, whose values are read only when they are written."""

    name: str
    shape: Sequence[int]
    read: Callable[[], Tensor]


def check_convertible(model: ModelLocation, tokenizer: ModelLocation) -> None:
    """Checks, without loading a model, that Stillroom can convert it to GGUF itself.

    Raises ModelError if it cannot, and MissingExtraError without the package gguf.
    """
    if importlib.util.find_spec("gguf") is None:
        raise missing_extra("gguf", "format gguf")
    config = _settings(pretrained_path(model))
    if (unsupported := find_unsupported(config)) is not None:
        raise ModelError(
            f"Stillroom converts {FAMILY_NAMES} models to GGUF, but {model.name!r} has "
            f"{unsupported}, which is not supported",
            "set llama_cpp to a checkout of llama.cpp, whose converter may support it, or use "
            "format merged",
        )
    _vocabulary(load_tokenizer(tokenizer), config)


def _settings(location: str) -> dict[str, Any]:
    return AutoConfig.from_pretrained(location).get_text_config().to_dict()


def _vocabulary(tokenizer: Any, config: Mapping[str, Any]) -> Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"the model's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json, which "
            "conversion to GGUF needs",
            "use format merged, or set llama_cpp to a checkout of llama.cpp",
        )
    return read_vocabulary(json.loads(backend.to_str()), config["vocab_size"])


def write_gguf(
    folder: Path, output: Path, *, name: str, precision: str, reporter: Reporter
) -> None:
    """Writes the model in `folder` to the file `output`, as the model `name`.

    precision: fp32, fp16, bf16 or q8_0. Norms and biases are written in fp32, as llama.cpp reads
    them. Raises RunError if a weight is too large for fp16.
    """
    import gguf

    config = _settings(str(folder))
    tokenizer = load_tokenizer(ModelLocation(name, str(folder), is_local=True))
    with closing(gguf.GGUFWriter(output, ARCHITECTURES[config["model_type"]])) as writer:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[precision]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_values(writer, hyperparameters(config))
        _add_vocabulary(writer, _vocabulary(tokenizer, config))
        _add_values(writer, _special_tokens(tokenizer, folder))
        writer.add_chat_template(tokenizer.chat_template)
        _write_tensors(writer, list(_tensors(folder, config)), precision, reporter)


def _write_tensors(
    writer: "gguf.GGUFWriter", tensors: Sequence[_Tensor], precision: str, reporter: Reporter
) -> None:
    """Writes the file: its header with the offsets of all tensors, then the tensors in order."""
    import gguf

    kinds = [_stored_type(tensor, precision) for tensor in tensors]
    for tensor, kind in zip(tensors, kinds, strict=True):
        num_bytes = torch.Size(gguf.quant_shape_to_byte_shape(tensor.shape, kind)).numel()
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        stop_if_cancelled(reporter)
        reporter.progress(done, len(tensors), unit="tensors", phase="convert to GGUF")
        writer.write_tensor_data(gguf.quantize(_read_values(tensor, kind), kind))


def _add_values(writer: "gguf.GGUFWriter", values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)


def _add_vocabulary(writer: "gguf.GGUFWriter", vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_token_scores(vocabulary.scores)


def _special_tokens(tokenizer: Any, folder: Path) -> dict[str, Value]:
    """Returns the ids of the special tokens, and whether they are added to a text, by GGUF key."""
    settings = json.loads((folder / "generation_config.json").read_bytes())
    stops = settings["eos_token_id"]
    others = [
        i for i in (stops if isinstance(stops, list) else [stops]) if i != tokenizer.eos_token_id
    ]
    # llama.cpp has three keys for tokens that end an answer.
    named: dict[str, int | None] = dict(
        zip(("eos", "eot", "eom"), [tokenizer.eos_token_id, *others], strict=False)
    )
    for name in ("bos", "unk", "pad"):
        named[_GGUF_NAMES.get(name, name)] = getattr(tokenizer, f"{name}_token_id")
    adds_bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return {
        **{f"{_TOKENIZER}.{key}_token_id": i for key, i in named.items() if i is not None},
        f"{_TOKENIZER}.add_bos_token": adds_bos,
        f"{_TOKENIZER}.add_eos_token": False,
        f"{_TOKENIZER}.add_space_prefix": False,
    }


def _tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Yields the tensors of a model folder under their GGUF names."""
    import gguf

    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]].upper()]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    if rope_settings(config)[0].get("rope_type") == "llama3":
        factors_D = _rope_factors(config)
        yield _Tensor("rope_freqs.weight", factors_D.shape, lambda: factors_D)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
        for name, shape in shapes.items():
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if new_name is None:
                raise ModelError(
                    f"the installed gguf package has no GGUF name for the weight {name!r}",
                    "set llama_cpp to a checkout of llama.cpp that supports this architecture, or "
                    "export with format merged",
                )
            yield _Tensor(new_name, shape, partial(_weight, path, name, config))


def _weight(path: Path, name: str, config: Mapping[str, Any]) -> Tensor:
    """Returns a weight in fp32, in the form that llama.cpp expects."""
    with safe_open(path, "pt") as file:
        weight = file.get_tensor(name).float()
    module = name.split(".")[-2]
    if config["model_type"] == "gemma3_text" and module.endswith("norm"):
        # transformers multiplies by 1 + weight, llama.cpp by the stored weight.
        return weight + 1
    if config["model_type"] == "llama" and module in ("q_proj", "k_proj"):
        is_query = module == "q_proj"
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        # llama.cpp's RoPE rotates adjacent dimensions; transformers rotates the halves of a head.
        halves = weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        return halves.transpose(1, 2).reshape(weight.shape)
    return weight


def _rope_factors(config: Mapping[str, Any]) -> Tensor:
    """Returns the divisor of each RoPE frequency in Llama 3's scaling; D is half a head's size."""
    rope, _ = rope_settings(config)
    size = head_size(config)
    plain_D = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaled_D, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    return plain_D / scaled_D


def _stored_type(tensor: _Tensor, precision: str) -> "gguf.GGMLQuantizationType":
    """Returns the type in which a tensor is stored: fp32 for norms and biases."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(tensor.shape) == 1 or tensor.name.endswith("_norm.weight"):
        return kinds.F32
    if precision == "q8_0" and tensor.shape[-1] % _Q8_BLOCK:
        return kinds.F16
    return kinds[_TYPES[precision]]


def _read_values(tensor: _Tensor, kind: "gguf.GGMLQuantizationType") -> Any:
    """Returns a tensor's values. Raises RunError if one of them would be infinite in fp16."""
    weight = tensor.read()
    if kind.name in ("F16", "Q8_0") and (largest := weight.abs().max().item()) > _LARGEST_FP16:
        raise RunError(
            f"{tensor.name} has a value of {largest:.3g}, and fp16 stores at most 65504",
            "export with precision bf16 or fp32",
        )
    return weight.numpy()
