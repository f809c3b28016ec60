"""Stores each distinct message of the sources once, in a temporary file.

Logged calls repeat their history, so a message is recognised by a hash of its JSON, and parsed
only the first time. A few numbers per message stay in memory.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgspec

from stillroom.data.checks import message_problems
from stillroom.files import canonical_json
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.messages import PARTS_DROPPED, MessageReader
from stillroom.importing.spill import Spill
from stillroom.rollout.rewards.answers import strip_thinking

MIN_CACHED_MESSAGES = 1 << 17
"""The minimum number of recent messages that are recognised."""
_ENCODER = msgspec.json.Encoder()


class RecentNumbers:
    """A least-recently-used cache of numbers: it keeps between `size` and twice `size` keys."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def get(self, key: int) -> int | None:
        """Returns the number of a key; None if it is unknown or was evicted."""
        number = self._new.get(key)
        if number is None and (number := self._old.get(key)) is not None:
            self[key] = number
        return number

    def __setitem__(self, key: int, number: int) -> None:
        self._new[key] = number
        if len(self._new) >= self._size:
            self._new, self._old = {}, self._new


class MessageStore:
    """The distinct messages by number, in Stillroom's format."""

    def __init__(
        self,
        spill: Spill,
        *,
        on_tool_calls: Callable[[Row], None] | None = None,
        min_cached: int = MIN_CACHED_MESSAGES,
    ) -> None:
        """`on_tool_calls` is called with each distinct message that has tool calls.

        A message that was not seen again within `min_cached` others is stored a second time.
        """
        self._spill, self._on_tool_calls = spill, on_tool_calls
        self._by_hash = RecentNumbers(min_cached)
        self._offsets, self.sizes = array("Q"), array("I")
        """For each message, the offset and the length of its JSON in the spill."""
        self.digests, self.roles, self.answered = array("q"), array("B"), array("q")
        """For each message, `ParsedMessage.digest`, its role, and the digest of the call id that it
        answers (0 for none)."""
        self._calls: dict[int, tuple[int, ...]] = {}
        self.dropped: dict[int, tuple[str, ...]] = {}
        """What Stillroom's format does not keep of a message, by the message's number."""

    def numbers_of(self, messages: Sequence[Row]) -> list[int]:
        """Returns the numbers of messages; stores those that are new.

        Raises UnreadableRowError if one of them is not a valid chat message.
        """
        by_hash, numbers = self._by_hash, list[int]()
        for message in messages:
            key = hash(_ENCODER.encode(message))
            number = by_hash.get(key)
            if number is None:
                # A message whose hash was evicted is stored again, which only costs space.
                number = by_hash[key] = self._add(message)
            numbers.append(number)
        return numbers

    def _add(self, value: Row) -> int:
        """Stores a new message, and returns its number."""
        parsed, number = parse_message(value), len(self.sizes)
        data = _ENCODER.encode(parsed.message)
        self._offsets.append(self._spill.append(data))
        self.sizes.append(len(data))
        self.roles.append(parsed.role)
        self.digests.append(parsed.digest)
        self.answered.append(parsed.answered)
        if parsed.dropped:
            self.dropped[number] = parsed.dropped
        if parsed.calls:
            self._calls[number] = parsed.calls
            if self._on_tool_calls is not None:
                self._on_tool_calls(parsed.message)
        return number

    def calls(self, number: int) -> tuple[int, ...]:
        """Returns the digests of the ids of a message's tool calls."""
        return self._calls.get(number, ())

    def encoded(self, number: int) -> bytes:
        """Returns a message as JSON."""
        return self._spill.read(self._offsets[number], self.sizes[number])


_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_MAX_CACHED_IDS = 4096
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
SYSTEM, USER, ASSISTANT, TOOL = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A message in Stillroom's format, with the digests by which calls are joined."""

    message: Row
    role: int
    digest: int
    """A digest of the parts that later histories repeat: role, text and tool calls, but neither
    reasoning nor ids."""
    calls: tuple[int, ...]
    """Digests of the ids of its tool calls."""
    answered: int
    """The digest of the call id that a tool message answers; 0 for none."""
    dropped: tuple[str, ...]
    """What Stillroom's format does not keep of it."""


def parse_message(value: Any) -> ParsedMessage:
    """Parses a message of a call. Raises UnreadableRowError if it is not a valid chat message."""
    reader = MessageReader()
    message = reader.message(value)
    calls: list[Row] = message.get("tool_calls", [])
    for index, call in enumerate(calls):
        call.setdefault("id", f"call_{index}")
    if PARTS_DROPPED in reader.dropped:
        raise UnreadableRowError("content of an unknown kind", "a content part has an unknown type")
    # Whether a tool message answers a call can be checked only within the conversation.
    problems = message_problems([message])
    problem = next((p for p in problems if not p.field.endswith("tool_call_id")), None)
    if problem is not None:
        field = problem.field.removeprefix("messages[0]").lstrip(".")
        raise UnreadableRowError("invalid message", f"{field} {problem.message}")
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    answered = message.get("tool_call_id")
    return ParsedMessage(
        message,
        _ROLES[message["role"]],
        _digest(message["role"], message["content"], message.get("name"), functions),
        tuple(_id_digest(call["id"]) for call in calls),
        0 if answered is None else _id_digest(answered),
        tuple(reader.dropped),
    )


def _digest(role: str, text: str, name: str | None, calls: Iterable[tuple[str, str]]) -> int:
    """Returns `ParsedMessage.digest`; `calls` are pairs of a function's name and arguments."""
    if role == "assistant":
        parts = [role, _normalize(strip_thinking(text))]
        for function, arguments in calls:
            parts += (function, _canonical_arguments(arguments))
        return _digest_of(*parts)
    if name is None or role == "tool":
        # Many histories leave out a tool's name; a user's name distinguishes two speakers.
        return _digest_of(role, _normalize(text))
    return _digest_of(role, _normalize(text), name)


def _digest_of(*parts: str) -> int:
    # UTF-8 never contains the byte 0xff, so different parts never give the same bytes.
    data = b"\xff".join([part.encode("utf-8", "surrogatepass") for part in parts])
    return int.from_bytes(sha256(data).digest()[:8], "little", signed=True)


@lru_cache(maxsize=_MAX_CACHED_IDS)
def _id_digest(name: str) -> int:
    """Returns a digest of a call id, never 0."""
    return _digest_of(name) or 1


def _normalize(text: str) -> str:
    return (text.replace("\r\n", "\n") if "\r" in text else text).strip()


def _canonical_arguments(arguments: str) -> str:
    """Returns the arguments of a call as canonical JSON, or stripped if they are not JSON."""
    try:
        return canonical_json(_DECODER.decode(arguments)).decode()
    except _UNREADABLE:
        return arguments.strip()
