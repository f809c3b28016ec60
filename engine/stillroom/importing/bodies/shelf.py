"""Keeps values of a source in a file until the rows that need them come."""

import os
import tempfile
from collections.abc import Hashable, Iterator
from typing import Any, Generic, Self, TypeVar

import msgspec

_Key = TypeVar("_Key", bound=Hashable)
_DECODER = msgspec.json.Decoder()


class Shelf(Generic[_Key]):
    """Values under keys, of which only the keys are held in memory.

    The values are what JSON holds. The file has no name and is gone when the block ends.
    """

    def __init__(self) -> None:
        self._places: dict[_Key, tuple[int, int]] = {}
        self._size = 0

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile(buffering=1 << 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, key: _Key, value: Any) -> bool:
        """Keeps a value and returns True, or returns False if there is one under this key."""
        if key in self._places:
            return False
        data = msgspec.json.encode(value)
        self._file.write(data)
        self._places[key] = (self._size, len(data))
        self._size += len(data)
        return True

    def get(self, key: _Key) -> Any:
        """Returns the value under a key, or None."""
        place = self._places.get(key)
        if place is None:
            return None
        self._file.flush()
        return _DECODER.decode(os.pread(self._file.fileno(), place[1], place[0]))

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
