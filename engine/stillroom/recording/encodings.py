"""Decodes content encodings block by block, because the journal stores decoded contents."""

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp.compression_utils import (
    HAS_BROTLI,
    HAS_ZSTD,
    BrotliDecompressor,
    ZLibDecompressor,
    ZSTDDecompressor,
)


class UndecodableError(Exception):
    """Raised if a body is not in the encoding that its Content-Encoding header names."""


class Decoder:
    """Decodes the content encodings of one body. Raises UndecodableError for an unknown one."""

    def __init__(self, encodings: str) -> None:
        names = [name.strip().lower() for name in encodings.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        for name in names:
            if name not in _DECOMPRESSORS:
                raise UndecodableError(f"unknown content encoding {name[:40]!r}")
        # The encoding that was applied last is decoded first.
        self._steps = [_DECOMPRESSORS[name]() for name in reversed(names)]

    def decode(self, data: bytes, limit: int) -> bytes:
        """Decodes the next bytes; returns at most about `limit` decoded bytes."""
        for step in self._steps:
            try:
                data = step.decompress_sync(data, limit)
            except Exception as error:  # the libraries' own errors have no common parent
                raise UndecodableError(str(error)[:200]) from error
        return data


class _DeflateDecompressor:
    """Decodes `deflate`: a zlib stream (RFC 9110), or raw deflate as many servers send."""

    def __init__(self) -> None:
        self._inner: ZLibDecompressor | None = None

    def decompress_sync(self, data: bytes, limit: int) -> bytes:
        if self._inner is None and data:
            is_raw = data[0] & 15 != 8
            self._inner = ZLibDecompressor("deflate", suppress_deflate_header=is_raw)
        return self._inner.decompress_sync(data, limit) if self._inner else b""


_DECOMPRESSORS: Mapping[str, Callable[[], Any]] = {
    "gzip": lambda: ZLibDecompressor("gzip"),
    "x-gzip": lambda: ZLibDecompressor("gzip"),
    "deflate": _DeflateDecompressor,
} | ({"br": BrotliDecompressor} if HAS_BROTLI else {}) | (
    {"zstd": ZSTDDecompressor} if HAS_ZSTD else {}
)  # fmt: skip


def decodable_encodings(accepted: str) -> str:
    """Returns an Accept-Encoding header without the encodings that cannot be decoded.

    If all of them can be decoded, the header is returned unchanged.
    """
    offered = [part.strip() for part in accepted.split(",")]
    decodable = [
        part for part in offered
        if part.partition(";")[0].strip().lower() in (*_DECOMPRESSORS, "", "identity")
    ]  # fmt: skip
    return accepted if len(decodable) == len(offered) else ", ".join(decodable) or "identity"
