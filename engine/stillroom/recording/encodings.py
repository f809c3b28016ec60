"""Content encodings are undone piece by piece, since a journal holds what was said in plain."""

import importlib
import zlib
from collections.abc import Callable
from typing import Any

_MOST_AT_ONCE = 1 << 20
"""The most bytes that are decoded at a time: a few bytes can stand for very many."""


class UndecodableError(Exception):
    """A content that is not in the encoding that its header names."""


class Decoder:
    """Undoes the content encodings of one body. Raises UndecodableError if one is not known."""

    def __init__(self, encodings: str) -> None:
        names = [name.strip().lower() for name in encodings.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        for name in names:
            if name not in _STEPS:
                raise UndecodableError(f"the encoding {name[:40]!r} is not known")
        # The encoding that was applied last is undone first.
        self._steps = [_STEPS[name]() for name in reversed(names)]

    def decode(self, data: bytes, limit: int) -> bytes:
        """Returns what the next bytes stand for, of which `limit` bytes or more are enough."""
        for step in self._steps:
            try:
                data = step(data, limit)
            except Exception as error:  # the libraries' own errors have no common parent
                raise UndecodableError(str(error)[:200]) from error
        return data


_Step = Callable[[bytes, int], bytes]


def _gzip() -> _Step:
    return _Zlib(zlib.MAX_WBITS | 16).decode


def _deflate() -> _Step:
    return _Deflate().decode


class _Zlib:
    def __init__(self, window: int) -> None:
        self._window = window
        self._stream = zlib.decompressobj(window)

    def decode(self, data: bytes, limit: int) -> bytes:
        parts: list[bytes] = []
        while data and limit > 0:
            if self._stream.eof:
                # Several members may follow one another.
                self._stream = zlib.decompressobj(self._window)
            parts.append(self._stream.decompress(data, min(limit, _MOST_AT_ONCE)))
            limit -= len(parts[-1])
            data = self._stream.unconsumed_tail or self._stream.unused_data
        return b"".join(parts)


class _Deflate:
    """`deflate` is a zlib stream, and with many servers a bare one."""

    def __init__(self) -> None:
        self._inner: _Zlib | None = None

    def decode(self, data: bytes, limit: int) -> bytes:
        if self._inner is None and data:
            is_zlib = data[0] & 15 == 8
            self._inner = _Zlib(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
        return self._inner.decode(data, limit) if self._inner else b""


class _Brotli:
    def __init__(self) -> None:
        self._stream = _module("brotli").Decompressor()

    def decode(self, data: bytes, limit: int) -> bytes:
        parts: list[bytes] = []
        while limit > 0:
            parts.append(self._stream.process(data, output_buffer_limit=min(limit, _MOST_AT_ONCE)))
            limit -= len(parts[-1])
            data = b""
            if self._stream.can_accept_more_data() or not parts[-1]:
                break
        return b"".join(parts)


class _Zstandard:
    def __init__(self) -> None:
        self._library = zstd_library()
        self._stream = self._library.ZstdDecompressor()

    def decode(self, data: bytes, limit: int) -> bytes:
        parts: list[bytes] = []
        while limit > 0:
            if self._stream.eof:
                data = self._stream.unused_data + data
                if not data:
                    break
                self._stream = self._library.ZstdDecompressor()
            parts.append(self._stream.decompress(data, min(limit, _MOST_AT_ONCE)))
            limit -= len(parts[-1])
            data = b""
            if self._stream.needs_input:
                break
        return b"".join(parts)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def zstd_library() -> Any:
    """Returns the library that undoes Zstandard, Python's own or its twin; None if missing."""
    return _module("compression.zstd") or _module("backports.zstd")


_STEPS: dict[str, Callable[[], _Step]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
} | ({"br": lambda: _Brotli().decode} if _module("brotli") else {}) | (
    {"zstd": lambda: _Zstandard().decode} if zstd_library() else {}
)  # fmt: skip


def known_encodings(accepted: str) -> str:
    """Returns an Accept-Encoding header without the encodings that cannot be undone here.

    Where all of them can, it is the header as it was.
    """
    offered = [part.strip() for part in accepted.split(",")]
    known = [part for part in offered if _is_known(part.partition(";")[0].strip().lower())]
    return accepted if len(known) == len(offered) else ", ".join(known) or "identity"


def _is_known(name: str) -> bool:
    return name in _STEPS or name in ("", "identity")
