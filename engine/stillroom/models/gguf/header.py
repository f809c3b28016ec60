"""Reads and checks the header of a GGUF file, within bounds; needs no torch.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from stillroom import bounds
from stillroom.errors import ModelError

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
"""The supported architectures: the conversion of each was compared with llama.cpp's outputs."""
_PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
"""The supported pre-tokenizers (`tokenizer.ggml.pre`) of byte-level tokenizers."""

HF_FORMAT_FIX = "give the model's Hugging Face folder or hub id"

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_ALIGNMENT = 32
_FLOATS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)}
_BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
}  # fmt: skip
"""By the number of a tensor's type in ggml: its name, the weights per block, and the bytes per
block."""
_TYPES = {**_FLOATS, **_BLOCKS}
_UNSUPPORTED_TYPES = {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a GGUF file: its name, shape, type and offset."""

    name: str
    shape: tuple[int, ...]
    """The dimensions in torch's order: the last one is contiguous in the file."""
    kind: int
    """The number of its type in ggml."""
    offset: int
    """The number of bytes from the start of the weights."""

    @property
    def num_weights(self) -> int:
        """The number of weights in the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in the file, in bytes. Raises KeyError for an unknown type."""
        _, weights, size = _TYPES[self.kind]
        return self.num_weights // weights * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file: everything before its weights."""

    path: Path
    values: Mapping[str, Any]
    """The metadata by key; a list of strings is replaced by its length."""
    tensors: Mapping[str, StoredTensor]
    weights_start: int

    @property
    def architecture(self) -> str:
        """The model's architecture, as llama.cpp names it."""
        return str(self.values.get("general.architecture"))

    @property
    def number_format(self) -> str:
        """The type of its weights: `F32`, `F16`, `BF16`, or the quantized type of most weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            name = _TYPES[tensor.kind][0]
            sizes[name] = sizes.get(name, 0) + tensor.num_weights
        blocks = {name: size for name, size in sizes.items() if name not in _float_names()}
        return max(blocks or sizes, key=lambda name: sizes[name], default="F32")

    def loaded_bytes(self, *, bits: int | None = None) -> int:
        """Returns the size in bytes of the converted weights, or of weights of `bits` bits each."""
        num_weights = sum(tensor.num_weights for tensor in self.tensors.values())
        return num_weights * (bits or (32 if self.number_format == "F32" else 16)) // 8

    def setting(self, key: str) -> Any:
        """Returns the setting `<architecture>.<key>`, e.g. `qwen3.block_count`; None if missing."""
        return self.values.get(f"{self.architecture}.{key}")


def _float_names() -> set[str]:
    return {name for name, _, _ in _FLOATS.values()}


def is_gguf(path: Path) -> bool:
    """Returns whether a path is a file that begins with GGUF's magic bytes or is named *.gguf."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC or path.suffix == SUFFIX


def check_gguf(path: Path) -> None:
    """Raises ModelError, with the reason, for a GGUF file that cannot be converted."""
    stat = path.stat()
    _check_file(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=32)
def _check_file(path: Path, size: int, _mtime_ns: int) -> None:
    """Checks a file as `check_gguf` does, once per version of the file."""
    header = read_header(path)
    _check_architecture(header)
    _check_tokenizer(header)
    _check_weights(header, size)


def _error(header: GgufHeader, problem: str, fix: str) -> ModelError:
    return ModelError(f"{header.path} {problem}", fix)


def _check_architecture(header: GgufHeader) -> None:
    """Raises ModelError for an unsupported architecture, split files, experts or RoPE scaling."""
    if header.architecture not in ARCHITECTURES:
        raise _error(
            header,
            f"has a model of architecture {header.architecture!r}, which cannot be loaded from "
            "GGUF",
            f"{HF_FORMAT_FIX}; supported GGUF architectures: {', '.join(ARCHITECTURES)}",
        )
    if (num_parts := header.values.get("split.count", 0)) > 1:
        raise _error(
            header,
            f"is one of {num_parts} parts of a split model",
            "join the parts with llama.cpp's `llama-gguf-split --merge`, and give the merged file",
        )
    if num_experts := header.setting("expert_count"):
        raise _error(
            header,
            f"has a mixture of {num_experts} experts, which cannot be loaded from GGUF",
            HF_FORMAT_FIX,
        )
    scaling = header.setting("rope.scaling.type")
    if scaling not in (None, "none"):
        raise _error(
            header,
            f"has RoPE scaling {scaling!r}, which cannot be loaded from GGUF",
            HF_FORMAT_FIX,
        )


def _check_tokenizer(header: GgufHeader) -> None:
    """Raises ModelError for an unsupported tokenizer or pre-tokenizer."""
    model = header.values.get("tokenizer.ggml.model")
    pre_tokenizer = header.values.get("tokenizer.ggml.pre", "default")
    is_gemma = header.architecture.startswith("gemma")
    if model == ("llama" if is_gemma else "gpt2") and (
        is_gemma or pre_tokenizer in _PRE_TOKENIZERS
    ):
        return
    raise _error(
        header,
        f"has a tokenizer {model!r} with the pre-tokenizer {pre_tokenizer!r}, which cannot be "
        "loaded from GGUF: texts would be encoded differently than in training",
        f"{HF_FORMAT_FIX}; supported: Gemma's tokenizer, and gpt2 with one of the pre-tokenizers "
        f"{', '.join(_PRE_TOKENIZERS)}",
    )


def _check_weights(header: GgufHeader, size: int) -> None:
    """Raises ModelError for an unsupported tensor type, or a file shorter than its weights."""
    for tensor in header.tensors.values():
        if tensor.kind not in _TYPES:
            name = _UNSUPPORTED_TYPES.get(tensor.kind, f"number {tensor.kind}")
            raise _error(
                header,
                f"stores the tensor {tensor.name} in the type {name}, which is not supported",
                f"{HF_FORMAT_FIX}, or a GGUF file with only the types "
                f"{', '.join(name for name, _, _ in _TYPES.values())}",
            )
    ends = [tensor.offset + tensor.num_bytes for tensor in header.tensors.values()]
    if (end := header.weights_start + max(ends, default=0)) > size:
        raise _error(
            header, f"is incomplete: it has {size} of {end} bytes", "download or copy it again"
        )


def read_header(path: Path) -> GgufHeader:
    """Returns the header of a GGUF file.

    Raises ModelError for a file that is damaged or has an unsupported version.
    """
    with path.open("rb") as stream:
        try:
            reader = _Reader(stream, os.fstat(stream.fileno()).st_size)
            return _parse_header(path, reader)
        except (struct.error, ValueError, OverflowError, KeyError) as error:
            reason = str(error) or "it ends early"
            raise ModelError(
                f"{path} cannot be read as a GGUF file: {reason}",
                f"download or copy it again; if that doesn't help, {HF_FORMAT_FIX}",
            ) from error


def _parse_header(path: Path, reader: "_Reader") -> GgufHeader:
    """Reads a header. Raises ValueError, or the errors of `struct`, if it is malformed."""
    magic, version, num_tensors, num_values = reader.unpack("<4sIQQ")
    if magic != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; 2 and 3 (little-endian) are supported")
    if max(num_tensors, num_values) > bounds.GGUF_ENTRIES.limit:
        raise ValueError(
            f"its header claims {num_values} metadata values and {num_tensors} tensors; at most "
            f"{bounds.GGUF_ENTRIES.size} of each are read"
        )
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        values[key] = reader.value()
    tensors: dict[str, StoredTensor] = {}
    for _ in range(num_tensors):
        name = reader.text()
        (num_dimensions,) = reader.unpack("<I")
        if num_dimensions > 4:
            raise ValueError(
                f"its tensor {name} has {num_dimensions} dimensions; at most 4 are allowed"
            )
        shape = reader.unpack(f"<{num_dimensions}Q")
        kind, offset = reader.unpack("<IQ")
        tensors[name] = StoredTensor(name, shape[::-1], kind, offset)
    alignment = int(values.get("general.alignment", _ALIGNMENT)) or _ALIGNMENT
    start = -(-reader.offset // alignment) * alignment
    return GgufHeader(path, values, tensors, start)


class _Reader:
    """Reads values in order, never beyond the end of the file or the limit of a header."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._bytes_left = stream, min(size, bounds.GGUF_HEADER.limit)
        self.offset = 0

    def _consume(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        self.offset += num_bytes
        if self._bytes_left < 0:
            raise ValueError(f"it ends early, or its header exceeds {bounds.GGUF_HEADER.size}")

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Returns the next values, in a layout of `struct`."""
        size = struct.calcsize(layout)
        self._consume(size)
        return struct.unpack(layout, self._stream.read(size))

    def text(self) -> str:
        """Returns the next string."""
        (length,) = self.unpack("<Q")
        self._consume(length)
        return self._stream.read(length).decode("utf-8", errors="replace")

    def value(self) -> Any:
        """Returns the next metadata value; for a list of strings, only its length."""
        (kind,) = self.unpack("<I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            if kind not in _FORMATS:
                raise ValueError(f"it has a value of the unknown type {kind}")
            return self.unpack(f"<{_FORMATS[kind]}")[0]
        item_kind, num = self.unpack("<IQ")
        if item_kind in _FORMATS:
            if num > self._bytes_left:
                raise ValueError(f"it has a list of {num} values, which exceeds its size")
            return list(self.unpack(f"<{num}{_FORMATS[item_kind]}"))
        if item_kind != _STRING:
            raise ValueError(f"it has a list of the unsupported type {item_kind}")
        for _ in range(num):
            (length,) = self.unpack("<Q")
            self._consume(length)
            self._stream.seek(length, os.SEEK_CUR)
        return num
