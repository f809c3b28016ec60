"""Recorded calls are answered again: the same bytes for the same request, and no network."""

import json
from contextlib import contextmanager

import pytest

from fakes.raw_endpoint import RawEndpoint, chunk, json_reply, stream_reply
from fakes.recording import CHAT, RawClient, in_thread, recording, request
from fakes.trace_files import SAMPLES
from stillroom.errors import DataError, InputError
from stillroom.recording.admission import Admission
from stillroom.recording.replay import Replay
from stillroom.recording.tape import Tape

EVENTS = (b'data: {"a": "h\xc3\xa9', b'llo"}\n\ndata: 1\n\n', b"data: [DONE]\n\n")
TOKEN = "a-token-of-these-tests"


def body(text="Hi?", **more):
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    ).encode()


@contextmanager
def replaying(*places, token=None):
    tape = Tape(places)
    with in_thread(Replay(tape, Admission(token))) as url:
        yield url


def record(folder, script, *sent, headers=()):
    """Records what an endpoint answers, and returns the replies as they came."""
    with RawEndpoint(script) as endpoint, recording(folder, endpoint.url) as url:
        return [request(url, "POST", CHAT, data, *headers) for data in sent]


def test_a_request_gets_the_bytes_and_blocks_that_were_recorded(tmp_path):
    replies = iter([stream_reply(*EVENTS), json_reply(b'{"b": 1}', b"x-request-id: r7")])
    first, second = record(tmp_path, lambda _: next(replies), body("stream"), body("whole"))
    with replaying(tmp_path) as url, RawClient(url) as client:
        for sent, recorded in ((body("whole"), second), (body("stream"), first)):
            client.send("POST", CHAT, sent)
            reply = client.read()
            assert (reply.status, reply.body, reply.blocks) == (200, recorded.body, recorded.blocks)
            assert reply.is_whole
            assert reply.headers["content-type"] == recorded.headers["content-type"]
    assert first.blocks == list(EVENTS)
    assert second.headers["x-request-id"] == "r7"


def test_requests_are_the_same_whatever_their_order_keys_and_fields_of_the_moment(tmp_path):
    key = "sk-the-key-of-the-recording"
    sent = body(f"use {key}", user="u1", metadata={"run": 1}, temperature=0.5)
    record(tmp_path, lambda _: json_reply(b"1"), sent, headers=[f"Authorization: Bearer {key}"])
    other = "sk-another-key-in-the-tests"
    messages = [{"content": f"use {other}", "role": "user"}]
    moved = {"temperature": 0.5, "user": "u2", "messages": messages, "model": "m"}
    again = json.dumps(moved, indent=2).encode()
    with replaying(tmp_path) as url:
        reply = request(url, "POST", f"/api{CHAT}?key=x", again, f"x-api-key: {other}")
        changed = again.replace(b"0.5", b"0.6")
        refused = request(url, "POST", CHAT, changed, f"x-api-key: {other}")
    assert reply.body == b"1"
    assert refused.status == 404


def test_a_request_with_the_signed_address_of_an_image_is_recorded_without_its_signature(tmp_path):
    image = "https://files.test/a.png?X-Amz-Expires=9&X-Amz-Signature=0123456789abcdef"
    parts = [{"type": "image_url", "image_url": {"url": image}}]
    sent = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
    record(tmp_path, lambda _: json_reply(b"1"), sent)
    recorded = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    assert b"X-Amz-Expires=9" in recorded
    assert b"0123456789abcdef" not in recorded
    with replaying(tmp_path) as url:
        assert request(url, "POST", CHAT, sent).body == b"1"
    journal = tmp_path / "calls-0001.jsonl"
    journal.write_bytes(recorded.replace(b"Signature=[key]", b"Signature=0123456789abcdef"))
    with replaying(tmp_path) as url:  # as an earlier version recorded it
        assert request(url, "POST", CHAT, sent).body == b"1"


def test_a_request_made_again_gets_the_replies_in_their_order_and_then_the_last(tmp_path):
    replies = iter([json_reply(b"slow", b"retry-after: 1", status=b"429 Slow"), json_reply(b"2")])
    record(tmp_path, lambda _: next(replies), body(), body())
    with replaying(tmp_path) as url:
        got = [request(url, "POST", CHAT, body()) for _ in range(3)]
    assert [(reply.status, reply.body) for reply in got] == [
        (429, b"slow"),
        (200, b"2"),
        (200, b"2"),
    ]
    assert got[0].headers["retry-after"] == "1"
    assert got[2].headers["x-stillroom-replay"] == "calls-0001.jsonl:2; 3 of 2"


def test_an_unknown_request_is_told_the_nearest_recorded_one_and_what_differs(tmp_path):
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    last = {"role": "user", "content": "c"}
    sent = [body("z"), json.dumps({"model": "m", "messages": [*history, last]}).encode()]
    record(tmp_path, lambda _: json_reply(b"1"), *sent)
    with replaying(tmp_path) as url:
        reply = request(url, "POST", CHAT, sent[1].replace(b'"c"', b'"d"'))
        message = json.loads(reply.body)["error"]["message"]
        assert reply.status == 404
        assert (
            'calls-0001.jsonl:2, which differs in messages[2].content: "d" sent, "c" rec' in message
        )
        more = json.dumps({"model": "m", "messages": [*history, last, last]}).encode()
        assert b"messages[3]" in request(url, "POST", CHAT, more).body
        more = body("z", top_p=1)
        assert b"top_p: 1 sent, nothing recorded" in request(url, "POST", CHAT, more).body
        assert b"no messages call was recorded" in request(url, "POST", "/v1/messages", body()).body
        assert request(url, "POST", CHAT, b"\xff{").status == 404
        assert request(url, "POST", CHAT, b"[" * 5000).status == 404
        assert b"GET /v1/models is not a model call" in request(url, "GET", "/v1/models").body


def test_a_reply_that_the_endpoint_broke_off_is_broken_off_again(tmp_path):
    head = stream_reply()[0]
    replies = iter(
        [[head, chunk(EVENTS[0]), 0.01, None], [json_reply(b'{"a": 1}')[:-3], 0.01, None]]
    )
    record(tmp_path, lambda _: next(replies), body("stream"), body("whole"))
    with replaying(tmp_path) as url:
        stream, whole = (request(url, "POST", CHAT, body(t)) for t in ("stream", "whole"))
    assert (stream.body, stream.is_whole) == (EVENTS[0], False)
    assert (whole.body, whole.is_whole) == (b'{"a":', False)


def test_calls_whose_client_left_and_a_torn_last_line_are_not_answered_again(tmp_path):
    record(tmp_path, lambda _: json_reply(b"1"), body(), body("left"))
    journal = tmp_path / "calls-0001.jsonl"
    first, second = journal.read_bytes().splitlines(keepends=True)
    left = second.replace(b'"end":"whole"', b'"end":"client_left"')
    journal.write_bytes(first + left + b'{"stillroom_record":1,"id"')
    tape = Tape([tmp_path])
    assert (tape.num_calls, tape.num_left_out) == (1, 2)


def test_streams_written_by_the_official_clients_are_answered_event_by_event(tmp_path):
    sample = SAMPLES / "stillroom_record" / "messages_streamed.jsonl"
    call = json.loads(sample.read_bytes().splitlines()[0])
    with replaying(sample) as url:
        reply = request(url, "POST", "/v1/messages", call["request"]["content"]["text"].encode())
    assert reply.body.decode() == call["reply"]["content"]["text"]
    assert [len(block) for block in reply.blocks] == call["reply"]["blocks"]


def test_a_token_is_asked_for_in_replay_too(tmp_path):
    record(tmp_path, lambda _: json_reply(b"1"), body())
    with replaying(tmp_path, token=TOKEN) as url:
        assert request(url, "POST", CHAT, body()).status == 401
        assert request(url, "POST", f"/token/{TOKEN}{CHAT}", body()).body == b"1"


def test_what_holds_no_recorded_call_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"no recorded call in (.|\n)*stillroom record --upstream"):
        Tape([tmp_path])
    (tmp_path / "calls-0001.jsonl").write_bytes(b'{"a": 1}\n')
    with pytest.raises(DataError, match=r"calls-0001\.jsonl:1 is not a recorded call"):
        Tape([tmp_path])
