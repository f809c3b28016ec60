"""The headers of safetensors files, read without the tensors and without torch."""

import math
from pathlib import Path
from typing import Any

import msgspec

from stillroom.models.precision import Precision

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_ASKED_BITS = {"fp32": 32, "bf16": 16}


class TensorFileError(Exception):
    """A folder's safetensors files cannot be read."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def stored_bytes(folder: Path, precision: Precision) -> int:
    """Returns how many bytes the tensors of a folder take when written with a precision.

    Raises TensorFileError if there are none, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TensorFileError(f"{folder} holds no .safetensors file")
    return sum(_bytes_of(t, precision) for file in files for t in read_header(file).values())


def read_header(file: Path) -> dict[str, _Tensor]:
    """Returns the tensors of a file by name. Raises TensorFileError if it is cut or damaged."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > min(size, _LONGEST_HEADER):
            raise TensorFileError(f"{file} is damaged: it says its header has {length} bytes")
        header = stream.read(length)
    try:
        raw: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        raw.pop("__metadata__", None)
        tensors = msgspec.convert(raw, dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TensorFileError(f"{file} is damaged: {error}") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if _LENGTH_BYTES + length + end != size:
        raise TensorFileError(
            f"{file} is incomplete: {size} bytes of {_LENGTH_BYTES + length + end}"
        )
    return tensors


def _bytes_of(tensor: _Tensor, precision: Precision) -> int:
    start, end = tensor.data_offsets
    if precision == "auto" or tensor.dtype not in _BITS:
        return end - start
    return math.prod(tensor.shape) * _ASKED_BITS[precision] // 8
