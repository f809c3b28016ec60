"""Logs of LiteLLM, written by LiteLLM itself, of Helicone, and OpenAI's stored completions."""

import json

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals, shown

MESSAGES = [{"role": "user", "content": "Hi?"}]
COMPLETION = {"id": "c", "model": "m-1", "choices": [
    {"message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}]}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def spend(**more):
    """A row of LiteLLM's table of spend, in which objects are JSON texts."""
    return {
        "request_id": "r1",
        "call_type": "acompletion",
        "spend": 0.5,
        "startTime": "2026-03-01 10:00:00.000",
        "endTime": "2026-03-01 10:00:01.500",
        "model": "m",
        "custom_llm_provider": "openai",
        "session_id": "s1",
        "status": "success",
        "metadata": json.dumps({"status": "success"}),
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "messages": json.dumps({}),
        "proxy_server_request": json.dumps({"messages": MESSAGES, "tools": [TOOL], "model": "x"}),
        "response": json.dumps(COMPLETION),
    } | more


def test_rows_of_litellms_spend_are_read_if_they_hold_the_messages(tmp_path):
    path = write_rows(tmp_path / "spend.jsonl", spend())
    assert recognised_by(path) == ["litellm"]
    (call,) = calls_of(read("litellm", path))
    assert shown(call.messages) == ["user Hi?", "assistant Yes."]
    assert (call.group, call.id, call.model, call.cost_usd) == ("s1", "r1", "m", 0.5)
    assert (call.usage.prompt_tokens, call.duration_s) == (7, 1.5)
    assert call.tools == [TOOL]


def test_rows_of_litellm_without_a_chat_are_refused_with_the_reason(tmp_path):
    hidden = [{"role": "user", "content": "redacted-by-litellm"}]
    cut = [{"role": "user", "content": "abc... (litellm_truncated 90 chars) ...xyz"}]
    path = write_rows(
        tmp_path / "spend.jsonl",
        spend(proxy_server_request="{}"),
        spend(call_type="aembedding"),
        spend(messages=hidden),
        spend(response={}),
        spend(
            status="failure", response={}, metadata={"error_information": {"error_message": "429"}}
        ),
        spend(messages=cut),
        {"call_type": "acompletion"},
    )
    rows = read("litellm", path)
    failed, truncated = calls_of(rows)
    assert (failed.error, shown(failed.messages)) == ("429", ["user Hi?"])
    assert truncated.dropped == ("content truncated by the log",)
    assert refusals(rows) == [
        (1, "contents were not recorded"),
        (2, "no model call"),
        (3, "contents were redacted"),
        (4, "no reply"),
        (7, "neither a payload nor a spend log row of LiteLLM"),
    ]


def test_calls_of_responses_and_messages_through_litellm_are_read(tmp_path):
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Yes."}],
    }
    responses = spend(
        call_type="aresponses",
        messages=json.dumps(MESSAGES),
        response={"object": "response", "output": [said], "status": "completed"},
    )
    blocks = [{"type": "text", "text": "Yes."}]
    messages = spend(
        call_type="anthropic_messages",
        messages=MESSAGES,
        response={
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "stop_reason": "end_turn",
        },
    )
    calls = calls_of(read("litellm", write_rows(tmp_path / "rows.jsonl", responses, messages)))
    assert [shown(call.messages) for call in calls] == [["user Hi?", "assistant Yes."]] * 2
    assert [call.finish_reason for call in calls] == ["stop", "stop"]  # fmt: skip


def test_answers_of_helicones_api_and_rows_without_bodies(tmp_path):
    row = {"request_id": "r", "request_created_at": "2026-03-01T10:00:00Z", "response_status": 200}
    whole = row | {
        "request_body": {"model": "m", "messages": MESSAGES},
        "response_body": COMPLETION,
    }
    failed = whole | {"response_status": 429, "response_body": ""}
    path = write_rows(tmp_path / "rows.jsonl", {"data": [whole, row], "error": None}, failed)
    assert recognised_by(path) == ["helicone"]
    rows = read("helicone", path)
    answered, refused = calls_of(rows)
    assert (answered.location.part, shown(answered.messages)[-1]) == ("request 1", "assistant Yes.")
    assert (refused.error, refused.scores) == ("status 429", {})
    assert refusals(rows) == [(1, "contents were not recorded")]


def test_stored_completions_are_joined_with_their_messages():
    folder = SAMPLES / "stored_completions"
    paths = (folder / "completions.json", folder / "messages.jsonl")
    for order in (paths, paths[::-1]):
        rows = read("stored_completions", *order)
        calls = calls_of(rows)
        assert len(rows) == 3
        assert_holds_conversation(calls, keeps_reasoning=False)
        assert [len(call.merged_from) for call in calls] == [7, 5, 2]
        assert calls[0].metadata["metadata"] == {"shop": "1"}


def test_halves_of_stored_completions_are_refused(tmp_path):
    folder = SAMPLES / "stored_completions"
    lonely = read("stored_completions", folder / "completions.json")
    assert refusals(lonely) == [(1, "a completion without its messages")] * 3
    messages = refusals(read("stored_completions", folder / "messages.jsonl"))
    assert [reason for _, reason in messages] == ["a message without its completion"] * 14
    message = {"id": "c-0", "role": "user", "content": "Hi?"}
    path = write_rows(tmp_path / "rows.jsonl", {"object": "list", "data": [message, message, 5]})
    assert [reason for _, reason in refusals(read("stored_completions", path))] == [
        "a message that appears twice",
        "neither a stored completion nor a message",
        "a message without its completion",
    ]


def test_a_completion_with_messages_that_cannot_be_read_is_refused_with_them(tmp_path):
    completion = COMPLETION | {"object": "chat.completion"}
    message = {"id": "c-0", "role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}
    path = write_rows(tmp_path / "rows.jsonl", {"object": "list", "data": [completion, message]})
    rows = read("stored_completions", path)
    assert [(row.location.part, row.reason) for row in rows] == [
        ("row 1", "a tool call has no name"),
        ("row 2", "a tool call has no name"),
    ]
