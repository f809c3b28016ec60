"""Logs of Anthropic's Messages and OpenAI's Responses, written by their official clients."""

import json

import pytest

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals
from trace_samples.conversation import REPLIES, compared, expected_messages
from trace_samples.scripted_endpoint import (
    Seen,
    anthropic_message,
    message_events,
    response,
    response_events,
)


def anthropic_row(content, **more):
    reply = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "Yes."}],
        "stop_reason": "end_turn",
    }
    messages = [{"role": "user", "content": content}]
    return {
        "request": {"model": "m", "max_tokens": 9, "messages": messages},
        "response": reply,
    } | more


def test_blocks_that_messages_cannot_hold_are_named_as_losses(tmp_path):
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "So "},
        {"type": "text", "text": "it is."},
    ]
    document = {"type": "document", "source": {"type": "text", "data": "x"}}
    row = anthropic_row([{"type": "text", "text": "Read."}, document])
    row["response"]["content"] = blocks
    path = write_rows(tmp_path / "log.jsonl", row)
    (call,) = calls_of(read("anthropic_messages", path))
    assert call.messages[-1] == {"role": "assistant", "content": "So it is."}
    assert sorted(call.dropped) == [
        "calls of provider-run tools left out",
        "files left out",
        "reasoning is encrypted or redacted",
    ]


def test_a_result_of_blocks_and_a_system_prompt_of_blocks_become_texts(tmp_path):
    result = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = anthropic_row(
        [
            {"type": "tool_result", "tool_use_id": "t", "content": result, "is_error": True},
            {"type": "text", "text": "Go on."},
        ]
    )
    row["request"]["system"] = [{"type": "text", "text": "Be short.", "cache_control": {}}]
    (call,) = calls_of(read("anthropic_messages", write_rows(tmp_path / "log.jsonl", row)))
    assert call.messages[:3] == [
        {"role": "system", "content": "Be short."},
        {"role": "tool", "content": "ab", "tool_call_id": "t"},
        {"role": "user", "content": "Go on."},
    ]


def test_bodies_may_be_json_texts_beside_headers(tmp_path):
    row = anthropic_row("Hi?")
    row["request"] = {"url": "/v1/messages", "body": json.dumps(row["request"])}
    row["response"] = {"status": 200, "body": json.dumps(row["response"])}
    (call,) = calls_of(read("anthropic_messages", write_rows(tmp_path / "log.jsonl", row)))
    assert [message["content"] for message in call.messages] == ["Hi?", "Yes."]


def test_a_failed_call_keeps_its_request_and_the_failure(tmp_path):
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    path = write_rows(tmp_path / "log.jsonl", anthropic_row("Hi?", response=error))
    (call,) = calls_of(read("anthropic_messages", path))
    assert call.error == "overloaded_error: Overloaded"
    assert [message["role"] for message in call.messages] == ["user"]


def test_rows_that_cannot_be_read_are_refused_by_line(tmp_path):
    path = write_rows(
        tmp_path / "log.jsonl",
        anthropic_row("Hi?"),
        b'{"request": ',
        b"[" * 100_000,
        b'{"request": "\xff"}',
        {"response": {}},
        anthropic_row("Hi?", response=None),
        anthropic_row(None, request={"system": "x", "messages": []}),
        anthropic_row("Hi?", response={"type": "message", "role": "assistant", "content": [
            {"type": "tool_use", "id": "t"}]}),
    )  # fmt: skip
    rows = read("anthropic_messages", path)
    assert len(calls_of(rows)) == 1
    assert refusals(rows) == [
        (2, "not a JSON object"),
        (3, "not a JSON object"),
        (4, "not a JSON object"),
        (5, "no request"),
        (6, "no reply"),
        (7, "no messages"),
        (8, "a tool call has no name"),
    ]


def test_a_chain_of_responses_is_put_together(tmp_path):
    sample = SAMPLES / "openai_responses" / "chained.jsonl"
    calls = calls_of(read("openai_responses", sample))
    assert_holds_conversation(calls, keeps_reasoning=True)
    assert [call.parent for call in calls] == [None, "resp_0001", "resp_0002"]
    reversed_rows = sample.read_bytes().splitlines()[::-1]
    backwards = write_rows(tmp_path / "backwards.jsonl", *reversed_rows)
    assert_holds_conversation(calls_of(read("openai_responses", backwards)), keeps_reasoning=True)
    tail = write_rows(tmp_path / "tail.jsonl", *reversed_rows[:2])
    last, second = calls_of(read("openai_responses", tail))
    assert "earlier messages are not in the log" in second.dropped
    assert "earlier messages are not in the log" in last.dropped


def stored(number, given, said, **more):
    output = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": said}],
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": number,
        "status": "completed",
        "model": "m",
        "output": [output],
        "usage": {"input_tokens": 3, "output_tokens": 2},
        "input_items": {"object": "list", "data": given},
    } | more


def user(text):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_stored_responses_of_a_conversation_are_put_together_in_time(tmp_path):
    conversation = {"conversation": {"id": "conv_1"}}
    path = write_rows(
        tmp_path / "stored.jsonl",
        stored(2, [user("And 3?")], "Odd.", **conversation, instructions="Be brief."),
        stored(1, [user("Is 2 even?")], "Even.", **conversation, instructions="Be kind."),
    )
    later, first = calls_of(read("openai_responses", path))
    assert [message["content"] for message in first.messages] == ["Be kind.", "Is 2 even?", "Even."]
    assert [message["content"] for message in later.messages] == [
        "Be brief.", "Is 2 even?", "Even.", "And 3?", "Odd.",
    ]  # fmt: skip
    assert (later.group, later.parent) == ("conv_1", "resp_1")
    assert later.started_at == "1970-01-01T00:00:02Z"


def test_input_items_that_the_api_lists_newest_first_are_turned_round(tmp_path):
    items = [
        {"type": "function_call_output", "call_id": "c", "output": "4"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        user("Add."),
    ]
    path = write_rows(tmp_path / "stored.jsonl", stored(1, items, "4."))
    (call,) = calls_of(read("openai_responses", path))
    assert [message["role"] for message in call.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_a_stored_response_without_its_input_is_refused(tmp_path):
    row = stored(1, [], "4.")
    del row["input_items"]
    rows = read("openai_responses", write_rows(tmp_path / "stored.jsonl", row))
    assert refusals(rows) == [(1, "a response without its input")]


def test_items_of_tools_that_the_provider_runs_are_losses_and_custom_calls_are_calls(tmp_path):
    row = stored(1, [user("Search.")], "Done.")
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": "ls"}
    secret = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    row["output"] += [{"type": "web_search_call", "id": "w"}, secret, custom]
    (call,) = calls_of(read("openai_responses", write_rows(tmp_path / "stored.jsonl", row)))
    function = {"name": "sh", "arguments": "ls"}
    assert call.messages[-1]["tool_calls"] == [
        {"id": "c", "type": "function", "function": function}
    ]
    assert call.finish_reason == "tool_calls"
    assert sorted(call.dropped) == [
        "calls of provider-run tools left out",
        "reasoning is encrypted or redacted",
    ]


def test_responses_that_continue_each_other_in_a_circle_are_read_once_each(tmp_path):
    path = write_rows(
        tmp_path / "circle.jsonl",
        stored(1, [user("a")], "b", previous_response_id="resp_2"),
        stored(2, [user("c")], "d", previous_response_id="resp_1"),
    )
    first, second = calls_of(read("openai_responses", path))
    assert [len(first.messages), len(second.messages)] == [6, 6]
    assert "earlier messages are not in the log" in first.dropped


def as_stream(events):
    return "".join(f"event: {e.get('type')}\ndata: {json.dumps(e)}\n\n" for e in events)


@pytest.mark.parametrize("is_text", [True, False])
def test_replies_may_be_logged_as_the_stream_that_they_came_in(is_text, tmp_path):
    seen = Seen("", {}, REPLIES[0], id="1")
    expected = compared(expected_messages(keeps_reasoning=True)[0][-1])
    shaped = as_stream if is_text else list
    message = shaped(message_events(anthropic_message(seen, "m")))
    request = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi?"}]}
    row = {"request": request | {"stream": True}, "response": message, "url": "/v1/messages"}
    path = write_rows(
        tmp_path / "messages.jsonl", row, row | {"response": message[: len(message) // 2]}
    )
    assert recognised_by(path) == ["anthropic_messages"]
    rows = read("anthropic_messages", path)
    (call,) = calls_of(rows)
    assert compared(call.messages[-1]) == expected
    assert (call.usage.prompt_tokens, call.finish_reason) == (50, "tool_calls")
    assert [row.location.line for row in rows] == [1, 2]
    items = {"request": {"model": "m", "input": "Hi?"}}
    items["response"] = shaped(response_events(response(seen, "m")))
    path = write_rows(tmp_path / "responses.jsonl", items)
    assert recognised_by(path) == ["openai_responses"]
    (call,) = calls_of(read("openai_responses", path))
    assert compared(call.messages[-1]) == expected
    assert call.id == "resp_1"
