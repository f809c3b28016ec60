"""Keys go to the upstream, and into no file, log or error."""

import json

import pytest

from fakes.raw_endpoint import CHUNK_END, STREAM_HEAD, RawEndpoint, chunk, json_reply, stream_reply
from fakes.recording import CHAT, calls_in, recording, request

KEY = "sk-proj-Abc/123+very~secret.key"
PLACES = [
    (f"Authorization: Bearer {KEY}", ""),
    (f"x-api-key: {KEY}", ""),
    (f"API-KEY: {KEY}", ""),
    (f"x-goog-api-key: {KEY}", ""),
    (f"Cookie: session={KEY}", ""),
    ("X-None: 1", f"?alt=sse&key={KEY}"),
    ("X-None: 1", "?api_key=sk-proj-Abc%2F123%2Bvery~secret.key&a=1"),
]


def files_of(folder) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("header", "query"), PLACES)
def test_a_key_is_passed_on_and_stored_nowhere(tmp_path, capfd, header, query):
    """The endpoint repeats it in a header and in its content, as it is and escaped."""
    spelled = json.dumps({"error": f"no such key: {KEY}"}).replace("/", "\\/").encode()
    answer = json_reply(
        b"[%b, %b]" % (spelled, json.dumps(KEY).encode()), b"x-seen: " + KEY.encode()
    )
    body = json.dumps({"messages": [{"role": "user", "content": f"my key is {KEY}"}]}).encode()
    with (
        RawEndpoint(lambda _: answer) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        reply = request(url, "POST", CHAT + query, body, header)
        (call,) = calls_in(tmp_path)
    sent = endpoint.requests[0]
    assert header.encode() in sent.head
    assert sent.first_line == f"POST {CHAT + query} HTTP/1.1"
    assert reply.body in answer
    assert KEY.encode() not in files_of(tmp_path)
    assert b"very~secret" not in files_of(tmp_path)
    assert b"no such key: [key]" in call.reply.content.data
    assert b"my key is [key]" in call.request.content.data
    assert dict(call.reply.headers)["x-seen"] == "[key]"
    printed = capfd.readouterr()
    assert "secret" not in printed.out + printed.err


def test_a_key_that_a_stream_says_in_pieces_is_taken_out_of_all_of_them(tmp_path):
    pieces = [KEY[:3], KEY[3:9], KEY[9:-2], KEY[-2:] + " is it"]
    events = [
        b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()
        for text in ["yes: ", *pieces]
    ]
    with (
        RawEndpoint(lambda _: stream_reply(*events, b"data: [DONE]\n\n")) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        reply = request(url, "POST", CHAT, b"{}", f"Authorization: Bearer {KEY}")
        (call,) = calls_in(tmp_path)
    assert reply.blocks[:-1] == events
    lines = [line for line in call.reply.content.text.split("\n\n") if line.startswith("data: {")]
    said = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines]
    assert said == ["yes: ", "[key]", "", "", " is it"]
    assert call.reply.blocks == []


def test_a_key_in_an_encoded_reply_or_a_query_that_fails_is_taken_out_too(tmp_path, capfd):
    import gzip

    data = gzip.compress(f"the key {KEY}".encode())
    with (
        RawEndpoint(lambda _: json_reply(data, b"content-encoding: gzip")) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        request(url, "POST", CHAT, b"{}", f"x-api-key: {KEY}")
    with recording(tmp_path / "b", "http://127.0.0.1:9") as url:
        reply = request(url, "POST", f"{CHAT}?key={KEY}", b"{}")
    assert reply.status == 502
    (call,) = calls_in(tmp_path / "b")
    assert call.path == f"{CHAT}?key=[key]"
    assert b"very~secret" not in files_of(tmp_path) + reply.body
    assert "secret" not in capfd.readouterr().err
    assert calls_in(tmp_path)[0].reply.content.data == b"the key [key]"


def test_the_beginning_of_a_key_at_which_a_record_was_cut_is_left_out(tmp_path):
    body = b"a" * 65_530 + KEY.encode() * 4000
    with (
        RawEndpoint(lambda _: json_reply(b"{}")) as endpoint,
        recording(tmp_path, endpoint.url, most_kept=1 << 16) as url,
    ):
        request(url, "POST", CHAT, body, f"x-api-key: {KEY}")
        (call,) = calls_in(tmp_path)
    assert call.request.content.cut
    assert set(call.request.content.data) == {ord("a")}


def test_keys_of_the_environment_are_taken_out_as_well(tmp_path):
    with (
        RawEndpoint(lambda _: json_reply(b"an OTHER-secret-value")) as endpoint,
        recording(tmp_path, endpoint.url, secrets=["OTHER-secret-value"]) as url,
    ):
        request(url, "POST", CHAT, b"{}")
        (call,) = calls_in(tmp_path)
    assert call.reply.content.text == "an [key]"


def test_an_event_stream_broken_off_in_a_key_is_scrubbed_as_far_as_it_came(tmp_path):
    event = b"data: %b\n\n" % json.dumps({"a": KEY}).encode()
    with (
        RawEndpoint(
            lambda _: [STREAM_HEAD, chunk(event), chunk(event[:15]), CHUNK_END]
        ) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        request(url, "POST", CHAT, b"{}", f"x-api-key: {KEY}")
    assert KEY.encode() not in files_of(tmp_path)
