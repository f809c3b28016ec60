"""Reads the input and output of a traced call, whose format depends on the application.

They may be bodies of an API, messages, LangChain's prompts and generations, or plain text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from stillroom.data.checks import describe
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import (
    NO_REPLY,
    ApiCall,
    offered_tools,
    replies,
    request_messages,
    responses_messages,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    finish_reason_of,
    parse_if_json,
    text_of,
)
from stillroom.importing.payloads.messages import NO_MESSAGES, TRUNCATED, MessageReader

_WRAPPERS = ("args", "kwargs", "input", "request", "inputs")
_ITEM_KINDS = frozenset({"function_call", "function_call_output", "reasoning", "message"})
_BLOCK_KINDS = frozenset({"text", "tool_use", "thinking", "redacted_thinking"})
_TRUNCATION_MARKERS = ("<truncated due to size", "...[truncated]", "… [truncated")


@dataclass(frozen=True, slots=True)
class FreeFormReply:
    """The messages of one reply, and its finish reason."""

    messages: list[Row]
    finish_reason: str | None = None


def free_form_prompt(value: Any, reader: MessageReader) -> list[Row]:
    """Returns the messages in a traced input. Raises UnreadableRowError if there are none."""
    if isinstance(value, str) and value:
        note_truncation(value, reader)
        return _prompt_of_text(value, reader)
    if isinstance(value, list):
        return _messages_of_list(cast("list[Any]", value), reader)
    messages = _prompt_of_object(as_row(value), reader)
    if messages is None:
        raise UnreadableRowError(NO_MESSAGES, f"the input is {describe(value)}")
    return messages


def _prompt_of_text(text: str, reader: MessageReader) -> list[Row]:
    """Returns the messages in a JSON text; any other text becomes a user message."""
    parsed, trial = parse_if_json(text), MessageReader()
    if not isinstance(parsed, str):
        try:
            messages = free_form_prompt(parsed, trial)
        except UnreadableRowError:
            return [{"role": "user", "content": text}]
        reader.dropped |= trial.dropped
        return messages
    return [{"role": "user", "content": text}]


def _prompt_of_object(fields: Row, reader: MessageReader) -> list[Row] | None:
    """Returns the messages in an input that is an object; None if there are none."""
    if isinstance(fields.get("messages"), list):
        messages = as_list(fields["messages"])
        if len(messages) == 1 and _is_batch(messages[0]):
            messages = as_list(messages[0])
        return request_messages(fields | {"messages": messages}, reader)
    if "role" in fields or "lc" in fields:
        return reader.turn(fields)
    if isinstance(fields.get("input"), list | str):
        return request_messages(fields, reader)
    for name in _WRAPPERS:
        if as_row(fields.get(name)):
            return free_form_prompt(fields[name], reader)
    texts = as_list(fields.get("prompts")) if "prompts" in fields else list(fields.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return [{"role": "user", "content": texts[0]}]
    return None


def free_form_calls(
    input_value: Any, output: Any, reader: MessageReader, *, error: str | None = None
) -> list[ApiCall]:
    """Returns the calls in a traced input and output: one per reply, or one that failed.

    Raises UnreadableRowError if there are no messages, or neither a reply nor an error.
    """
    prompt, outputs = free_form_prompt(input_value, reader), [FreeFormReply([])]
    if output not in (None, "", {}, [], "null"):
        outputs = free_form_replies(output, reader)
    elif error is None:
        raise UnreadableRowError(NO_REPLY, "the call has no output")
    return [
        ApiCall(
            messages=[*prompt, *reply.messages],
            finish_reason=reply.finish_reason,
            error=None if reply.messages else error,
            dropped=tuple(reader.dropped),
        )
        for reply in outputs
    ]


def free_form_replies(value: Any, reader: MessageReader) -> list[FreeFormReply]:
    """Returns the replies in a traced output. Raises UnreadableRowError if there are none."""
    trial = MessageReader()
    try:
        found_replies = [reply for reply in _replies_in(value, trial) if reply.messages]
    except UnreadableRowError:
        if not isinstance(value, str) or not value:
            raise
        found_replies = [
            FreeFormReply([{"role": "assistant", "content": value}])
        ]  # the reply is text that looks like JSON
    else:
        reader.dropped |= trial.dropped
    if not found_replies:
        raise UnreadableRowError(NO_REPLY, f"the output is {describe(value)}")
    return found_replies


def _replies_in(value: Any, reader: MessageReader) -> list[FreeFormReply]:
    """Returns the replies in an output, some of which may have no messages."""
    parsed = parse_if_json(value)
    if isinstance(parsed, str):
        note_truncation(parsed, reader)
    elif isinstance(parsed, list):
        return [FreeFormReply(_reply_of_list(cast("list[Any]", parsed), reader))]
    fields = as_row(parsed)
    if isinstance(fields.get("generations"), list):
        return list(_generations(fields["generations"], reader))
    if isinstance(fields.get("messages"), list):
        return [
            FreeFormReply(reader.turns(fields["messages"][-1:]), _finish_reason(fields["messages"]))
        ]
    for name in ("message", "output", "response", "result", "completion", "text"):
        if _is_reply(fields.get(name)) and not _is_body(fields):
            return _replies_in(fields[name], reader)
    if "lc" in fields or fields.get("type") in ("ai", "AIMessageChunk"):
        return [FreeFormReply(reader.turn(fields), _finish_reason([fields]))]
    if "role" not in fields and ("content" in fields or "tool_calls" in fields):
        fields |= {"role": "assistant"}
    pairs = replies(fields or parsed, reader)
    return [FreeFormReply(messages, finish_reason) for messages, finish_reason in pairs]


def free_form_tools(value: Any) -> list[Row] | None:
    """Returns the schemas of the tools in a traced input; None if it has none."""
    fields = as_row(parse_if_json(value))
    for body in (fields, *(as_row(fields.get(name)) for name in _WRAPPERS)):
        if as_list(body.get("tools")) or as_list(body.get("functions")):
            return offered_tools(body)
    return None


def note_truncation(text: str, reader: MessageReader) -> None:
    """Notes truncated content in `reader.dropped` if a text has a tracer's truncation marker."""
    if any(mark in text for mark in _TRUNCATION_MARKERS):
        reader.drop(TRUNCATED)


def _is_body(fields: Row) -> bool:
    """Returns whether an output is the body of an API's response."""
    return "choices" in fields or fields.get("object") == "response" or "stop_reason" in fields


def _is_reply(value: Any) -> bool:
    return (isinstance(value, str) and bool(value)) or bool(as_row(value)) or bool(as_list(value))


def _is_batch(value: Any) -> bool:
    """Returns whether a value is the prompt of a LangChain batch, not a pair of two strings."""
    items = as_list(value)
    return bool(items) and not all(isinstance(item, str) for item in items)


def _messages_of_list(items: list[Any], reader: MessageReader) -> list[Row]:
    """Returns the messages in an input that is a list of messages or items."""
    if len(items) == 1 and _is_batch(items[0]):
        return _messages_of_list(as_list(items[0]), reader)
    kinds = {text_of(as_row(item).get("type")) for item in items}
    if kinds & _ITEM_KINDS and not any("lc" in as_row(item) for item in items):
        return responses_messages(items, reader)
    if not items:
        raise UnreadableRowError(NO_MESSAGES, "the input is an empty list")
    return reader.turns(items)


def _reply_of_list(items: list[Any], reader: MessageReader) -> list[Row]:
    """Returns the reply in a list of Responses items, Anthropic blocks or messages."""
    kinds = {text_of(as_row(item).get("type")) for item in items}
    if kinds and kinds <= _BLOCK_KINDS:
        return reader.turn({"role": "assistant", "content": items})
    if not items:
        raise UnreadableRowError(NO_REPLY, "the output is an empty list")
    messages = _messages_of_list(items, reader)
    return messages if kinds & _ITEM_KINDS else messages[-1:]


def _generations(value: Any, reader: MessageReader) -> Iterator[FreeFormReply]:
    """Yields LangChain's generations for the single prompt of a run."""
    groups = as_list(value)
    first = as_list(groups[0]) if groups and isinstance(groups[0], list) else groups
    for generation in map(as_row, first):
        message = generation.get("message")
        finish_reason = as_row(generation.get("generation_info")).get("finish_reason")
        if isinstance(message, dict):
            fields = cast("Row", message)
            yield FreeFormReply(
                reader.turn(fields), finish_reason_of(finish_reason) or _finish_reason([fields])
            )
        elif isinstance(generation.get("text"), str):
            reply: Row = {"role": "assistant", "content": generation["text"]}
            yield FreeFormReply([reply], finish_reason_of(finish_reason))


def _finish_reason(messages: Any) -> str | None:
    """Returns the finish reason in the LangChain metadata of the last message."""
    message = as_row(as_list(messages)[-1]) if as_list(messages) else {}
    fields = as_row(message.get("kwargs")) or as_row(message.get("data")) or message
    metadata = as_row(fields.get("response_metadata"))
    reason = metadata.get("finish_reason", metadata.get("stop_reason", fields.get("finish_reason")))
    return finish_reason_of(text_of(reason))
