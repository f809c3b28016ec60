"""Keeps each distinct message of the sources once: in a file, with a few numbers in memory.

Logs repeat their history with every call. So a message is recognised by a hash of its JSON, and is
read only when it is seen first.
"""

from array import array
from collections.abc import Callable, Sequence

import msgspec

from stillroom.importing.conversations.messages import read_message
from stillroom.importing.json_rows import Row
from stillroom.importing.spill import Spill

REMEMBERED = 1 << 17
"""How many messages and requests are recognised at least."""
_ENCODER = msgspec.json.Encoder()


class RecentNumbers:
    """A dictionary of numbers that forgets what was not used for long, so that it stays small.

    At least the last `most` that were used are known, at most twice as many.
    """

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

    def __setitem__(self, key: int, number: int) -> None:
        self._new[key] = number
        if len(self._new) >= self._most:
            self._new, self._old = {}, self._new


class MessageStore:
    """The distinct messages by number, in our shape."""

    def __init__(
        self,
        spill: Spill,
        *,
        on_tool_calls: Callable[[Row], None] | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        """`on_tool_calls` is given each distinct message that calls tools.

        A message that was not seen for `remembered` others counts as a new one.
        """
        self._spill, self._on_tool_calls = spill, on_tool_calls
        self._by_hash = RecentNumbers(remembered)
        self._places, self.sizes = array("Q"), array("I")
        """Where in the spill each message is as JSON, and its length."""
        self.digests, self.roles, self.answered = array("q"), array("B"), array("q")
        """For each message the digest of what a later history repeats of it, the role, and the
        digest of the id of the call that a tool's message answers (0 for none)."""
        self._calls: dict[int, tuple[int, ...]] = {}
        self.losses: dict[int, tuple[str, ...]] = {}
        """What some messages had in their source and lack in our shape."""

    def numbers_of(self, messages: Sequence[Row]) -> list[int]:
        """Returns the numbers of messages.

        Raises UnreadableRowError if no chat can hold one of them.
        """
        by_hash, numbers = self._by_hash, list[int]()
        for message in messages:
            key = hash(_ENCODER.encode(message))
            number = by_hash.get(key)
            if number is None:
                # One that was forgotten is kept once more, which changes nothing but the space.
                number = by_hash[key] = self._add(message)
            numbers.append(number)
        return numbers

    def _add(self, value: Row) -> int:
        read, number = read_message(value), len(self.sizes)
        data = _ENCODER.encode(read.message)
        self._places.append(self._spill.append(data))
        self.sizes.append(len(data))
        self.roles.append(read.role)
        self.digests.append(read.digest)
        self.answered.append(read.answered)
        if read.losses:
            self.losses[number] = read.losses
        if read.calls:
            self._calls[number] = read.calls
            if self._on_tool_calls is not None:
                self._on_tool_calls(read.message)
        return number

    def calls(self, number: int) -> tuple[int, ...]:
        """Returns the digests of the ids of a message's tool calls."""
        return self._calls.get(number, ())

    def encoded(self, number: int) -> bytes:
        """Returns a message as JSON."""
        return self._spill.read(self._places[number], self.sizes[number])
