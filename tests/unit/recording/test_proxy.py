"""What goes through the recording proxy, and what is recorded of it."""

import json

from fakes.raw_endpoint import RawEndpoint, json_reply, stream_reply
from fakes.recording import CHAT, RawClient, calls_in, recording, request

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hé"}]}).encode()
REPLY = b'{"choices":[{"message":{"role":"assistant","content":"yes"}}]}'
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":"He"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"llo"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)


def test_a_call_passes_through_unchanged_and_is_recorded(tmp_path):
    with (
        RawEndpoint(lambda _: json_reply(REPLY, b"x-request-id: r1")) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        reply = request(url, "POST", CHAT, BODY, "X-App: 1", "Content-Type: application/json")
        calls = calls_in(tmp_path)

    assert (reply.status, reply.body) == (200, REPLY)
    assert reply.headers["x-request-id"] == "r1"
    assert endpoint.requests[0].body == BODY
    assert endpoint.requests[0].first_line == f"POST {CHAT} HTTP/1.1"
    assert endpoint.requests[0].headers["x-app"] == "1"
    assert endpoint.requests[0].headers["host"] == endpoint.url.removeprefix("http://")
    (call,) = calls
    assert (call.kind, call.end, call.path) == ("chat", "whole", CHAT)
    assert call.request.content.data == BODY
    assert call.reply.content.data == REPLY
    assert call.reply.status == 200


def test_a_stream_comes_in_the_blocks_in_which_it_was_sent(tmp_path):
    with (
        RawEndpoint(lambda _: stream_reply(*EVENTS)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        with RawClient(url) as client:
            for _ in range(2):
                client.send("POST", CHAT, BODY)
                reply = client.read()
                assert reply.is_whole
                assert reply.blocks == list(EVENTS)
        calls = calls_in(tmp_path)

    assert endpoint.num_connections == 1
    assert [call.reply.blocks for call in calls] == [[len(e) for e in EVENTS]] * 2
    assert calls[0].reply.content.data == b"".join(EVENTS)
