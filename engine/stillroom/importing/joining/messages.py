"""Checks each message of a source by itself, and digests what of it a later history repeats."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from stillroom.data.checks import Problem, decode_deeper, message_problems
from stillroom.files import canonical_json
from stillroom.importing.chat_messages import ChatReader
from stillroom.importing.json_rows import UnreadableRowError
from stillroom.rollout.rewards.answers import without_thinking

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


class SeenMessage(msgspec.Struct, frozen=True, gc=False):
    """What joining has to know of a message."""

    role: str
    digest: int
    """A digest of what a later history repeats of it: the role, the text and the tool calls, but
    neither reasoning nor ids. Equal only within this process."""
    call_ids: tuple[str, ...] = ()
    answered: str | None = None
    """The id of the call that a tool's message answers; None if it names none."""
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


def seen_message(raw: bytes) -> SeenMessage:
    """Returns what joining has to know of a message, given as its source wrote it.

    Raises UnreadableRowError for one that no chat can hold.
    """
    try:
        plain = _PLAIN.decode(raw)
    except _UNREADABLE:
        return _seen_the_long_way(raw)
    if not plain.is_plain:
        return _seen_the_long_way(raw)
    calls = plain.tool_calls or ()
    digest = _digest(
        plain.role,
        plain.content or "",
        plain.name,
        [(call.function.name, call.function.arguments) for call in calls],
    )
    ids = tuple([call.id for call in calls])
    return SeenMessage(plain.role, digest, ids, plain.tool_call_id)


def _seen_the_long_way(raw: bytes) -> SeenMessage:
    message, losses = _shaped(raw)
    # Whether a tool's message answers a call is seen in the conversation only.
    problem = next((p for p in message_problems([message]) if not _is_of_others(p)), None)
    if problem is not None:
        field = problem.field.removeprefix("messages[0]").lstrip(".")
        raise UnreadableRowError("unsound message", f"{field} {problem.message}")
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return SeenMessage(
        message["role"],
        _digest(message["role"], message["content"], message.get("name"), made),
        tuple(call["id"] for call in calls),
        message.get("tool_call_id"),
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


def _digest(role: str, text: str, name: str | None, calls: Iterable[tuple[str, str]]) -> int:
    if role == "assistant":
        made = tuple([(called, _compared(arguments)) for called, arguments in calls])
        return hash((role, _trimmed(without_thinking(text)), made))
    # A tool's name is left out by many histories; a speaker's tells two of them apart.
    return hash((role, _trimmed(text), None if role == "tool" else name))


def _trimmed(text: str) -> str:
    return (text.replace("\r\n", "\n") if "\r" in text else text).strip()


def _compared(arguments: str) -> bytes:
    """Returns the arguments of a call in a form that does not depend on their spelling."""
    try:
        return canonical_json(_ANY.decode(arguments))
    except _UNREADABLE:
        return arguments.strip().encode("utf-8", errors="surrogatepass")
