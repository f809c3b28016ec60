"""Reads model calls from spans of the AI SDK for TypeScript (`ai.generateText.doGenerate` etc.)."""

from collections.abc import Iterator
from typing import Any

from stillroom.importing.formats.observability.genai import call_fields
from stillroom.importing.formats.observability.otlp import Convention, Span, span_call
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import NO_CONTENTS, ApiCall
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    finish_reason_of,
    first_text,
    parse_if_json,
)
from stillroom.importing.payloads.messages import MessageReader, tool_schemas

_OPERATION = "ai.operationId"


def _is_model_call(span: Span) -> bool:
    """Returns whether a span is one model call; its parent span may consist of several."""
    return str(span.attributes[_OPERATION]).endswith((".doGenerate", ".doStream"))


def _read_call(span: Span) -> Iterator[ApiCall]:
    """Yields the call of a span. Raises UnreadableRowError if its inputs were not recorded."""
    attributes = span.attributes
    prompt = as_list(parse_if_json(attributes.get("ai.prompt.messages")))
    if not prompt:
        detail = "leave recordInputs and recordOutputs enabled in experimental_telemetry"
        raise UnreadableRowError(NO_CONTENTS, detail)
    reader = MessageReader()
    messages = reader.turns([_message(item) for item in prompt])
    fields = call_fields(attributes)
    fields |= {
        "tools": tool_schemas([_tool(tool) for tool in as_list(attributes.get("ai.prompt.tools"))]),
        "provider": (fields["provider"] or "").partition(".")[0] or None,
        "model": first_text(attributes, "ai.response.model", "ai.model.id"),
        "usage": fields["usage"] | _usage(attributes),
    }
    reply = _reply(attributes)
    finish_reason = first_text(attributes, "ai.response.finishReason")
    yield span_call(
        [*messages, *(reader.turn(reply) if reply else ())],
        finish_reason=finish_reason_of(finish_reason.replace("-", "_")) if finish_reason else None,
        dropped=tuple(reader.dropped),
        **fields,
    )


def _message(item: Any) -> Any:
    """Converts the parts of a message to blocks that MessageReader reads."""
    message = as_row(item)
    if not isinstance(message.get("content"), list):
        return item
    return message | {"content": [_block(as_row(part)) for part in message["content"]]}


def _block(part: Row) -> Row:
    """Converts a content part to a block that MessageReader reads."""
    match part.get("type"):
        case "tool-call":
            return _call(part)
        case "tool-result":
            output = part.get("output", part.get("result"))
            is_typed = isinstance(output, dict) and "value" in output and "type" in output
            result = as_row(output)["value"] if is_typed else output
            return {
                "type": "tool_call_response",
                "id": part.get("toolCallId"),
                "response": result,
            }
        case "reasoning":
            return {"type": "reasoning", "content": part.get("text")}
        case "file":
            return {"type": "file", "mime_type": first_text(part, "mediaType", "mimeType")}
        case _:
            return part


def _call(call: Row) -> Row:
    """Converts a tool call to a block that MessageReader reads."""
    return {
        "type": "tool_call",
        "id": call.get("toolCallId"),
        "name": call.get("toolName"),
        "arguments": call.get("input", call.get("args")),
    }


def _reply(attributes: Row) -> Row | None:
    """Returns the reply as a message with blocks; None if the span has no reply."""
    blocks: list[Row] = []
    reasoning = parse_if_json(attributes.get("ai.response.reasoning"))
    for part in as_list(reasoning) or [reasoning]:
        thought = as_row(part).get("text", part)
        if isinstance(thought, str) and thought:
            blocks.append({"type": "reasoning", "content": thought})
    text = first_text(attributes, "ai.response.text", "ai.response.object")
    if text is not None:
        blocks.append({"type": "text", "text": text})
    calls = as_list(parse_if_json(attributes.get("ai.response.toolCalls")))
    blocks += [_call(as_row(call)) for call in calls]
    return {"role": "assistant", "content": blocks} if blocks else None


def _tool(value: Any) -> Row:
    tool = as_row(parse_if_json(value))
    schema = tool.get("inputSchema", tool.get("parameters"))
    return tool | ({"parameters": schema} if isinstance(schema, dict) else {})


def _usage(attributes: Row) -> Row:
    """Returns the usage as an API's usage object."""
    start = "ai.usage."
    counts = {
        "prompt_tokens": ("inputTokens", "promptTokens"),
        "completion_tokens": ("outputTokens", "completionTokens"),
    }
    usage = {
        name: next((attributes[start + key] for key in keys if start + key in attributes), None)
        for name, keys in counts.items()
    }
    details = {
        "cached_tokens": attributes.get(f"{start}cachedInputTokens"),
        "reasoning_tokens": attributes.get(f"{start}reasoningTokens"),
    }
    logged = {name: count for name, count in usage.items() if count is not None}
    return logged | {"prompt_tokens_details": details}


AI_SDK = Convention(lambda span: _OPERATION in span.attributes, _is_model_call, _read_call)
