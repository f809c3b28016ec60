"""Keeps each distinct message of the sources once: in a file, with a few numbers in memory.

Logs repeat their history with every call. So a message is recognised by a hash of its bytes as the
source wrote them, and is decoded only when it is seen first, and again when it is written.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

from stillroom.importing.chat_messages import PARTS_LOST
from stillroom.importing.joining.messages import SeenMessage, seen_message, shaped_message
from stillroom.importing.joining.recent import REMEMBERED, RecentNumbers
from stillroom.importing.joining.spill import Spill
from stillroom.importing.json_rows import UnreadableRowError

SYSTEM, USER, ASSISTANT, TOOL = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class MessageStore:
    """The distinct messages by number, each in one of the forms in which sources wrote it."""

    def __init__(
        self,
        spill: Spill,
        *,
        look_at: Callable[[dict[str, Any]], None] | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        """`look_at` is shown each distinct message that calls tools, in our shape.

        A message that was not seen for `remembered` others counts as a new one.
        """
        self._spill, self._look_at = spill, look_at
        self._by_hash = RecentNumbers(remembered)
        self.places, self.sizes = array("Q"), array("I")
        """Where in the spill each message is as its source wrote it, and its length."""
        self.digests, self.roles, self.answered = array("q"), array("B"), array("q")
        """For each message the digest of what a later history repeats of it, the role, and the
        hash of the id of the call that a tool's message answers (0 for none)."""
        self._calls = array("q")
        self._more_calls: dict[int, tuple[int, ...]] = {}
        self.losses: dict[int, tuple[str, ...]] = {}
        """What some messages had in their source and lack in our shape."""

    def numbers_of(self, raws: Sequence[bytes]) -> list[int]:
        """Returns the numbers of messages, given as the JSON that their source wrote.

        Raises UnreadableRowError for one that no chat can hold.
        """
        keys = list(map(hash, raws))
        numbers = self._by_hash.get_all(keys)
        if None in numbers:
            for index, number in enumerate(numbers):
                if number is None:
                    numbers[index] = self._number_of(raws[index], keys[index])
        return cast("list[int]", numbers)

    def _number_of(self, raw: bytes, key: int) -> int:
        number = self._by_hash.get(key)
        if number is None:
            # One that was forgotten is kept once more, which changes nothing but the space.
            number = self._by_hash[key] = self._add(raw, seen_message(raw))
        return number

    def _add(self, raw: bytes, seen: SeenMessage) -> int:
        if PARTS_LOST in seen.losses:
            raise UnreadableRowError("content of an unknown kind", "its format's reader is needed")
        number = len(self.places)
        self.places.append(self._spill.append(raw))
        self.sizes.append(len(raw))
        self.digests.append(seen.digest)
        self.roles.append(_ROLES[seen.role])
        self.answered.append(0 if seen.answered is None else hash(seen.answered) or 1)
        calls = tuple([hash(name) or 1 for name in seen.call_ids])
        self._calls.append(calls[0] if calls else 0)
        if len(calls) > 1:
            self._more_calls[number] = calls
        if calls and self._look_at is not None:
            self._look_at(shaped_message(raw))
        if seen.losses:
            self.losses[number] = seen.losses
        return number

    def calls(self, number: int) -> tuple[int, ...]:
        """Returns the hashes of the ids of a message's tool calls."""
        first = self._calls[number]
        return self._more_calls.get(number, (first,)) if first else ()

    def raw(self, number: int) -> bytes:
        """Returns a message as its source wrote it."""
        return self._spill.read(self.places[number], self.sizes[number])
