"""Keeps each distinct message of the sources once: clean in a file, with a few numbers in memory.

Logs repeat their history with every call. So a message is recognised by a hash of its bytes as the
source wrote them, and is decoded, looked through and kept only when it is seen first.
"""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from stillroom.data.checks import decode_deeper
from stillroom.importing.joining.messages import CleanMessage, clean_message
from stillroom.importing.joining.spill import Spill
from stillroom.importing.json_rows import UnreadableRowError

SYSTEM, USER, ASSISTANT, TOOL = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class MessageStore:
    """The distinct messages by number, each in one of the forms in which sources wrote it."""

    def __init__(
        self,
        spill: Spill,
        *,
        redact: Callable[[dict[str, Any]], dict[str, Any]],
        look_at: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`redact` takes secrets out of a message; `look_at` is shown each message that calls."""
        self._spill, self._redact, self._look_at = spill, redact, look_at
        self._by_hash: dict[int, int] = {}
        self._digests, self._places = array("q"), array("Q")
        self._sizes, self.roles = array("I"), array("B")
        self._answers = array("q")
        self._calls: dict[int, tuple[int, ...]] = {}
        self._losses: dict[int, tuple[str, ...]] = {}

    def number_of(self, raw: bytes) -> int:
        """Returns the number of a message, given as the JSON that its source wrote.

        Raises UnreadableRowError for one that no chat can hold.
        """
        key = hash(raw)
        number = self._by_hash.get(key)
        if number is None:
            number = self._by_hash[key] = self._add(raw)
        return number

    def _add(self, raw: bytes) -> int:
        try:
            clean = clean_message(decode_deeper(_ANY.decode, raw, 8))
            calls = clean.message.get("tool_calls", ())
            if calls and self._look_at is not None:
                self._look_at(clean.message)
            data = msgspec.json.encode(self._redact(clean.message))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UnreadableRowError("not a JSON object", f"a message: {error}") from error
        return self._keep(clean, data)

    def _keep(self, clean: CleanMessage, data: bytes) -> int:
        number = len(self._places)
        self._places.append(self._spill.append(data))
        self._sizes.append(len(data))
        self._digests.append(clean.digest)
        self.roles.append(_ROLES[clean.message["role"]])
        answered = clean.message.get("tool_call_id")
        self._answers.append(0 if answered is None else hash(answered) or 1)
        if clean.call_ids:
            self._calls[number] = tuple(hash(name) or 1 for name in clean.call_ids)
        if clean.losses:
            self._losses[number] = clean.losses
        return number

    def digest(self, number: int) -> int:
        """Returns the digest of what a later history repeats of a message."""
        return self._digests[number]

    def calls(self, number: int) -> tuple[int, ...]:
        """Returns the hashes of the ids of a message's tool calls."""
        return self._calls.get(number, ())

    def answered(self, number: int) -> int:
        """Returns the hash of the id of the call that a tool's message answers; 0 for none."""
        return self._answers[number]

    def losses(self, number: int) -> tuple[str, ...]:
        """Returns what a message had in its source and lacks here."""
        return self._losses.get(number, ())

    def size(self, number: int) -> int:
        """Returns the length of a message as JSON in bytes."""
        return self._sizes[number]

    def data(self, number: int) -> bytes:
        """Returns a message as JSON in our shape."""
        return self._spill.read(self._places[number], self._sizes[number])
