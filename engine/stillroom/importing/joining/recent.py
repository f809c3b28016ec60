"""A dictionary of numbers that forgets what was not used for long, so that it stays small."""

from collections.abc import Iterable

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

    def get_all(self, keys: Iterable[int]) -> list[int | None]:
        """Returns the numbers of several keys; None also for those not used for a while."""
        return list(map(self._new.get, keys))

    def __setitem__(self, key: int, number: int) -> None:
        self._new[key] = number
        if len(self._new) >= self._most:
            self._new, self._old = {}, self._new
