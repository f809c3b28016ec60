"""Reads model calls from spans of the OpenInference conventions, which Phoenix and Arize use.

Source: the OpenInference semantic conventions, `llm.input_messages.N.message.*` and so on.
"""

from collections.abc import Iterator
from typing import Any

from stillroom.importing.formats.observability.otlp import (
    Convention,
    Span,
    attribute_tree,
    join_turns,
    span_call,
)
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import NO_CONTENTS, ApiCall, read_calls
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    finish_reason_of,
    first_text,
    parse_if_json,
    text_of,
)
from stillroom.importing.payloads.messages import TRUNCATED, MessageReader, tool_schemas

KIND = "openinference.span.kind"
_REDACTED = "__REDACTED__"


def _is_model_call(span: Span) -> bool:
    return str(span.attributes.get(KIND)).upper() == "LLM"


def _read_call(span: Span) -> Iterator[ApiCall]:
    """Yields the call of a span.

    Most instrumentations also record the bodies of the request and the response, which have the
    reasoning and the finish reason that the attributes lack. Raises UnreadableRowError if the span
    has no messages.
    """
    attributes = span.attributes
    reader = MessageReader()
    messages = _messages(attribute_tree(attributes, "llm.input_messages"), reader)
    reply = _messages(attribute_tree(attributes, "llm.output_messages"), reader)
    bodies = _from_bodies(attributes)
    if bodies is not None and (
        not messages or not reply or _adds_reasoning(bodies, messages, reply)
    ):
        messages, reply = bodies.messages[:-1], bodies.messages[-1:]
    if not messages:
        detail = "enable message content capture in the application; see `stillroom docs traces`"
        raise UnreadableRowError(NO_CONTENTS, detail)
    dropped = dict.fromkeys([*reader.dropped, *(bodies.dropped if bodies else ())])
    finish_reason = finish_reason_of(attributes.get("llm.finish_reason"))
    yield span_call(
        [*messages, *reply],
        tools=_tools(attributes) or (bodies.tools if bodies else None),
        model=first_text(attributes, "llm.response.model_name", "llm.model_name"),
        provider=first_text(attributes, "llm.provider", "llm.system"),
        usage=_usage(attributes),
        cost_usd=decimal_number(attributes.get("llm.cost.total")),
        finish_reason=finish_reason or (bodies.finish_reason if bodies else None),
        dropped=tuple(dropped),
    )


def _messages(value: Any, reader: MessageReader) -> list[Row]:
    """Converts the messages of the attributes to Stillroom's format."""
    items = [nest_dotted_keys(item) for item in as_list(value)]
    messages: list[Row] = []
    for number, item in enumerate(items):
        message = as_row(item.get("message")) or item
        if message.get("content") == _REDACTED:
            reader.drop(TRUNCATED)
        messages += reader.turn(_to_chat_message(message), f"message {number}")
    return join_turns(messages)


def nest_dotted_keys(value: Any) -> Row:
    """Converts dotted keys to nested objects."""
    fields = as_row(value)
    if not any("." in key for key in fields):
        return fields
    flat: Row = {f"x.{key}": item for key, item in fields.items()}
    return as_row(attribute_tree(flat, "x"))


def _to_chat_message(message: Row) -> Row:
    """Converts a message to the chat completions format, with blocks as its content."""
    blocks: list[Any] = []
    for item in as_list(message.get("contents")):
        content = nest_dotted_keys(item)
        blocks.append(_block(as_row(content.get("message_content")) or content))
    calls = [_call(nest_dotted_keys(call)) for call in as_list(message.get("tool_calls"))]
    if name := text_of(message.get("function_call_name")):
        arguments = message.get("function_call_arguments_json")
        calls.append({"function": {"name": name, "arguments": arguments}})
    converted: Row = {"role": message.get("role"), "content": message.get("content")}
    converted |= {"content": [block for block in blocks if block]} if blocks else {}
    converted |= {"tool_calls": calls} if calls else {}
    return converted | {key: message[key] for key in ("tool_call_id", "name") if key in message}


def _block(content: Row) -> Row:
    """Converts one item of a message's content to a block; returns {} for a tool call."""
    match content.get("type"):
        case "text":
            return {"type": "text", "text": content.get("text") or ""}
        case "reasoning":
            return {"type": "reasoning", "content": content.get("text")}
        case "image":
            return {"type": "image_url"}
        case "tool_use" | "tool_call":
            return {}  # it is in the message's tool calls
        case _:
            return content


def _call(item: Row) -> Row:
    call = as_row(item.get("tool_call")) or item
    function = as_row(call.get("function"))
    return {"id": call.get("id"), "function": function}


def _from_bodies(attributes: Row) -> Any:
    """Returns the call in a span's recorded bodies; None if a body is missing or unreadable."""
    request, response = (
        parse_if_json(attributes.get("input.value")),
        parse_if_json(attributes.get("output.value")),
    )
    if not as_row(request) or not as_row(response):
        return None
    try:
        return read_calls(request, response)[0]
    except UnreadableRowError:
        return None


def _adds_reasoning(bodies: Any, messages: list[Row], reply: list[Row]) -> bool:
    """Returns whether the bodies have the same messages as the attributes, and more reasoning."""
    in_bodies: list[Row] = bodies.messages
    in_attributes = [*messages, *reply]
    if list(map(_without_reasoning, in_bodies)) != list(map(_without_reasoning, in_attributes)):
        return False
    num_in_bodies = sum("reasoning_content" in message for message in in_bodies)
    return num_in_bodies > sum("reasoning_content" in message for message in in_attributes)


def _without_reasoning(message: Row) -> Any:
    calls = [as_row(call.get("function")).get("name") for call in message.get("tool_calls", ())]
    return message["role"], message["content"], calls


def _tools(attributes: Row) -> list[Row] | None:
    """Returns the schemas of the offered tools; None if the span does not have them."""
    tools = (nest_dotted_keys(item) for item in as_list(attribute_tree(attributes, "llm.tools")))
    schemas = [
        as_row(parse_if_json(as_row(tool.get("tool")).get("json_schema", tool.get("json_schema"))))
        for tool in tools
    ]
    return tool_schemas([schema for schema in schemas if schema])


def _usage(attributes: Row) -> Row:
    """Returns the usage as an API's usage object."""
    start = "llm.token_count."
    return {
        "prompt_tokens": attributes.get(f"{start}prompt"),
        "completion_tokens": attributes.get(f"{start}completion"),
        "prompt_tokens_details": {
            "cache_read": attributes.get(f"{start}prompt_details.cache_read"),
            "cache_creation": attributes.get(f"{start}prompt_details.cache_write"),
            "reasoning": attributes.get(f"{start}completion_details.reasoning"),
        },
    }


OPENINFERENCE = Convention(
    is_followed=lambda span: KIND in span.attributes,
    is_model_call=_is_model_call,
    read_call=_read_call,
)
