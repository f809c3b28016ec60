"""Model calls in the spans that OpenRouter broadcasts to a bucket or a collector.

The request's messages and the reply are JSON texts in `gen_ai.prompt` and `gen_ai.completion`.
"""

from collections.abc import Iterator

from stillroom.importing.bodies.blocks import BlockReader
from stillroom.importing.bodies.exchanges import NO_CONTENTS
from stillroom.importing.bodies.facts import as_row, decimal_number, finish_reason_of, parsed
from stillroom.importing.chat_messages import tool_schemas
from stillroom.importing.formats.observability.calls import Convention, SpanCall, read_messages
from stillroom.importing.formats.observability.genai import call_facts
from stillroom.importing.formats.observability.otlp import Span
from stillroom.importing.json_rows import Row, UnreadableRowError

MARK = "trace.metadata.openrouter"
_CALL = "LLM Generation"
_COSTS = ("gen_ai.usage.total_cost", "trace.metadata.openrouter_generation.usage")


def _is_of_openrouter(span: Span) -> bool:
    """Returns whether OpenRouter broadcast a span."""
    names = (span.resource.get("service.name"), span.attributes.get("trace.name"))
    return "openrouter" in names or any(name.startswith(MARK) for name in span.attributes)


def _is_model_call(span: Span) -> bool:
    """Returns whether a span is the call itself; others of its trace are attempts at providers."""
    return span.name == _CALL or "gen_ai.prompt" in span.attributes


def _read_call(span: Span) -> Iterator[SpanCall]:
    """Yields the call of a span. Raises UnreadableRowError if it was broadcast without contents."""
    attributes = span.attributes
    request = parsed(attributes.get("gen_ai.prompt", attributes.get("span.input")))
    reply = parsed(attributes.get("gen_ai.completion", attributes.get("span.output")))
    given = request if isinstance(request, list) else as_row(request).get("messages")
    if not given:
        detail = "turn off the destination's privacy mode, so that it is sent the contents"
        raise UnreadableRowError(NO_CONTENTS, detail)
    reader = BlockReader()
    messages = read_messages(given, reader)
    fields: Row = as_row(reply)
    answer = {
        "role": "assistant",
        "content": fields.get("completion", fields.get("content")) if fields else reply,
        "reasoning": fields.get("reasoning"),
        "tool_calls": fields.get("toolCalls") or fields.get("tool_calls"),
    }
    has_reply = any(answer[key] for key in ("content", "tool_calls"))
    request_body = as_row(fields.get("rawRequest")) or as_row(request)
    ending = finish_reason_of(attributes.get("gen_ai.response.finish_reason"))
    costs = (decimal_number(attributes.get(name)) for name in _COSTS)
    facts = call_facts(attributes)
    facts["tools"] = facts["tools"] or tool_schemas(request_body.get("tools"))
    yield SpanCall(
        messages=[*messages, *(reader.turn(answer) if has_reply else ())],
        cost_usd=next((cost for cost in costs if cost is not None), None),
        finish_reason=ending,
        losses=tuple(reader.losses),
        **facts,
    )


OPENROUTER_SPANS = Convention(_is_of_openrouter, _is_model_call, _read_call)
