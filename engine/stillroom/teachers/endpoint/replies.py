"""Reading what a chat completions endpoint says: turns, usage, and what its refusals mean."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Literal

import msgspec

from stillroom.teachers.limits.words import LimitKind
from stillroom.types import Message, ToolCall, Usage

REASONING_KEYS = ("reasoning", "reasoning_content", "reasoning_details")
MAX_TOOL_CALLS = 1024
"""A turn with more of them is unreadable: each call takes kilobytes of memory until it is run."""
_LONE_SURROGATE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Any escape of JSON's; group 1 is half of a pair, which stands for no character."""
_SIGNATURES = "extra_content"
"""Where Google's models keep what they must be sent back, of a turn or of a call."""
_KEPT_KEYS = ("content", _SIGNATURES, *REASONING_KEYS)
_MAX_TOKENS_OF_A_CALL = 1 << 40
_MAX_USD = 1e9
_KEPT_BYTES = 4000
_MAX_NAME = 200
_NO_CREDIT = re.compile(r"insufficient_quota|credit balance is too low", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context.{0,8}(length|window|size)|(prompt|input) is too long|input token count",
    re.IGNORECASE,
)
_FLAGGED = re.compile(r"moderation|flagged|content.{0,3}polic|safety", re.IGNORECASE)


_FINISHES: dict[str | None, Literal["length", "filter"]] = {
    "length": "length",
    "content_filter": "filter",
}


class UnreadableTurnError(Exception):
    """A response that came whole and holds no turn."""


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn as an endpoint gave it."""

    message: Message
    finish_reason: Literal["stop", "length", "filter"]
    usage: Usage | None
    """None where it does not say what the call took."""
    reported_usd: float | None
    """What it says that the call cost, in US dollars."""
    model: str | None
    """Which it says that answered."""
    fingerprint: str | None


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: Any = None
    extra_content: Any = None


class _Reply(msgspec.Struct):
    content: str | list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: Any = msgspec.UNSET
    reasoning_content: Any = msgspec.UNSET
    reasoning_details: Any = msgspec.UNSET
    extra_content: Any = msgspec.UNSET
    refusal: Any = None
    tool_calls: Annotated[list[_Call], msgspec.Meta(max_length=MAX_TOOL_CALLS)] | None = None


class _Choice(msgspec.Struct):
    message: _Reply
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    """The part of a response that must be as expected."""

    choices: list[_Choice]
    usage: msgspec.Raw = msgspec.Raw(b"null")
    """Decoded apart: a number that no float holds must not lose an answer that was paid for."""
    model: Any = None
    system_fingerprint: Any = None


_COMPLETION = msgspec.json.Decoder(_Completion)


def read_turn(body: bytes) -> ReadTurn:
    """Returns the turn that a response holds; servers differ in the form, and none is turned down
    for what can be told all the same.

    Raises UnreadableTurnError, with the beginning of the response.
    """
    try:
        completion = _completion(body)
        choice = completion.choices[0]
    except (msgspec.DecodeError, IndexError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableTurnError(f"{error}: {_beginning(body)}") from error
    if choice.finish_reason == "error":
        raise UnreadableTurnError(f"the turn ended in an error: {_beginning(body)}")
    usage = _usage_fields(completion.usage)
    return ReadTurn(
        message=_message(choice.message),
        finish_reason=_FINISHES.get(choice.finish_reason, "stop"),
        usage=_usage(usage),
        reported_usd=_reported_usd(usage),
        model=_name(completion.model),
        fingerprint=_name(completion.system_fingerprint),
    )


def _completion(body: bytes) -> _Completion:
    try:
        return _COMPLETION.decode(body)
    except msgspec.DecodeError:
        # Half a surrogate pair spoils the whole text for a strict decoder. Asked again, the model
        # would be paid again, and might well write the same.
        return _COMPLETION.decode(_LONE_SURROGATE.sub(_replaced, body))


def _replaced(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape[1] else escape[0]


def _usage_fields(usage: msgspec.Raw) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(usage))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _name(value: Any) -> str | None:
    return value[:_MAX_NAME] if isinstance(value, str) and value else None


def _message(reply: _Reply) -> Message:
    message: Any = {"role": "assistant"}
    for key in _KEPT_KEYS:
        value = getattr(reply, key)
        if value is not msgspec.UNSET:
            message[key] = value
    if reply.tool_calls:
        message["tool_calls"] = _calls(reply.tool_calls)
    elif not reply.content:
        # What a model says instead of an answer is what it says.
        message["content"] = reply.refusal if isinstance(reply.refusal, str) else ""
    return message


def _calls(calls: list[_Call]) -> list[ToolCall]:
    """Returns the calls, each with an id of its own: replies are told apart by it."""
    made: list[ToolCall] = []
    taken: set[str] = set()
    for index, call in enumerate(calls):
        given = str(call.id) if isinstance(call.id, str | int) else ""
        identity = given or f"call_{index}"
        while identity in taken:
            identity = f"{identity}_{index}"
        taken.add(identity)
        function: Any = {"name": call.function.name, "arguments": _arguments(call.function)}
        one: Any = {"id": identity, "type": "function", "function": function}
        if call.extra_content is not None:
            one[_SIGNATURES] = call.extra_content
        made.append(one)
    return made


def _arguments(function: _Function) -> str:
    """Returns the arguments as the JSON text that most servers send."""
    written = function.arguments
    if isinstance(written, str):
        return written or "{}"
    return "{}" if written is None else msgspec.json.encode(written).decode()


def readable_arguments(written: str) -> str:
    """Returns the arguments of an earlier call so that any server takes them: as a JSON object.

    Many templates read them, and a server then refuses the whole conversation.
    """
    try:
        is_object = isinstance(msgspec.json.decode(written), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        is_object = False
    return written if is_object else msgspec.json.encode({"malformed": written}).decode()


def _beginning(body: bytes) -> str:
    return body[:_KEPT_BYTES].decode("utf-8", "replace").strip()


def _usage(usage_fields: Mapping[str, Any]) -> Usage | None:
    prompt, completion = (
        _count(usage_fields, "prompt_tokens"),
        _count(usage_fields, "completion_tokens"),
    )
    if prompt is None or completion is None:
        return None
    # Some count a model's thinking in the total alone, and bill it like the rest of the answer.
    total = _count(usage_fields, "total_tokens") or 0
    return Usage(prompt_tokens=prompt, completion_tokens=max(completion, total - prompt))


def _count(usage_fields: Mapping[str, Any], name: str) -> int | None:
    """Returns a number of tokens; None where the endpoint gives none that makes sense."""
    value = usage_fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= _MAX_TOKENS_OF_A_CALL else None


def _reported_usd(usage_fields: Mapping[str, Any]) -> float | None:
    value = usage_fields.get("cost")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MAX_USD else None


def limit_kind(message: str) -> LimitKind:
    """Returns what the words of a refusal say is limited."""
    if re.search(r"concurren|simultaneous|in parallel|in flight", message, re.IGNORECASE):
        return LimitKind.CONCURRENCY
    if re.search(r"tokens? per|\btp[smd]\b", message, re.IGNORECASE):
        return LimitKind.TOKENS
    if re.search(r"(requests?|calls|queries) per|\b[rq]p[smd]\b", message, re.IGNORECASE):
        return LimitKind.REQUESTS
    return LimitKind.UNKNOWN


def says_no_credit(status: int, message: str) -> bool:
    """Returns whether a refusal means that no call is paid for any more, now or later."""
    return status == 402 or _NO_CREDIT.search(message) is not None


def says_too_long(status: int, message: str) -> bool:
    """Returns whether a refusal means that the conversation is longer than the model takes."""
    return status in (400, 413, 422) and _TOO_LONG.search(message) is not None


def says_flagged(message: str) -> bool:
    """Returns whether a refusal is about what one prompt says, and not about the key."""
    return _FLAGGED.search(message) is not None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds that a refusal asks to wait, written as a number or as a date."""
    millis = _seconds(headers.get("retry-after-ms", ""))
    if millis is not None:
        return millis / 1000
    written = headers.get("retry-after", "")
    try:
        return max(0.0, parsedate_to_datetime(written).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return _seconds(written)


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
