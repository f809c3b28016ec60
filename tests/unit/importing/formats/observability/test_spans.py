"""Spans of OpenTelemetry, OpenInference and OpenRouter, written by the instrumentations."""

import json

from fakes.scripted_calls import calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals, shown
from stillroom.importing.records import Feedback

OTEL, INFERENCE = SAMPLES / "otel_genai", SAMPLES / "openinference"


def typed(value):
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case list():
            return {"arrayValue": {"values": [typed(item) for item in value]}}
        case _:
            return {"kvlistValue": {"values": [pair(*item) for item in value.items()]}}


def pair(key, value):
    return {"key": key, "value": typed(value)}


def span(attributes, span_id="s1", trace_id="t1", resource=(), **more):
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "name": "chat m",
        "startTimeUnixNano": "1772359200000000000",
        "endTimeUnixNano": "1772359201500000000",
        "attributes": [pair(*item) for item in attributes.items()],
        "status": {},
    } | more


def exported(*spans, resource=()):
    attributes = [pair(*item) for item in dict(resource).items()]
    scope = {"scope": {"name": "x"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [scope]}]}


def chat(question="Hi?", answer="Yes.", **more):
    part = {"type": "text", "content": question}
    reply = {"role": "assistant", "parts": [{"type": "text", "content": answer}]}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [part]}]),
        "gen_ai.output.messages": json.dumps([reply]),
    } | more


def test_log_records_without_their_spans_and_spans_without_their_records_are_refused():
    logs, spans = OTEL / "events" / "logs.jsonl", OTEL / "events" / "spans.jsonl"
    reasons = [reason for _, reason in refusals(read("otel_genai", logs))]
    assert reasons == ["a message without its span"] * 17
    assert [reason for _, reason in refusals(read("otel_genai", spans))] == [
        "contents were not recorded",
        "contents were not recorded",
        "contents were not recorded",
        "no model call",
    ]


def test_parts_of_the_ai_sdk_are_read_in_the_shapes_of_all_its_versions(tmp_path):
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Add."},
                {"type": "file", "mediaType": "image/png", "data": "x"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "text": "Hm."},
                {"type": "tool-call", "toolCallId": "c", "toolName": "add", "args": {"a": 1}},
            ],
        },
        {
            "role": "tool",
            "content": [
                {"type": "tool-result", "toolCallId": "c", "toolName": "add", "result": {"sum": 1}}
            ],
        },
    ]
    attributes = {
        "ai.operationId": "ai.generateObject.doGenerate",
        "ai.prompt.messages": json.dumps(messages),
        "ai.prompt.tools": ['{"type":"function","name":"add","parameters":{"type":"object"}}'],
        "ai.response.object": '{"sum": 1}',
        "ai.response.reasoning": json.dumps([{"type": "reasoning", "text": "So."}]),
        "ai.response.finishReason": "content-filter",
        "ai.usage.promptTokens": 5,
        "ai.usage.completionTokens": 2,
        "ai.model.id": "m",
    }
    hidden = {"ai.operationId": "ai.generateText.doGenerate", "ai.model.id": "m"}
    path = write_rows(tmp_path / "spans.jsonl", exported(span(attributes), span(hidden, "s2")))
    rows = read("otel_genai", path)
    (call,) = calls_of(rows)
    assert shown(call.messages) == [
        "user Add.",
        'assistant  add{"a": 1}',
        'tool {"sum": 1}',
        'assistant {"sum": 1}',
    ]
    assert [m.get("reasoning_content") for m in call.messages] == [None, "Hm.", None, "So."]
    assert (call.dropped, call.finish_reason) == (("images left out",), "content_filter")
    assert (call.usage.prompt_tokens, call.model) == (5, "m")
    assert call.tools[0]["function"]["parameters"] == {"type": "object"}
    assert refusals(rows) == [(1, "contents were not recorded")]


def test_attributes_may_be_json_texts_or_structured_and_names_may_be_snake_case(tmp_path):
    whole = chat()
    structured = whole | {key: json.loads(whole[key]) for key in whole if key.endswith("messages")}
    snake = json.loads(
        json.dumps(exported(span(structured, "s2")))
        .replace("resourceSpans", "resource_spans")
        .replace("scopeSpans", "scope_spans")
        .replace("traceId", "trace_id")
        .replace("spanId", "span_id")
    )
    path = write_rows(tmp_path / "spans.jsonl", exported(span(whole)), snake)
    first, second = calls_of(read("otel_genai", path))
    assert (
        first.messages
        == second.messages
        == [
            {"role": "user", "content": "Hi?"},
            {"role": "assistant", "content": "Yes."},
        ]
    )
    assert (second.id, second.feedback_ids) == ("s2", ("t1",))
    assert (first.started_at, first.duration_s) == ("2026-03-01T10:00:00Z", 1.5)


def test_the_session_of_a_trace_may_stand_in_another_span_far_apart(tmp_path):
    other = write_rows(
        tmp_path / "b.jsonl", exported(span({"session.id": "session"}, "root", name="root"))
    )
    first = write_rows(
        tmp_path / "a.jsonl",
        exported(span(chat()), span(chat(**{"gen_ai.conversation.id": "own"}), "s2")),
        exported(span(chat(), "s3", trace_id="t2")),
    )
    calls = calls_of(read("otel_genai", first, other))
    assert [call.group for call in calls] == ["session", "own", None]


def test_spans_that_are_no_model_call_are_refused_with_their_name(tmp_path):
    attributes = [
        {"gen_ai.operation.name": "execute_tool", "gen_ai.system": "openai"},
        {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "e"},
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m"},
        {"http.request.method": "POST"},
        {"openinference.span.kind": "RETRIEVER"},
    ]
    spans = [span(each, str(number)) for number, each in enumerate(attributes)]
    rows = read("otel_genai", write_rows(tmp_path / "spans.jsonl", exported(*spans)))
    assert [(row.reason, row.location.part) for row in rows] == [
        ("no model call", str(number)) for number in range(5)
    ]


def test_each_choice_is_a_call_but_parts_of_one_reply_are_joined(tmp_path):
    def output(*texts):
        messages = [
            {
                "role": "assistant",
                "parts": [{"type": kind, "content": text}],
                "finish_reason": "stop",
            }
            for kind, text in texts
        ]
        return json.dumps(messages)

    choices = chat(
        **{
            "gen_ai.output.messages": output(("text", "a"), ("text", "b")),
            "gen_ai.response.finish_reasons": ["stop", "stop"],
        }
    )
    parts = chat(**{"gen_ai.output.messages": output(("reasoning", "Hm."), ("text", "a"))})
    path = write_rows(tmp_path / "spans.jsonl", exported(span(choices), span(parts, "s2")))
    first, second, joined = calls_of(read("otel_genai", path))
    assert [call.messages[-1]["content"] for call in (first, second)] == ["a", "b"]
    assert [call.location.part for call in (first, second)] == ["s1", "s1 choice 1"]
    assert joined.messages[-1] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "Hm.",
    }


def test_a_failed_call_has_the_failure_of_its_span(tmp_path):
    attributes = chat()
    del attributes["gen_ai.output.messages"]
    raised = {"name": "exception", "attributes": [pair("exception.message", "Timed out")]}
    failed = span(attributes, status={"code": 2}, events=[raised])
    unanswered = span(attributes, "s2")
    rows = read("otel_genai", write_rows(tmp_path / "spans.jsonl", exported(failed, unanswered)))
    (call,) = calls_of(rows)
    assert (call.error, [message["role"] for message in call.messages]) == ("Timed out", ["user"])
    assert refusals(rows) == [(1, "no reply")]


def test_all_messages_may_stand_in_one_event(tmp_path):
    whole = chat()
    content = {key: whole.pop(key) for key in list(whole) if key.endswith("messages")}
    event = {
        "name": "gen_ai.client.inference.operation.details",
        "attributes": [pair(*item) for item in content.items()],
    }
    older = [
        {"name": "gen_ai.content.prompt", "attributes": [
            pair("gen_ai.prompt", json.dumps([{"role": "user", "content": "Old?"}]))]},
        {"name": "gen_ai.content.completion", "attributes": [
            pair("gen_ai.completion", json.dumps([{"role": "assistant", "content": "Yes."}]))]},
    ]  # fmt: skip
    per_message = [
        {"name": "gen_ai.user.message", "attributes": [pair("content", "One?")]},
        {"name": "gen_ai.choice", "attributes": [
            pair("message", json.dumps({"content": "One."})), pair("finish_reason", "stop")]},
    ]  # fmt: skip
    spans = [
        span(whole, events=[event]),
        span(whole, "s2", events=older),
        span(whole, "s3", events=per_message),
    ]
    path = write_rows(tmp_path / "spans.jsonl", exported(*spans))
    calls = calls_of(read("otel_genai", path))
    assert [shown(call.messages) for call in calls] == [
        ["user Hi?", "assistant Yes."],
        ["user Old?", "assistant Yes."],
        ["user One?", "assistant One."],
    ]
    assert calls[2].finish_reason == "stop"


def test_evaluations_are_feedback_about_their_span_or_response(tmp_path):
    def evaluation(**more):
        fields = {"gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": 0.5} | more
        return [pair(*item) for item in fields.items()]

    name = "gen_ai.evaluation.result"
    own = {"name": name, "attributes": evaluation()}
    judged = span(chat(**{"gen_ai.response.id": "resp"}), events=[own])
    records = [
        {"eventName": name, "spanId": "s1", "traceId": "t1", "attributes": evaluation()},
        {"eventName": name, "attributes": evaluation(**{"gen_ai.response.id": "resp"})},
        {"eventName": name, "spanId": "s1", "attributes": [pair("gen_ai.evaluation.name", "tone")]},
        {"eventName": name, "attributes": evaluation()},
        {"eventName": "other", "spanId": "s1", "attributes": []},
    ]
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    rows = read("otel_genai", write_rows(tmp_path / "spans.jsonl", exported(judged), logs))
    (call,) = calls_of(rows)
    assert call.feedback_ids == ("t1", "resp")
    feedback = [row for row in rows if isinstance(row, Feedback)]
    assert [(row.target_id, row.name, row.value) for row in feedback] == [
        ("s1", "helpful", 0.5),
        ("s1", "helpful", 0.5),
        ("resp", "helpful", 0.5),
    ]
    assert refusals(rows) == [
        (2, "feedback without a number"),
        (2, "feedback without a target"),
        (2, "no model call"),
    ]


def test_hostile_spans_are_refused_or_survive(tmp_path):
    deep = {"stringValue": "x"}
    for _ in range(300):
        deep = {"arrayValue": {"values": [deep]}}
    odd = span({"gen_ai.request.model": "m", "llm.input_messages.99999999999.x": "y"})
    odd["attributes"].append({"key": "gen_ai.input.messages", "value": deep})
    path = write_rows(
        tmp_path / "spans.jsonl",
        exported(odd, span(chat(), startTimeUnixNano="soon")),
        {"resourceSpans": [None, {"scopeSpans": [{"spans": [5]}]}]},
        {"resourceSpans": []},
        b'{"resourceSpans": [',
        exported(span(chat(**{"gen_ai.input.messages": "[{]"}))),
        exported(span(chat(**{"gen_ai.input.messages": '[{"role": 1}]'}))),
    )
    rows = read("otel_genai", path)
    assert [call.started_at for call in calls_of(rows)] == [None]
    assert refusals(rows) == [
        (1, "a message has no role"),
        (2, "no model call"),
        (3, "neither spans nor log records"),
        (4, "not a JSON object"),
        (5, "contents were truncated"),
        (6, "a message has no role"),
    ]


def test_a_trace_that_begins_with_other_spans_is_taken_for_opentelemetrys(tmp_path):
    first = exported(span({"http.route": "/"}, "r"))
    path = write_rows(tmp_path / "spans.jsonl", first, exported(span(chat())))
    assert recognised_by(path) == ["otel_genai"]
    inference = {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "Hi?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "__REDACTED__",
    }
    path = write_rows(tmp_path / "more.jsonl", first, exported(span(inference)))
    (call,) = calls_of(read(recognised_by(path)[0], path))
    assert call.dropped == ("content truncated by the log",)
