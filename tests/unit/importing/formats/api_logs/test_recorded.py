"""The journals of `stillroom record`, written while the official clients called through it."""

import json

import pytest

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, refusals
from stillroom.importing.formats.api_logs import recorded
from stillroom.recording.records import (
    RecordedCall,
    RecordedReply,
    RecordedRequest,
    content_of,
    encode_call,
)

NAME = "stillroom_record"
ASKED = b'{"model":"m","messages":[{"role":"user","content":"Hi?"}]}'


def line(data=b"", *, kind="chat", end="whole", status=200, sent=ASKED, is_stream=True, **more):
    """A line of a journal; `data` None stands for no reply."""
    headers = [("Content-Type", "text/event-stream" if is_stream else "application/json")]
    reply = RecordedReply(status=status, headers=headers, content=content_of(data or b""))
    call = RecordedCall(
        stillroom_record=1, id="c1", kind=kind, path="/v1/x", upstream="https://a.example",
        started_at="2026-03-01T10:00:00.000+00:00", duration_s=1.5, end=end,
        request=RecordedRequest(content=content_of(sent)),
        reply=None if data is None else reply, **more,
    )  # fmt: skip
    return encode_call(call).rstrip()


def stream(*events):
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)


def delta(finish=None, index=0, **fields):
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def one(tmp_path, *arguments, **more):
    (call,) = calls_of(
        read(NAME, write_rows(tmp_path / "calls-0001.jsonl", line(*arguments, **more)))
    )
    return call


@pytest.mark.parametrize("ending", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_recorded_calls_of_the_official_clients_come_back_as_they_were(api, ending):
    paths = sorted((SAMPLES / NAME).glob(f"{api}_{ending}*.jsonl"))
    calls = calls_of(read(NAME, *paths))
    assert_holds_conversation(calls, keeps_reasoning=api != "chat")
    assert all(call.duration_s is not None and call.started_at for call in calls)
    assert {call.metadata["upstream"] for call in calls} == {"https://endpoint.example"}
    is_chained = (api, ending) == ("responses", "streamed")
    assert [call.parent is not None for call in calls] == [False, is_chained, is_chained]


def test_calls_that_stream_at_once_or_without_an_index_stay_apart(tmp_path):
    def piece(index, call_id, arguments, **more):
        call = {"id": call_id, "function": {"arguments": arguments, **more}}
        return call if index is None else call | {"index": index}

    both = delta(tool_calls=[piece(0, "a", "", name="f"), piece(1, "b", "", name="g")])
    events = [
        both,
        delta(tool_calls=[piece(1, None, '{"x"'), piece(0, None, "{")]),
        delta(tool_calls=[piece(0, None, "}"), piece(1, None, ": 1}")]),
        delta("tool_calls"),
    ]
    calls = one(tmp_path, stream(*events)).messages[-1]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": "{}"}, {"name": "g", "arguments": '{"x": 1}'},
    ]  # fmt: skip
    same = [delta(tool_calls=[piece(i, n, "{}", name=n)]) for i in (0, None) for n in ("a", "b")]
    calls = one(tmp_path, stream(*same, delta("tool_calls"))).messages[-1]["tool_calls"]
    assert [call["id"] for call in calls] == ["a", "b", "a", "b"]


def test_each_choice_of_a_stream_is_a_call_of_its_own(tmp_path):
    events = [delta(content="A", index=1), delta(content="B"), delta("stop"), delta("length", 1)]
    usage = {"choices": [], "model": "m-1", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    path = write_rows(tmp_path / "calls-0001.jsonl", line(stream(*events, usage)))
    first, second = calls_of(read(NAME, path))
    assert (first.messages[-1]["content"], first.finish_reason) == ("B", "stop")
    assert (second.messages[-1]["content"], second.location.part) == ("A", "choice 1")
    assert (first.model, first.usage.prompt_tokens) == ("m-1", 3)


def test_reasoning_of_a_stream_stands_beside_its_text(tmp_path):
    events = [
        delta(reasoning="So"),
        delta(reasoning=" it is."),
        delta(content="Yes"),
        delta("stop"),
    ]
    assert one(tmp_path, stream(*events)).messages[-1] == {
        "role": "assistant", "content": "Yes", "reasoning_content": "So it is.",
    }  # fmt: skip


def test_the_items_of_a_response_are_those_that_were_streamed_if_its_end_lists_none(tmp_path):
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    events = [
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {
            "type": "response.completed",
            "response": {"id": "r", "status": "completed", "output": []},
        },
    ]
    call = one(tmp_path, stream(*events), kind="responses", sent=b'{"model":"m","input":"Hi?"}')
    assert call.messages[-1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_arguments_that_the_limit_cut_stay_as_they_came(tmp_path):
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    pieces = [{"type": "input_json_delta", "partial_json": text} for text in ('{"a": ', '"b')]
    begun = {"type": "message", "role": "assistant", "usage": {"input_tokens": 4}}
    ended = {"delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 9}}
    events = [
        {"type": "message_start", "message": begun},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": piece} for piece in pieces),
        {"type": "message_delta", **ended},
        {"type": "message_stop"},
    ]
    call = one(tmp_path, stream(*events), kind="messages")
    assert call.messages[-1]["tool_calls"][0]["function"]["arguments"] == '{"a": "b'
    assert (call.finish_reason, call.usage.completion_tokens) == ("length", 9)


def test_broken_calls_are_refused_by_who_broke_them_off(tmp_path):
    begun = stream(delta(content="He"))
    path = write_rows(
        tmp_path / "calls-0001.jsonl",
        line(begun, end="client_left"),
        line(begun[:-9], end="upstream_left"),
        line(begun, end="proxy_stopped"),
        line(None, end="upstream_left", problem="connection refused"),
        line(begun),
        line(b'{"choices":', end="upstream_left", is_stream=False),
    )
    assert refusals(read(NAME, path)) == [
        (1, "the client disconnected before the end"),
        (2, "the endpoint disconnected before the end"),
        (3, "the recorder stopped before the end"),
        (4, "the endpoint disconnected before the end"),
        (5, "the stream is incomplete"),
        (6, "the endpoint disconnected before the end"),
    ]


def test_a_client_that_left_after_the_last_words_has_a_whole_call(tmp_path):
    events = stream(delta(content="Yes"), delta("stop"))
    assert one(tmp_path, events, end="client_left").messages[-1]["content"] == "Yes"


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b'{"error":{"type":"rate","message":"Slow down"}}', "HTTP 429: rate: Slow down"),
        (b"<html>Bad gateway", "HTTP 429: <html>Bad gateway"),
    ],
)
def test_a_refused_call_keeps_its_request_and_the_failure(tmp_path, data, failure):
    call = one(tmp_path, data, status=429, is_stream=False)
    assert call.error == failure
    assert [message["role"] for message in call.messages] == ["user"]


def test_a_failure_within_a_stream_is_the_calls_failure(tmp_path):
    events = stream(delta(content="He"), {"error": {"code": 502, "message": "Provider broke off"}})
    assert one(tmp_path, events).error == "502: Provider broke off"


def test_hostile_lines_are_refused_by_line(tmp_path):
    path = write_rows(
        tmp_path / "calls-0001.jsonl",
        line(stream(delta(content="Hi"), delta("stop"))),
        b'{"stillroom_record":1,"id":',
        b'{"stillroom_record":2,"id":"x"}',
        b"[" * 100_000,
        line(b"data: [1]\n\n"),
        line(b"data: {\n\n"),
        line(stream(delta("stop")), sent=b"\xff\xfe"),
        line(stream(delta("stop")), sent=b"[" * 5000),
        line(stream({"choices": 5}, {"type": 3}), kind="messages"),
        line(b"\xff", is_stream=False),
        b'{"stillroom_record":1,"id":"\xff"}',
    )
    rows = read(NAME, path)
    assert len(calls_of(rows)) == 1
    assert [location for location, _ in refusals(rows)] == list(range(2, 12))


def test_what_was_not_recorded_whole_is_refused_with_the_flag_to_raise(tmp_path):
    call = json.loads(line(stream(delta("stop"))))
    call["reply"]["content"]["cut"] = "it is longer than 16777216 bytes"
    (refused,) = read(NAME, write_rows(tmp_path / "calls-0001.jsonl", json.dumps(call).encode()))
    assert refused.reason == recorded.TRUNCATED_BODY
    assert "--max-body-mb" in refused.detail
