"""A dictionary of numbers that forgets what was not used for long, so that it stays small."""

from collections.abc import Sequence
from typing import cast

REMEMBERED = 1 << 17
"""How many numbers are known at least."""


class RecentNumbers:
    """Numbers by hash; at least the last `most` that were used are known, at most twice as many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def get(self, key: int) -> int | None:
        """Returns the number of a key; None if it has none, or is forgotten."""
        number = self._new.get(key)
        if number is None and (number := self._old.get(key)) is not None:
            self[key] = number
        return number

    def numbers_of(self, keys: Sequence[int], next_number: int) -> tuple[list[int], list[int]]:
        """Returns the numbers of several keys, and which of the keys are new.

        New ones have `next_number` and those after it.
        """
        known, new = self._new, list[int]()
        numbers = list(map(known.get, keys))
        if None in numbers:
            for index in range(numbers.index(None), len(numbers)):
                key = keys[index]
                number = known.get(key)
                if number is None:
                    number = self._old.get(key)
                    if number is None:
                        number = next_number + len(new)
                        new.append(index)
                    known[key] = number
                numbers[index] = number
            self._forget()
        return cast("list[int]", numbers), new

    def __setitem__(self, key: int, number: int) -> None:
        self._new[key] = number
        self._forget()

    def _forget(self) -> None:
        if len(self._new) >= self._most:
            self._new, self._old = {}, self._new
