"""A file with a teacher's top tokens at the trained tokens of sequences, written once.

The file's name is a hash of the teacher, k and the sequences, so it is never overwritten.
While it is written it has another name, and each sequence is one record that ends with a checksum:
after an interruption the complete records are kept and the rest is truncated. A file with more
sequences or a larger k than needed is used too.

Layout, little-endian: MAGIC, the length of a JSON header (4 bytes), the header; then for each
sequence its key (16 bytes), its number of positions n (4 bytes), n × k token ids of 2 or 3 bytes,
n × k log-probabilities and n of all other tokens together (2 bytes each, float16), CRC-32.
"""

import hashlib
import os
import zlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from stillroom.errors import DataError
from stillroom.files import content_hash
from stillroom.models.batches import TokenSequence
from stillroom.models.divergence import TopTokens
from stillroom.places import open_real, real_folder

_MAGIC = b"SRTOP001"
_KEY_BYTES, _COUNT_BYTES, _CRC_BYTES = 16, 4, 4
_TWO_BYTES = 1 << 16
_SUFFIX = ".top"


class StoreHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a store: the teacher, and the number of tokens per position."""

    teacher: dict[str, str | bool | None]
    """The teacher's identity: the hash of its files, or its name and address, and its dtype."""
    k: int
    vocab_size: int
    """The number of tokens that student and teacher share, over which probabilities sum to 1."""

    @property
    def id_bytes(self) -> int:
        """The number of bytes of a token id."""
        return 2 if self.vocab_size <= _TWO_BYTES else 3

    @property
    def token_bytes(self) -> int:
        """The number of bytes of one position."""
        return self.k * (self.id_bytes + 2) + 2

    @property
    def encoded(self) -> bytes:
        """The bytes at the start of the file, up to the first record."""
        header = msgspec.json.encode(self)
        return _MAGIC + len(header).to_bytes(4, "little") + header


def sequence_key(sequence: TokenSequence) -> bytes:
    """Returns the key of a sequence: a hash of its tokens and its training mask."""
    ids = np.asarray(sequence.ids, dtype="<u4").tobytes()
    mask = np.packbits(np.asarray(sequence.trained, dtype=bool)).tobytes()
    size = len(sequence.ids).to_bytes(8, "little")
    return hashlib.sha256(size + ids + mask).digest()[:_KEY_BYTES]


def store_name(header: StoreHeader, keys: Iterable[bytes]) -> str:
    """Returns the file name of a store with exactly these sequences."""
    joined = b"".join(sorted(set(keys))).hex()
    value = [msgspec.to_builtins(header), joined]
    return f"top{header.k}-{content_hash(value)[:20]}{_SUFFIX}"


class TopTokenStore:
    """An open store, whose records are checked when it is opened and read when needed."""

    def __init__(
        self, path: Path, header: StoreHeader, records: dict[bytes, tuple[int, int]]
    ) -> None:
        """records: the offset and the number of positions of each sequence, by key."""
        self.path, self.header = path, header
        self._records = records
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    @property
    def keys(self) -> "set[bytes]":
        """The keys of all stored sequences."""
        return set(self._records)

    @property
    def num_tokens(self) -> int:
        """The total number of positions."""
        return sum(count for _, count in self._records.values())

    def record(self, key: bytes) -> bytes:
        """Returns the bytes of one sequence's positions."""
        start, count = self._records[key]
        return self._bytes[start : start + count * self.header.token_bytes].tobytes()

    def read(
        self, sequences: Sequence[TokenSequence], *, k: int, device: torch.device
    ) -> TopTokens:
        """Returns the top `k` tokens at each sequence's trained tokens, in order."""
        parts = [decode(self.record(sequence_key(one)), self.header) for one in sequences]
        joined = TopTokens(
            torch.cat([part.ids_NK for part in parts]).to(device),
            torch.cat([part.logprobs_NK for part in parts]).to(device),
            torch.cat([part.rest_N for part in parts]).to(device),
        )
        return joined.first(k)


def encode(top: TopTokens, header: StoreHeader) -> bytes:
    """Encodes the positions of one sequence as bytes."""
    num, k = top.ids_NK.shape
    ids = np.ascontiguousarray(top.ids_NK.numpy().astype("<u4")).view(np.uint8)
    ids = ids.reshape(num, k, 4)[:, :, : header.id_bytes]
    numbers = [top.logprobs_NK.numpy(), top.rest_N.numpy()]
    return ids.tobytes() + b"".join(one.astype("<f2").tobytes() for one in numbers)


def decode(data: bytes, header: StoreHeader) -> TopTokens:
    """Decodes the positions of one sequence."""
    num, k = len(data) // header.token_bytes, header.k
    size = num * k * header.id_bytes
    ids = np.zeros((num, k, 4), dtype=np.uint8)
    ids[:, :, : header.id_bytes] = np.frombuffer(data, np.uint8, size).reshape(num, k, -1)
    numbers = np.frombuffer(data, "<f2", offset=size).astype(np.float32)
    return TopTokens(
        torch.from_numpy(ids.view("<u4")[:, :, 0].astype(np.int64)),
        torch.from_numpy(numbers[: num * k].reshape(num, k)),
        torch.from_numpy(numbers[num * k :]),
    )


def open_store(path: Path) -> TopTokenStore:
    """Opens a complete store. Raises DataError if it is damaged."""
    header, records, end = _scan(path)
    if end != path.stat().st_size:
        raise DataError(
            f"{path} is damaged from byte {end} on",
            "delete it; the teacher then scores the rows again",
        )
    return TopTokenStore(path, header, records)


def find_store(folder: Path, wanted: StoreHeader, keys: "set[bytes]") -> TopTokenStore | None:
    """Returns the smallest complete store of the teacher that has all sequences, or None."""
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_size):
        if _suffices(_header(path), wanted):
            store = open_store(path)
            if keys <= store.keys:
                return store
    return None


class StoreWriter:
    """Appends sequences to an incomplete store."""

    def __init__(
        self, path: Path, header: StoreHeader, stream: BinaryIO, done: "set[bytes]"
    ) -> None:
        self.path, self._header, self._stream = path, header, stream
        self.done = done
        """The keys of the sequences in the file."""

    def add(self, key: bytes, top: TopTokens) -> None:
        """Appends one sequence; after an interruption it is either complete or absent."""
        data = encode(top, self._header)
        record = key + len(top.rest_N).to_bytes(_COUNT_BYTES, "little") + data
        self._stream.write(record + zlib.crc32(record).to_bytes(_CRC_BYTES, "little"))
        self._stream.flush()
        self.done.add(key)


@contextmanager
def open_writer(path: Path, header: StoreHeader) -> Generator[StoreWriter]:
    """Yields a writer that resumes where an interrupted one stopped.

    The store gets its final name if the block succeeds; its records are kept in any case.
    """
    temporary = path.with_name(f".{path.name}.partial")
    done, end = set[bytes](), 0
    if temporary.exists() and _header(temporary) == header:
        _, records, end = _scan(temporary)
        done = set(records)
    with os.fdopen(open_real(temporary, os.O_RDWR | os.O_CREAT), "r+b") as stream:
        stream.truncate(end)
        stream.seek(end)
        if not end:
            stream.write(header.encoded)
        yield StoreWriter(path, header, stream, done)
        stream.flush()
        os.fsync(stream.fileno())
    with real_folder(path.parent) as folder:
        folder.rename(temporary.name, path.name)


def _suffices(header: StoreHeader | None, wanted: StoreHeader) -> bool:
    """Returns whether a store has the same teacher's tokens, and at least as many per position."""
    if header is None or header.k < min(wanted.k, wanted.vocab_size):
        return False
    return (header.teacher, header.vocab_size) == (wanted.teacher, wanted.vocab_size)


def _header(path: Path) -> StoreHeader | None:
    """Returns the header of a file; None if the file is not a store, or its header is cut off."""
    with path.open("rb") as stream:
        prefix = stream.read(len(_MAGIC) + 4)
        size = int.from_bytes(prefix[len(_MAGIC) :], "little")
        if prefix[: len(_MAGIC)] != _MAGIC or size > _TWO_BYTES:
            return None
        try:
            return msgspec.json.decode(stream.read(size), type=StoreHeader)
        except msgspec.DecodeError:
            return None


def _scan(path: Path) -> tuple[StoreHeader, dict[bytes, tuple[int, int]], int]:
    """Returns the header, each record's offset and number of positions, and the end of the last.

    A truncated record, or one with a wrong checksum, ends the file.
    """
    header = _header(path)
    if header is None:
        raise DataError(
            f"{path} is not a soft-targets store",
            "delete it, or set soft_targets.store to another folder",
        )
    records: dict[bytes, tuple[int, int]] = {}
    end, size = len(header.encoded), path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(end)
        while end < size:
            prefix = stream.read(_KEY_BYTES + _COUNT_BYTES)
            count = int.from_bytes(prefix[_KEY_BYTES:], "little")
            length = count * header.token_bytes
            if end + len(prefix) + length + _CRC_BYTES > size:
                break
            data = stream.read(length)
            crc = zlib.crc32(data, zlib.crc32(prefix)).to_bytes(_CRC_BYTES, "little")
            if stream.read(_CRC_BYTES) != crc:
                break
            records[prefix[:_KEY_BYTES]] = (end + len(prefix), count)
            end += len(prefix) + length + _CRC_BYTES
    return header, records, end
