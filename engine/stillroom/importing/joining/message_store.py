"""Keeps each distinct message of the sources once: in a file, with a few numbers in memory.

Logs repeat their history with every call. So a message is recognised by a hash of its bytes as the
source wrote them, and is decoded only when it is seen first, and again when it is written.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

from stillroom.importing.chat_messages import PARTS_LOST
from stillroom.importing.joining.messages import SeenMessage, seen_message, shaped_message
from stillroom.importing.joining.spill import Spill
from stillroom.importing.json_rows import UnreadableRowError

SYSTEM, USER, ASSISTANT, TOOL = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class MessageStore:
    """The distinct messages by number, each in one of the forms in which sources wrote it."""

    def __init__(
        self, spill: Spill, *, look_at: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """`look_at` is shown each distinct message that calls tools, in our shape."""
        self._spill, self._look_at = spill, look_at
        self._by_hash: dict[int, int] = {}
        self.places, self.sizes = array("Q"), array("I")
        """Where in the spill each message is as its source wrote it, and its length."""
        self.digests, self.roles, self.answered = array("q"), array("B"), array("q")
        """For each message the digest of what a later history repeats of it, the role, and the
        hash of the id of the call that a tool's message answers (0 for none)."""
        self.calls: dict[int, tuple[int, ...]] = {}
        """The hashes of the ids of the tool calls of those messages that have some."""
        self.losses: dict[int, tuple[str, ...]] = {}
        """What some messages had in their source and lack in our shape."""

    def numbers_of(self, raws: Sequence[bytes]) -> list[int]:
        """Returns the numbers of messages, given as the JSON that their source wrote.

        Raises UnreadableRowError for one that no chat can hold.
        """
        keys = list(map(hash, raws))
        numbers = list(map(self._by_hash.get, keys))
        if None in numbers:
            for index, number in enumerate(numbers):
                if number is None:
                    raw, key = raws[index], keys[index]
                    numbers[index] = self._by_hash[key] = self._add(raw, seen_message(raw))
        return cast("list[int]", numbers)

    def _add(self, raw: bytes, seen: SeenMessage) -> int:
        if PARTS_LOST in seen.losses:
            raise UnreadableRowError("content of an unknown kind", "its format's reader is needed")
        number = len(self.places)
        self.places.append(self._spill.append(raw))
        self.sizes.append(len(raw))
        self.digests.append(seen.digest)
        self.roles.append(_ROLES[seen.role])
        self.answered.append(0 if seen.answered is None else hash(seen.answered) or 1)
        if seen.call_ids:
            self.calls[number] = tuple(hash(name) or 1 for name in seen.call_ids)
            if self._look_at is not None:
                self._look_at(shaped_message(raw))
        if seen.losses:
            self.losses[number] = seen.losses
        return number

    def raw(self, number: int) -> bytes:
        """Returns a message as its source wrote it."""
        return self._spill.read(self.places[number], self.sizes[number])
