"""Writes the samples of exports that only a service writes, after their public descriptions.

`PYTHONPATH=scripts python -m trace_samples.make_from_schemas`.
"""

import json
from typing import Any

from trace_samples.files import SAMPLES, write_rows
from trace_samples.scripted_endpoint import Json


def _pair(key: str, value: Any) -> Json:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue", bool: "boolValue"}
    return {"key": key, "value": {kinds[type(value)]: value}}


def _openrouter() -> Json:
    """Returns a file that OpenRouter's broadcast writes to a bucket: the call and an attempt."""
    tool = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
    function = {"name": "price", "arguments": '{"item":"lamp"}'}
    prompt = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Price of the lamp? ☂"}]},
        ]
    }
    completion = {
        "completion": "Let me look.",
        "reasoning": "A tool is needed.",
        "toolCalls": [{"id": "call_1", "type": "function", "function": function}],
        "rawRequest": {"model": "anthropic/claude-sonnet-4", "tools": [tool]},
    }
    question, answer = json.dumps(prompt), json.dumps(completion)
    attributes = {
        "trace.name": "OpenRouter Request",
        "span.type": "generation",
        "trace.input": question,
        "span.input": question,
        "gen_ai.prompt": question,
        "trace.output": answer,
        "span.output": answer,
        "gen_ai.completion": answer,
        "gen_ai.operation.name": "chat",
        "gen_ai.system": "anthropic",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "anthropic/claude-sonnet-4",
        "gen_ai.response.model": "anthropic/claude-sonnet-4",
        "gen_ai.response.id": "gen-1",
        "gen_ai.response.finish_reason": "tool_calls",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.total_tokens": 52,
        "gen_ai.usage.input_tokens.cached": 8,
        "gen_ai.usage.total_cost": 0.0021,
        "session.id": "session-1",
        "trace.metadata.openrouter.provider_name": "Anthropic",
        "trace.metadata.openrouter_generation.streamed": True,
    }
    times = {"startTimeUnixNano": "1772359200000000000", "endTimeUnixNano": "1772359201500000000"}
    call: Json = {
        "traceId": "a" * 32,
        "spanId": "b" * 16,
        "name": "LLM Generation",
        "kind": 3,
        **times,
    }
    attempt: Json = call | {
        "spanId": "c" * 16,
        "parentSpanId": "b" * 16,
        "name": "provider attempt 1: Anthropic",
        "attributes": [_pair("gen_ai.request.model", "anthropic/claude-sonnet-4")],
    }
    call["attributes"] = [_pair(*item) for item in attributes.items()]
    resource = {"attributes": [_pair("service.name", "openrouter")]}
    scope = {"scope": {"name": "openrouter"}, "spans": [call, attempt]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _write_document(name: str, document: Any) -> None:
    path = SAMPLES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _attributes() -> Json:
    instructions = [{"type": "text", "content": "Be brief."}]
    question = [{"role": "user", "parts": [{"type": "text", "content": "Hi?"}]}]
    answer = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "Yes."}],
            "finish_reason": "stop",
        }
    ]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m-1",
        "gen_ai.conversation.id": "thread-1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.system_instructions": instructions,
        "gen_ai.input.messages": question,
        "gen_ai.output.messages": answer,
    }


def _logfire() -> Json:
    """Returns the answer to a query of Logfire's records, with its rows as objects."""
    row = {
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "span_name": "chat m",
        "start_timestamp": "2026-03-01T10:00:00.000000Z",
        "end_timestamp": "2026-03-01T10:00:01.500000Z",
        "otel_status_code": None,
        "attributes": _attributes(),
    }
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m"}
    root = row | {"span_id": "c" * 16, "span_name": "invoke_agent", "attributes": agent}
    return {"columns": [{"name": name} for name in row], "rows": [row, root]}


def _clickhouse() -> list[Json]:
    """Returns rows of ClickHouse's otel_traces, whose attributes are all texts."""
    attributes = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in _attributes().items()
    }
    row = {
        "Timestamp": "2026-03-01 10:00:00.000000000",
        "TraceId": "a" * 32,
        "SpanId": "b" * 16,
        "SpanName": "chat m",
        "ServiceName": "shop",
        "ResourceAttributes": {"service.name": "shop"},
        "SpanAttributes": attributes,
        "Duration": 1_500_000_000,
        "StatusCode": "Unset",
        "StatusMessage": "",
        "Events.Name": [],
        "Events.Attributes": [],
    }
    return [row, row | {"SpanId": "c" * 16, "SpanAttributes": {"http.route": "/"}}]


def main() -> None:
    """Writes all samples of this kind."""
    _write_document("openrouter/broadcast.json", _openrouter())
    _write_document("span_table/logfire.json", _logfire())
    write_rows("span_table/clickhouse.jsonl", _clickhouse())


if __name__ == "__main__":
    main()
