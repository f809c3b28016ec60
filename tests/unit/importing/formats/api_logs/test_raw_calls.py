"""Calls whose histories are not decoded become the rollouts that they are when all is decoded."""

import json

import pytest

from fakes.imported_rows import imported
from fakes.trace_files import SAMPLES, format_named, write_lines
from stillroom.importing.bodies import raw_calls
from stillroom.importing.records import RawCall

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
MESSAGES = [
    USER,
    {"role": "developer", "content": [{"type": "text", "text": "be"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
    {"role": "tool", "tool_call_id": "t1", "content": "4"},
    {"role": "user", "content": [{"type": "image", "source": {}}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": None, "function_call": CALL["function"]},
    {"role": "function", "name": "look", "content": "3"},
    {"role": "assistant", "content": None, "function_call": CALL["function"]},
    {"role": "function", "name": "look", "content": "3"},
    {"lc": 1, "type": "constructor", "kwargs": {"type": "human", "content": "Hm"}},
    {"role": "wizard", "content": "?"},
    "no message",
]
COMPLETION = {
    "id": "c1", "created": 1_700_000_000, "model": "m-2",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes"},
                 "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2,
              "prompt_tokens_details": {"cached_tokens": 3}},
}  # fmt: skip
MESSAGE = {
    "id": "m1", "type": "message", "role": "assistant", "model": "claude-x",
    "content": [{"type": "text", "text": "Yes"}, USE], "stop_reason": "tool_use",
    "usage": {"input_tokens": 4, "output_tokens": 2, "cache_read_input_tokens": 7},
}  # fmt: skip
REPLIES = [
    COMPLETION,
    MESSAGE,
    {**MESSAGE, "content": [{"type": "redacted_thinking", "data": "x"}]},
    {**COMPLETION, "choices": COMPLETION["choices"] * 2},
    {**COMPLETION, "choices": []},
    {**COMPLETION, "usage": None, "model": None},
    {"error": {"message": "busy"}},
]


def histories():
    yield from ([message] for message in MESSAGES)
    yield from (MESSAGES[: length + 1] for length in range(len(MESSAGES)))
    yield []


def requests():
    """Requests with all histories, and with what else may stand in one."""
    yield from ({"model": "m", "messages": history} for history in histories())
    for more in ({"system": "Be."}, {"system": [{"type": "text", "text": "Be."}]}, {"system": 5},
                 {"tools": TOOLS}, {"tools": [{"type": "web_search"}, *TOOLS]}, {"tools": [5]},
                 {"tools": [{"name": "look", "input_schema": {"type": "object"}}]},
                 {"functions": [{"name": "look", "parameters": {"type": "object"}}]},
                 {"messages": "Hi"}, {"messages": None, "input": "Hi"}):  # fmt: skip
        yield {"messages": [USER], **more}


def bodies():
    for request in requests():
        yield request, COMPLETION
        yield request, MESSAGE
    for reply in REPLIES:
        yield {"model": "m", "messages": [USER]}, reply


def anthropic_rows():
    for request, response in bodies():
        yield {"request": request, "response": response}
    plain = {"request": {"messages": [USER]}, "response": MESSAGE}
    for more in ({"id": "x", "session_id": "s", "timestamp": 1_760_000_000, "latency_ms": 1500},
                 {"started_at": "2026-03-01T10:00:00", "timestamp": 1, "duration_s": 0},
                 {"session_id": "", "timestamp": "nonsense", "duration_s": -1, "latency_ms": -1},
                 {"metadata": {"user": "u"}, "tags": ["a"]}, {"duration_ms": 5, "cost": 0.5},
                 {"start_time": 1_760_000_000, "end_time": 1_760_000_002, "conversation_id": "c"},
                 {"response": {"body": MESSAGE}}, {"request": {"body": plain["request"]}},
                 {"response": json.dumps(MESSAGE)}):  # fmt: skip
        yield plain | more


def litellm_rows():
    row = {"call_type": "acompletion", "custom_llm_provider": "openai", "id": "x", "model": "m-3",
           "trace_id": "t", "prompt_tokens": 5, "completion_tokens": 3, "response_cost": 0.5,
           "startTime": 1_760_000_000.5, "endTime": 1_760_000_001.5, "status": "success",
           "messages": [USER], "response": COMPLETION, "metadata": {"a": 1}}  # fmt: skip
    for request, response in bodies():
        given = {"messages": request["messages"], "response": response}
        settings = {key: value for key, value in request.items() if key != "messages"}
        yield row | given | {"model_parameters": settings}
    for more in ({"call_type": "embedding"}, {"status": "failure", "error_str": "busy"},
                 {"id": "", "request_id": "y", "session_id": "s", "model": ""},
                 {"metadata": {"session_id": "s"}}, {"metadata": '{"session_id": "s"}'},
                 {"request_tags": ["a"]}, {"request_tags": []}, {"prompt_tokens": None},
                 {"prompt_tokens": -1}, {"response_cost": None, "spend": 2}, {"spend": 2},
                 {"response_cost": 0, "response_cost_failure_debug_info": {"why": "x"}},
                 {"endTime": 1}, {"startTime": None}, {"trace_id": None}, {"input_tokens": 9},
                 {"custom_llm_provider": None}, {"messages": "redacted-by-litellm"},
                 {"messages": [{"role": "user", "content": "x litellm_truncated y"}]},
                 {"proxy_server_request": {"body": {"tools": TOOLS}}}):  # fmt: skip
        yield row | more


def recorded_rows():
    def content(value):
        return {"text": value if isinstance(value, str) else json.dumps(value)}

    def row(request, given, *, headers=(), **more):
        head = {"stillroom_record": 1, "id": "r1", "kind": "chat", "path": "/v1/chat/completions",
                "upstream": "https://x", "started_at": "2026-03-01T10:00:00Z", "duration_s": 1.0,
                "end": "whole"}  # fmt: skip
        status = {"status": 200, "headers": [list(each) for each in headers]}
        both = {"request": {"content": content(request)}, "reply": status | {"content": given}}
        return head | both | more

    for request, response in bodies():
        yield row(request, content(response))
    plain = {"messages": [USER]}
    for more in ({"kind": "messages"}, {"session": "s", "provider": "openai", "first_block_s": 0.5},
                 {"session": ""}, {"end": "client_left"}, {"reply": None}):  # fmt: skip
        yield row(plain, content(COMPLETION), **more)
    stream = "".join(
        f"data: {json.dumps(chunk)}\n\n"
        for chunk in ({"id": "c1", "choices": [{"delta": {"content": "Ye"}}]},
                      {"choices": [{"delta": {"content": "s"}, "finish_reason": "stop"}]})
    )  # fmt: skip
    streamed = [("Content-Type", "text/event-stream")]
    for text in (stream, stream[:60], "data: [DONE]\n\n"):
        yield row(plain, content(text), headers=streamed)
    yield row(plain, {"base64": "/w=="})
    yield row(plain, content(COMPLETION) | {"cut": "too long"})
    yield row("[5]", content(COMPLETION))


ROWS = {
    "anthropic_messages": anthropic_rows,
    "litellm": litellm_rows,
    "stillroom_record": recorded_rows,
}


@pytest.mark.parametrize("name", ROWS)
def test_calls_read_undecoded_become_the_same_rollouts(name, tmp_path):
    rows = list(ROWS[name]())
    lines = [json.dumps(row, separators=(",", ":")).encode() for row in rows]
    path = write_lines(tmp_path / "calls.jsonl", *lines, b"{broken", b"[1]", b'{"a": "\xff"}')
    form = format_named(name)
    raw, whole = list(form.read_raw([path])), list(form.read([path]))
    assert len(lines) / 3 < sum(isinstance(row, RawCall) for row in raw) < len(lines)
    assert imported(tmp_path, raw) == imported(tmp_path, whole)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_remembered_of_messages_is_bounded(name, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_calls, "_MOST_REMEMBERED", 300)
    form, files = format_named(name), sorted((SAMPLES / name).glob("*.jsonl"))
    raw = list(form.read_raw(files))
    assert any(isinstance(row, RawCall) for row in raw)
    assert imported(tmp_path, raw) == imported(tmp_path, form.read(files))
