"""Logs of Gemini's generateContent, written by Google's own client."""

import json

import pytest

from fakes.scripted_calls import calls_of, write_rows
from fakes.trace_files import read, refusals

CANDIDATE = {"content": {"role": "model", "parts": [{"text": "Yes."}]}, "finishReason": "STOP"}


def row(contents, *candidates, **more):
    response = {"candidates": list(candidates or [CANDIDATE])}
    return {"request": {"contents": contents}, "response": response} | more


def test_a_request_may_be_a_text_or_a_list_of_texts_and_parts(tmp_path):
    image = {"inline_data": {"mime_type": "audio/wav", "data": ""}}
    rows = [row("Hi"), row(["Hi", image, " there"]), row([{"text": "Hi"}]), row([{"parts": "Hi"}])]
    calls = calls_of(read("gemini", write_rows(tmp_path / "log.jsonl", *rows)))
    assert [call.messages[0]["content"] for call in calls] == ["Hi", "Hi there", "Hi", "Hi"]
    assert [call.dropped for call in calls] == [(), ("audio left out",), (), ()]


def test_a_request_without_contents_is_refused(tmp_path):
    log = write_rows(tmp_path / "log.jsonl", row(None), row([]), row("Hi"))
    assert [line for line, _ in refusals(read("gemini", log))] == [1, 2]


def test_results_find_their_calls_by_id_and_else_by_name_and_order(tmp_path):
    asks = [{"functionCall": {"name": "a", "args": {"n": n}}} for n in (1, 2)]
    asks.append({"functionCall": {"id": "x", "name": "b"}})
    answers = [{"functionResponse": {"id": "x", "name": "b", "response": {"error": "no"}}}]
    answers += [{"functionResponse": {"name": "a", "response": {"result": n}}} for n in (1, 2)]
    contents = [
        {"role": "user", "parts": [{"text": "Go"}]},
        {"role": "model", "parts": asks},
        {"role": "function", "parts": answers},
    ]
    (call,) = calls_of(read("gemini", write_rows(tmp_path / "log.jsonl", row(contents))))
    made = [(c["id"], c["function"]["arguments"]) for c in call.messages[1]["tool_calls"]]
    assert made == [("call_0", '{"n": 1}'), ("call_1", '{"n": 2}'), ("x", "{}")]
    assert [(m["tool_call_id"], m["content"]) for m in call.messages[2:5]] == [
        ("x", '{"error": "no"}'), ("call_0", "1"), ("call_1", "2"),
    ]  # fmt: skip


def test_each_candidate_is_a_reply_and_what_filters_cut_off_is_marked(tmp_path):
    cut = {"finishReason": "SAFETY", "index": 1}
    code = {"parts": [{"executableCode": {"code": "1"}}, {"odd": 1}, {"text": "Ok."}]}
    path = write_rows(tmp_path / "log.jsonl", row("Hi", CANDIDATE, cut, {"content": code}))
    calls = calls_of(read("gemini", path))
    assert [(c.messages[-1]["content"], c.finish_reason) for c in calls] == [
        ("Yes.", "stop"), ("", "content_filter"), ("Ok.", None),
    ]  # fmt: skip
    assert [call.location.part for call in calls] == ["", "choice 1", "choice 2"]
    assert calls[2].dropped == (
        "calls of provider-run tools left out",
        "content of an unknown kind left out",
    )


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ({"error": {"code": 429, "message": "slow down"}}, "429: slow down"),
        ({"promptFeedback": {"blockReason": "SAFETY"}}, "SAFETY"),
    ],
)
def test_a_failed_or_blocked_call_has_its_reason(tmp_path, response, error):
    path = write_rows(tmp_path / "log.jsonl", {"request": {"contents": "Hi"}, "response": response})
    (call,) = calls_of(read("gemini", path))
    assert call.error == error


def test_rows_without_a_message_or_a_reply_are_refused(tmp_path):
    path = write_rows(
        tmp_path / "log.jsonl",
        {"request": {"contents": []}, "response": {"candidates": [CANDIDATE]}},
        {"request": {"contents": "Hi"}, "response": {"candidates": []}},
        {"request": {"contents": "Hi"}, "response": 5},
        {"request": {"contents": "Hi"}, "response": "data: {broken"},
        {"request": {"input": "Hi"}, "response": {}},
        row([{"role": "model", "parts": [{"functionCall": {"args": {}}}]}]),
    )
    assert sorted(refusals(read("gemini", path))) == sorted([
        (1, "no messages"), (2, "no reply"), (3, "no reply"), (5, "no request"),
        (4, "an event of the stream is not JSON"), (6, "a tool call has no name"),
    ])  # fmt: skip


def test_a_stream_logged_as_text_is_put_together(tmp_path):
    chunks = [{"candidates": [{"content": {"parts": [{"text": text}]}}]} for text in ("Y", "es.")]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    path = write_rows(tmp_path / "log.jsonl", {
        "request": {"path": "/v1beta/models/gemini-x:streamGenerateContent?alt=sse",
                    "body": {"contents": "Hi"}},
        "response": text,
    })  # fmt: skip
    (call,) = calls_of(read("gemini", path))
    assert (call.model, call.messages[-1]["content"]) == ("gemini-x", "Yes.")
