"""Reads model calls from spans of OpenTelemetry's GenAI semantic conventions, new and old.

Source: the `gen_ai.*` attributes of the semantic conventions; the older `gen_ai.prompt.N.*`
(OpenLLMetry), one event per message (`gen_ai.user.message`, `gen_ai.choice`), and two events with
all messages. Spans that OpenRouter broadcasts to a bucket or a collector have the messages and the
reply as JSON text in `gen_ai.prompt` and `gen_ai.completion`.
"""

from collections.abc import Iterator
from typing import Any

from stillroom.data.checks import describe
from stillroom.importing.formats.observability.otlp import (
    Convention,
    Span,
    SpanEvent,
    attribute_tree,
    read_messages,
    span_call,
)
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import NO_CONTENTS, ApiCall, system_message
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
from stillroom.teachers.providers import provider_serving

_OTHER_OPERATIONS = frozenset(
    {
        "create_agent",
        "embeddings",
        "execute_tool",
        "invoke_agent",
        "invoke_workflow",
        "retrieval",
        "rerank",
    }
)
DETAILS = "gen_ai.client.inference.operation.details"
_MESSAGE_EVENTS = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
CHOICE = "gen_ai.choice"
_ALL_MESSAGES_EVENTS = ("gen_ai.content.prompt", "gen_ai.content.completion")
EVENT_NAMES = frozenset((*_MESSAGE_EVENTS, CHOICE, DETAILS, *_ALL_MESSAGES_EVENTS))
"""The names of events and log records with messages."""
_MODEL_KEYS = ("gen_ai.response.model", "gen_ai.request.model")
_CALL_MARKS = ("gen_ai.request.model", "gen_ai.system", "gen_ai.provider.name", "llm.request.type")
_OPENROUTER_MARK = "trace.metadata.openrouter"
_OPENROUTER_CALL = "LLM Generation"
_OPENROUTER_COSTS = ("gen_ai.usage.total_cost", "trace.metadata.openrouter_generation.usage")


def _is_model_call(span: Span) -> bool:
    """Returns whether a span is one call of a chat model."""
    attributes = span.attributes
    operation = text_of(attributes.get("gen_ai.operation.name"))
    kind = attributes.get("llm.request.type")
    if operation in _OTHER_OPERATIONS or kind in ("embedding", "rerank"):
        return False
    return any(name in attributes for name in _CALL_MARKS)


def _read_call(span: Span) -> Iterator[ApiCall]:
    """Yields the calls of a span, one per choice; a failed call has no reply.

    Raises UnreadableRowError if the span has no messages.
    """
    attributes = span.attributes
    for event in span.events:
        if event.name == DETAILS:
            attributes = event.fields | attributes
    reader = MessageReader()
    prompt = _prompt(attributes, span.events, reader)
    reasons = [finish_reason_of(item) for item in _finish_reasons(attributes)]
    fields = call_fields(attributes)
    replies = [*_replies(attributes, span.events, reader, len(reasons))] or [_Reply([], None)]
    for number, reply in enumerate(replies):
        reason = reasons[number] if number < len(reasons) else None
        yield span_call(
            [*prompt, *reply.messages],
            finish_reason=reply.finish_reason or reason,
            dropped=tuple(reader.dropped),
            **fields,
        )


def call_fields(attributes: Row) -> Row:
    """Returns the fields of a call in the attributes of a span, without its messages."""
    return {
        "tools": _tools(attributes),
        "model": first_text(attributes, *_MODEL_KEYS),
        "provider": _provider(attributes),
        "usage": _usage(attributes),
    }


class _Reply:
    """The messages of one choice, and its finish reason."""

    def __init__(self, messages: list[Row], finish_reason: str | None) -> None:
        self.messages, self.finish_reason = messages, finish_reason


def _prompt(attributes: Row, events: tuple[SpanEvent, ...], reader: MessageReader) -> list[Row]:
    """Returns the messages that were sent. Raises UnreadableRowError if none were recorded."""
    system = parse_if_json(attributes.get("gen_ai.system_instructions"))
    system_messages = _system(system, reader)
    sent = _messages_in(attributes, "gen_ai.input.messages")
    if sent is None:
        sent = _messages_in_event(events, "gen_ai.content.prompt", "gen_ai.prompt")
    if sent is None:
        sent = attribute_tree(attributes, "gen_ai.prompt")
    if sent is None:
        sent = [_event_message(event) for event in events if event.name in _MESSAGE_EVENTS]
    if not as_list(sent) and not system_messages:
        detail = "enable message content capture in the application; see `stillroom docs traces`"
        raise UnreadableRowError(NO_CONTENTS, detail)
    for message in map(as_row, as_list(sent)):
        is_empty = not any(message.get(key) for key in ("content", "parts", "tool_calls"))
        if is_empty and message.get("role") in ("user", "system"):
            reader.drop(TRUNCATED)
    return [*system_messages, *read_messages(as_list(sent), reader)]


def _messages_in(attributes: Row, name: str) -> Any:
    """Parses the messages in an attribute. Raises UnreadableRowError if the JSON is truncated."""
    value = parse_if_json(attributes.get(name))
    if isinstance(value, str) and value:
        detail = f"{name} is {describe(value)}: set a higher OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"
        raise UnreadableRowError("contents were truncated", detail)
    return value or None


def _system(value: Any, reader: MessageReader) -> list[Row]:
    """Returns a list with the system message, or an empty one; parts have texts in `content`."""
    if isinstance(value, list):
        parts = reader.turn({"role": "system", "parts": value}, "gen_ai.system_instructions")
        return [message for message in parts if message["content"]]
    return system_message(value, reader)


def _messages_in_event(events: tuple[SpanEvent, ...], name: str, key: str) -> Any:
    """Returns the messages in the first event with this name; None if there is none."""
    for event in events:
        if event.name == name:
            return parse_if_json(event.fields.get(key))
    return None


def _event_message(event: SpanEvent) -> Row:
    """Returns the message in an event such as `gen_ai.user.message`."""
    fields = event.fields
    content = as_row(parse_if_json(fields.get("gen_ai.event.content"))) or fields
    role = text_of(content.get("role")) or _MESSAGE_EVENTS.get(event.name, "assistant")
    message = {key: content[key] for key in ("content", "tool_calls") if key in content}
    if role == "tool" and isinstance(content.get("id"), str):
        message["tool_call_id"] = content["id"]
    return message | {"role": role}


def _replies(
    attributes: Row, events: tuple[SpanEvent, ...], reader: MessageReader, num_finish_reasons: int
) -> Iterator[_Reply]:
    """Yields the replies of a call; output messages that share a finish reason form one reply."""
    outputs = _messages_in(attributes, "gen_ai.output.messages")
    if outputs is None:
        outputs = _messages_in_event(events, "gen_ai.content.completion", "gen_ai.completion")
    if outputs is None:
        outputs = attribute_tree(attributes, "gen_ai.completion")
    if outputs is None:
        outputs = [_choice_message(event) for event in events if event.name == CHOICE]
    items = [as_row(item) | {"role": "assistant"} for item in as_list(outputs)]
    if not items:
        return
    if num_finish_reasons <= 1 and len(items) > 1 and not any("index" in item for item in items):
        finish_reason = next((e for item in items if (e := _finish_reason(item))), None)
        yield _Reply(read_messages(items, reader), finish_reason)
        return
    for item in items:
        yield _Reply(read_messages([item], reader), _finish_reason(item))


def _choice_message(event: SpanEvent) -> Row:
    """Returns the reply in an event `gen_ai.choice`, with its finish reason and index."""
    fields = as_row(parse_if_json(event.fields.get("gen_ai.event.content"))) or event.fields
    message = as_row(parse_if_json(fields.get("message"))) or _event_message(event)
    details = {key: fields[key] for key in ("finish_reason", "index") if key in fields}
    calls = {"tool_calls": fields["tool_calls"]} if "tool_calls" in fields else {}
    return calls | message | details


def _finish_reason(message: Row) -> str | None:
    return finish_reason_of(message.get("finish_reason"))


def _finish_reasons(attributes: Row) -> list[Any]:
    reasons = parse_if_json(attributes.get("gen_ai.response.finish_reasons"))
    if reasons is None:
        reasons = attributes.get("gen_ai.response.finish_reason")
    return as_list(reasons) or ([reasons] if isinstance(reasons, str) else [])


def _tools(attributes: Row) -> list[Row] | None:
    """Returns the schemas of the offered tools; None if the span does not have them."""
    tools = parse_if_json(attributes.get("gen_ai.tool.definitions"))
    if tools is None:
        tools = parse_if_json(attributes.get("gen_ai.request.tools"))
    if tools is None:
        tools = attribute_tree(attributes, "llm.request.functions")
    return _schemas(tools)


def _schemas(tools: Any) -> list[Row] | None:
    """Converts tool definitions, parts of which may be JSON text."""
    parsed = [as_row(parse_if_json(tool)) for tool in as_list(tools)]
    return tool_schemas(
        [
            tool | {"parameters": parse_if_json(tool["parameters"])}
            if "parameters" in tool
            else tool
            for tool in parsed
        ]
    )


def _provider(attributes: Row) -> str | None:
    provider = first_text(attributes, "gen_ai.provider.name", "gen_ai.system")
    address = first_text(attributes, "server.address")
    return provider_serving(None if provider is None else provider.lower(), address)


def _usage(attributes: Row) -> Row:
    """Returns the usage as an API's usage object."""
    names = {
        "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        "completion_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    }
    usage = {
        name: next((attributes[key] for key in keys if attributes.get(key) is not None), None)
        for name, keys in names.items()
    }
    details = {
        "cache_read": _first(
            attributes,
            "gen_ai.usage.cache_read.input_tokens",
            "gen_ai.usage.cache_read_input_tokens",
            "gen_ai.usage.input_tokens.cached",
        ),
        "cache_creation": _first(
            attributes,
            "gen_ai.usage.cache_creation.input_tokens",
            "gen_ai.usage.cache_creation_input_tokens",
            "gen_ai.usage.input_tokens.cache_write",
        ),
        "reasoning": _first(
            attributes,
            "gen_ai.usage.reasoning.output_tokens",
            "gen_ai.usage.reasoning_tokens",
            "gen_ai.usage.output_tokens.reasoning",
        ),
    }
    return usage | {"prompt_tokens_details": details}


def _first(attributes: Row, *names: str) -> Any:
    """Returns the first of the named attributes that a span has; None if it has none."""
    return next((attributes[name] for name in names if name in attributes), None)


def _is_sent_by_openrouter(span: Span) -> bool:
    """Returns whether a span was sent by OpenRouter's broadcast feature."""
    names = (span.resource.get("service.name"), span.attributes.get("trace.name"))
    return "openrouter" in names or any(
        name.startswith(_OPENROUTER_MARK) for name in span.attributes
    )


def _is_openrouter_call(span: Span) -> bool:
    """Returns whether a span is a whole call, not one attempt at a provider."""
    return span.name == _OPENROUTER_CALL or "gen_ai.prompt" in span.attributes


def _read_openrouter_call(span: Span) -> Iterator[ApiCall]:
    """Yields the call of a span. Raises UnreadableRowError if it has no message contents."""
    attributes = span.attributes
    request = parse_if_json(attributes.get("gen_ai.prompt", attributes.get("span.input")))
    reply = parse_if_json(attributes.get("gen_ai.completion", attributes.get("span.output")))
    prompt = request if isinstance(request, list) else as_row(request).get("messages")
    if not prompt:
        detail = "disable privacy mode for this destination in OpenRouter to record contents"
        raise UnreadableRowError(NO_CONTENTS, detail)
    reader = MessageReader()
    messages = read_messages(prompt, reader)
    fields: Row = as_row(reply)
    answer = {
        "role": "assistant",
        "content": fields.get("completion", fields.get("content")) if fields else reply,
        "reasoning": fields.get("reasoning"),
        "tool_calls": fields.get("toolCalls") or fields.get("tool_calls"),
    }
    has_reply = any(answer[key] for key in ("content", "tool_calls"))
    request_body = as_row(fields.get("rawRequest")) or as_row(request)
    finish_reason = finish_reason_of(attributes.get("gen_ai.response.finish_reason"))
    costs = (decimal_number(attributes.get(name)) for name in _OPENROUTER_COSTS)
    call_values = call_fields(attributes)
    call_values["tools"] = call_values["tools"] or tool_schemas(request_body.get("tools"))
    yield span_call(
        [*messages, *(reader.turn(answer) if has_reply else ())],
        cost_usd=next((cost for cost in costs if cost is not None), None),
        finish_reason=finish_reason,
        dropped=tuple(reader.dropped),
        **call_values,
    )


GENAI = Convention(lambda _span: True, _is_model_call, _read_call)
OPENROUTER_SPANS = Convention(_is_sent_by_openrouter, _is_openrouter_call, _read_openrouter_call)
