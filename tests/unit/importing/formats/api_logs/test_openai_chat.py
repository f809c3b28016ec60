import json

import pytest

from stillroom.importing.formats.api_logs.logged_pairs import OPENAI_CHAT

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
COMPLETION = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "m-2",
    "choices": [{"index": 0, "message": REPLY, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
}
CALL = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHUNKS = [
    {"id": "c1", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    {"choices": [{"index": 0, "delta": {"content": "Hel"}}]},
    {"choices": [{"index": 0, "delta": {"content": "lo", "reasoning_content": "so"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [
        {"index": 0, "id": "t1", "function": {"name": "look", "arguments": ""}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [
        {"index": 0, "function": {"arguments": '{"a": 1}'}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}},
]  # fmt: skip
SPELLINGS = {
    "pair": {"request": {"model": "m", "messages": [USER]}, "response": COMPLETION},
    "bodies": {"request": {"body": {"messages": [USER]}}, "response": {"body": COMPLETION}},
    "beside": {"messages": [USER], "response": COMPLETION},
    "text": {"messages": [USER], "completion": "Hello"},
    "output": {"messages": [USER], "output": REPLY},
    "whole": {**COMPLETION, "messages": [USER]},
    "whole with its request": {**COMPLETION, "request": {"messages": [USER]}},
    "chunks": {"request": {"messages": [USER]}, "response": CHUNKS},
}


def read(tmp_path, rows):
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert OPENAI_CHAT.is_recognised(path, path.read_bytes())
    return list(OPENAI_CHAT.read([path]))


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_usual_spelling_of_a_logged_call_is_read(tmp_path, name):
    [call] = read(tmp_path, [SPELLINGS[name]])
    assert call.is_call
    assert [message["content"] for message in call.messages] == ["Hi", "Hello"]
    if name == "chunks":
        reply = call.messages[-1]
        assert reply["reasoning_content"] == "so"
        assert reply["tool_calls"][0]["function"] == CALL["function"]
        assert (call.finish_reason, call.usage.completion_tokens) == ("tool_calls", 2)


def test_choices_are_parts_of_their_row_and_a_failed_call_is_one(tmp_path):
    two = {**COMPLETION, "choices": [
        {"index": n, "message": {"role": "assistant", "content": str(n)}, "finish_reason": "stop"}
        for n in range(2)]}  # fmt: skip
    failed = {"request": {"messages": [USER]}, "response": {"error": {"message": "busy"}}}
    first, second, third = read(tmp_path, [{"messages": [USER], "response": two}, failed])
    assert (first.location.part, second.location.part) == ("", "choice 1")
    assert third.error == "busy"


def test_scores_beside_a_call_are_read(tmp_path):
    [call] = read(tmp_path, [{**SPELLINGS["pair"], "scores": {"right": 1, "why": "x"},
                              "feedback": True}])  # fmt: skip
    assert call.scores == {"right": 1.0, "feedback": 1.0}
