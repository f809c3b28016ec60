"""Parses the responses of a chat completions endpoint: turns, usage, and reasons of errors."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Literal

import msgspec

from stillroom import bounds
from stillroom.teachers.limits.limit_types import LimitKind
from stillroom.types import Message, ToolCall, Usage

REASONING_KEYS = ("reasoning", "reasoning_content", "reasoning_details")
MAX_TOOL_CALLS = bounds.TOOL_CALLS.limit
"""The maximum number of tool calls in a turn; each takes kilobytes of memory until it runs."""
_LONE_SURROGATE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Matches any escape in JSON; group 1 is a lone surrogate, which is not a character."""
_SIGNATURES = "extra_content"
"""The key of a turn or call with the data that Google's models require back."""
_KEPT_KEYS = ("content", _SIGNATURES, *REASONING_KEYS)
_MAX_TOKENS_OF_A_CALL = 1 << 40
"""The highest plausible token count of one call; a higher count is ignored."""
_MAX_USD = 1e9
"""The highest plausible cost of one call in US dollars; a higher cost is ignored."""
_MAX_BYTES_PER_TOKEN = 256
"""An upper bound: the longest tokens of today's vocabularies are shorter runs of spaces."""
_MAX_QUOTED_BYTES = 4000
"""The maximum number of bytes quoted by an error from a response that cannot be parsed."""
_MAX_NAME_CHARS = 200
"""A model's name or fingerprint is truncated to this many characters."""
_NO_CREDIT = re.compile(r"insufficient_quota|credit balance is too low", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context.{0,8}(length|window|size)|(prompt|input) is too long|input token count",
    re.IGNORECASE,
)
_NO_TOOL_PARSER = re.compile(
    r"tool[-_ ]call[-_ ]parser|enable[-_]auto[-_]tool[-_]choice", re.IGNORECASE
)
_FLAGGED = re.compile(r"moderation|flagged|content.{0,3}polic|safety", re.IGNORECASE)


_FINISH_REASONS: dict[str | None, Literal["length", "filter"]] = {
    "length": "length",
    "content_filter": "filter",
}


class UnreadableTurnError(Exception):
    """A complete response does not hold a readable turn."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn as an endpoint returned it."""

    message: Message
    finish_reason: Literal["stop", "length", "filter"]
    usage: Usage | None
    """The tokens of the call; None if the endpoint reports none, or too few for its text."""
    reported_usd: float | None
    """The cost of the call in US dollars; None if the endpoint does not report it."""
    model: str | None
    """The name of the model that answered; None if the endpoint does not report it."""
    fingerprint: str | None
    """The `system_fingerprint` of the response; None if it has none."""


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
    """The part of a response body that is validated."""

    choices: list[_Choice]
    usage: msgspec.Raw = msgspec.Raw(b"null")
    """The undecoded usage. It is decoded separately, so that a number out of a float's range does
    not invalidate a response that was paid for."""
    model: Any = None
    system_fingerprint: Any = None


_COMPLETION = msgspec.json.Decoder(_Completion)


def read_turn(body: bytes) -> ParsedTurn:
    """Returns the turn in a response body.

    Servers deviate from the format in many ways; a response is rejected only if its meaning is
    unclear, with an UnreadableTurnError that quotes its beginning.
    """
    try:
        completion = _completion(body)
        choice = completion.choices[0]
    except (msgspec.DecodeError, IndexError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableTurnError(f"{error}: {_beginning(body)}") from error
    if choice.finish_reason == "error":
        raise UnreadableTurnError(f"the turn ended in an error: {_beginning(body)}")
    usage, message = _usage_fields(completion.usage), _message(choice.message)
    return ParsedTurn(
        message=message,
        finish_reason=_FINISH_REASONS.get(choice.finish_reason, "stop"),
        usage=_usage(usage, message),
        reported_usd=_reported_usd(usage),
        model=_name(completion.model),
        fingerprint=_name(completion.system_fingerprint),
    )


def _completion(body: bytes) -> _Completion:
    """Returns a decoded response body, with lone surrogates replaced. Raises DecodeError."""
    try:
        return _COMPLETION.decode(body)
    except msgspec.DecodeError:
        # A strict decoder rejects a whole text for a lone surrogate. A new request would be billed
        # again and might return the same text, so the surrogate is replaced instead.
        return _COMPLETION.decode(_LONE_SURROGATE.sub(_replace_escape, body))


def _replace_escape(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape[1] else escape[0]


def _usage_fields(usage: msgspec.Raw) -> dict[str, Any]:
    """Returns the fields of a response's `usage`; {} if it is not a JSON object."""
    try:
        fields = json.loads(bytes(usage))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _name(value: Any) -> str | None:
    return value[:_MAX_NAME_CHARS] if isinstance(value, str) and value else None


def _message(reply: _Reply) -> Message:
    """Returns the assistant message of a response."""
    message: Any = {"role": "assistant"}
    for key in _KEPT_KEYS:
        value = getattr(reply, key)
        if value is not msgspec.UNSET:
            message[key] = value
    if reply.tool_calls:
        message["tool_calls"] = _calls(reply.tool_calls)
    elif not reply.content:
        # A refusal is the model's answer, so its text becomes the message's content.
        message["content"] = reply.refusal if isinstance(reply.refusal, str) else ""
    return message


def _calls(calls: list[_Call]) -> list[ToolCall]:
    """Returns the tool calls, each with a unique id, by which tool results refer to their call."""
    tool_calls: list[ToolCall] = []
    used_ids: set[str] = set()
    for index, call in enumerate(calls):
        call_id = str(call.id) if isinstance(call.id, str | int) else ""
        call_id = call_id or f"call_{index}"
        while call_id in used_ids:
            call_id = f"{call_id}_{index}"
        used_ids.add(call_id)
        function: Any = {"name": call.function.name, "arguments": _arguments(call.function)}
        tool_call: Any = {"id": call_id, "type": "function", "function": function}
        if call.extra_content is not None:
            tool_call[_SIGNATURES] = call.extra_content
        tool_calls.append(tool_call)
    return tool_calls


def _arguments(function: _Function) -> str:
    """Returns a call's arguments as JSON text; some servers send an object or nothing instead."""
    arguments = function.arguments
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else msgspec.json.encode(arguments).decode()


def readable_arguments(arguments: str) -> str:
    """Returns the arguments of an earlier call as the text of a JSON object.

    Other arguments are wrapped in an object: many chat templates parse the arguments, and a server
    would reject the whole conversation for malformed ones.
    """
    try:
        is_object = isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        is_object = False
    return arguments if is_object else msgspec.json.encode({"malformed": arguments}).decode()


def _beginning(body: bytes) -> str:
    return body[:_MAX_QUOTED_BYTES].decode("utf-8", "replace").strip()


def _usage(usage_fields: Mapping[str, Any], message: Message) -> Usage | None:
    """Returns the reported usage; None if it is missing or implausible for this message.

    If a long text could count as 0 tokens, no budget would limit it.
    """
    prompt, completion = (
        _count(usage_fields, "prompt_tokens"),
        _count(usage_fields, "completion_tokens"),
    )
    if prompt is None or completion is None:
        return None
    texts = _generated_texts(message)
    if texts and completion * _MAX_BYTES_PER_TOKEN < len(msgspec.json.encode(texts)):
        return None
    # Some endpoints count a model's thinking only in total_tokens, but bill it as completion.
    total = _count(usage_fields, "total_tokens") or 0
    return Usage(prompt_tokens=prompt, completion_tokens=max(completion, total - prompt))


def _generated_texts(message: Message) -> list[Any]:
    """Returns the texts of a message that its model must have generated."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    reasoning: list[Any] = [message.get("reasoning"), message.get("reasoning_content")]
    return [text for text in (message.get("content"), *reasoning, *calls) if text]


def _count(usage_fields: Mapping[str, Any], name: str) -> int | None:
    """Returns a number of tokens; None if the field is missing or not a plausible number."""
    value = usage_fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= _MAX_TOKENS_OF_A_CALL else None


def _reported_usd(usage_fields: Mapping[str, Any]) -> float | None:
    """Returns the reported cost of a call, including what an upstream provider bills the user.

    With a key of the user's own at OpenRouter (`is_byok`), `cost` is only OpenRouter's fee.
    """
    cost = _usd(usage_fields.get("cost"))
    details = usage_fields.get("cost_details")
    upstream = _usd(
        details.get("upstream_inference_cost")
        if isinstance(details, dict)
        else usage_fields.get("upstream_inference_cost")
    )
    is_own_key = usage_fields.get("is_byok")
    if is_own_key is False:
        return cost
    if upstream is None:
        return None if is_own_key else cost
    return (cost or 0.0) + upstream


def _usd(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MAX_USD else None


def limit_kind(message: str) -> LimitKind:
    """Returns the kind of limit that a 429's message mentions."""
    if re.search(r"concurren|simultaneous|in parallel|in flight", message, re.IGNORECASE):
        return LimitKind.CONCURRENCY
    if re.search(r"tokens? per|\btp[smd]\b", message, re.IGNORECASE):
        return LimitKind.TOKENS
    if re.search(r"(requests?|calls|queries) per|\b[rq]p[smd]\b", message, re.IGNORECASE):
        return LimitKind.REQUESTS
    return LimitKind.UNKNOWN


def is_credit_error(status: int, message: str) -> bool:
    """Returns whether an error means that the account has no credit, so no call can succeed."""
    return status == 402 or _NO_CREDIT.search(message) is not None


def is_tool_parser_error(message: str) -> bool:
    """Returns whether an error means that a vLLM server was started without tool calls."""
    return _NO_TOOL_PARSER.search(message) is not None


def is_context_error(status: int, message: str) -> bool:
    """Returns whether an error means that the conversation exceeds the model's context."""
    return status in (400, 413, 422) and _TOO_LONG.search(message) is not None


def is_moderation_error(message: str) -> bool:
    """Returns whether an error is about the content of the prompt, not the key."""
    return _FLAGGED.search(message) is not None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds to wait that a response's headers state; None if they state none.

    Servers write them in milliseconds, in seconds, or as the date when the wait ends.
    """
    millis = _seconds(headers.get("retry-after-ms", ""))
    if millis is not None:
        return millis / 1000
    text = headers.get("retry-after", "")
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return _seconds(text)


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
