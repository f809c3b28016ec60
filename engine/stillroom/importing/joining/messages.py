"""Checks each message of a source by itself, and digests what of it a later history repeats."""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

import msgspec

from stillroom.data.checks import Problem, decode_deeper, message_problems
from stillroom.files import canonical_json
from stillroom.importing.chat_messages import PARTS_LOST, ChatReader
from stillroom.importing.json_rows import UnreadableRowError
from stillroom.rollout.rewards.answers import without_thinking

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_IDS_REMEMBERED = 4096
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


class SeenMessage(msgspec.Struct, frozen=True, gc=False):
    """What joining has to know of a message. Every process makes the same digests."""

    role: str
    digest: bytes
    """Eight bytes that stand for what a later history repeats of it: the role, the text and the
    tool calls, but neither reasoning nor ids."""
    calls: tuple[int, ...] = ()
    """Digests of the ids of its tool calls."""
    answered: int = 0
    """A digest of the id of the call that a tool's message answers; 0 if it names none."""
    losses: tuple[str, ...] = ()


class PlainFunction(msgspec.Struct, gc=False):
    """The function that a call names, with its arguments as JSON text."""

    name: str
    arguments: str


class PlainCall(msgspec.Struct, gc=False):
    """A tool call with an id."""

    id: str
    function: PlainFunction
    type: Literal["function"] = "function"


class PlainMessage(msgspec.Struct, gc=False, omit_defaults=True):
    """A message as most clients and endpoints write it; all others are read the long way."""

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[PlainCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: None = None
    thinking: None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    weight: None = None

    @property
    def is_plain(self) -> bool:
        """Whether its fields are those of its role."""
        match self.role:
            case "assistant":
                return self.tool_call_id is None
            case "tool":
                return self.tool_calls is None and self.name is None
            case "system" | "user":
                return self.tool_calls is None and self.tool_call_id is None
            case _:
                return False


_PLAIN = msgspec.json.Decoder(PlainMessage)


def seen_message(raw: bytes, plain: PlainMessage | None) -> SeenMessage:
    """Returns what joining has to know of a message, given as its source wrote it.

    `plain` is what plain_message makes of it. Raises UnreadableRowError for one that no chat can
    hold, or that its format's reader has to read.
    """
    if plain is None:
        return _seen_the_long_way(raw)
    role, text = plain.role, plain.content or ""
    if plain.tool_calls:
        made = [(call.function.name, call.function.arguments) for call in plain.tool_calls]
        ids = tuple([_id_digest(call.id) for call in plain.tool_calls])
        return SeenMessage(role, _digest(role, text, plain.name, made), ids)
    answered = 0 if plain.tool_call_id is None else _id_digest(plain.tool_call_id)
    return SeenMessage(role, _digest(role, text, plain.name, ()), (), answered)


def _seen_the_long_way(raw: bytes) -> SeenMessage:
    message, losses = _shaped(raw)
    if PARTS_LOST in losses:
        raise UnreadableRowError("content of an unknown kind", "its format's reader is needed")
    # Whether a tool's message answers a call is seen in the conversation only.
    problem = next((p for p in message_problems([message]) if not _is_of_others(p)), None)
    if problem is not None:
        field = problem.field.removeprefix("messages[0]").lstrip(".")
        raise UnreadableRowError("unsound message", f"{field} {problem.message}")
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    answered = message.get("tool_call_id")
    return SeenMessage(
        message["role"],
        _digest(message["role"], message["content"], message.get("name"), made),
        tuple(_id_digest(call["id"]) for call in calls),
        0 if answered is None else _id_digest(answered),
        losses,
    )


def plain_message(raw: bytes) -> PlainMessage | None:
    """Returns a message that is as most are, in our shape; None for any other."""
    try:
        plain = _PLAIN.decode(raw)
    except _UNREADABLE:
        return None
    if not plain.is_plain:
        return None
    plain.content = plain.content or ""
    plain.tool_calls = plain.tool_calls or None
    return plain


def shaped_message(raw: bytes) -> dict[str, Any]:
    """Returns a message in our shape, given as its source wrote it.

    Raises UnreadableRowError if it is none.
    """
    return _shaped(raw)[0]


def _shaped(raw: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        decoded = decode_deeper(_ANY.decode, raw, 8)
    except _UNREADABLE as error:
        raise UnreadableRowError("not a JSON object", f"a message: {error}") from error
    reader = ChatReader()
    message = reader.message(decoded)
    for index, call in enumerate(message.get("tool_calls", ())):
        call.setdefault("id", f"call_{index}")
    return message, tuple(reader.losses)


def _is_of_others(problem: Problem) -> bool:
    return problem.field.endswith("tool_call_id")


def _digest(role: str, text: str, name: str | None, calls: Iterable[tuple[str, str]]) -> bytes:
    if role == "assistant":
        parts = [role, _trimmed(without_thinking(text))]
        for called, arguments in calls:
            parts += (called, _compared(arguments))
        return _digest_of(*parts)
    if name is None or role == "tool":
        # A tool's name is left out by many histories; a speaker's tells two of them apart.
        return _digest_of(role, _trimmed(text))
    return _digest_of(role, _trimmed(text), name)


def _digest_of(*parts: str) -> bytes:
    # No text has a byte 0xff, so that other parts never come to the same bytes.
    data = b"\xff".join([part.encode("utf-8", "surrogatepass") for part in parts])
    return sha256(data).digest()[:8]


@lru_cache(maxsize=_IDS_REMEMBERED)
def _id_digest(name: str) -> int:
    """Returns a digest of an id, which stands in a reply, in its repetition and in a result."""
    return int.from_bytes(_digest_of(name), "little", signed=True) or 1


def _trimmed(text: str) -> str:
    return (text.replace("\r\n", "\n") if "\r" in text else text).strip()


def _compared(arguments: str) -> str:
    """Returns the arguments of a call in a form that does not depend on their spelling."""
    try:
        return canonical_json(_ANY.decode(arguments)).decode()
    except _UNREADABLE:
        return arguments.strip()
