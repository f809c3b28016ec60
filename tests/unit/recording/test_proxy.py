"""What goes through the recording proxy, and what is recorded of it."""

import gzip
import json
import random
import socket
import struct
import threading
import tracemalloc
import zlib
from contextlib import suppress
from itertools import count

import brotli
import pytest
from backports import zstd

from fakes.raw_endpoint import CHUNK_END, STREAM_HEAD, RawEndpoint, chunk, json_reply, stream_reply
from fakes.recording import (
    CHAT,
    RawClient,
    calls_in,
    exchange,
    recording,
    request,
    wait_until,
)
from stillroom.recording import encodings
from stillroom.recording.records import call_kind

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hé"}]}).encode()
REPLY = b'{"choices":[{"message":{"role":"assistant","content":"yes"}}]}'
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":"He"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"llo"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)


def test_a_call_passes_through_unchanged_and_is_recorded(tmp_path):
    answer = json_reply(REPLY, b"x-request-id: r1")
    done = exchange(tmp_path, answer, BODY, "X-App: 1", "Content-Type: application/json")

    assert (done.reply.status, done.reply.body) == (200, REPLY)
    assert done.reply.headers["x-request-id"] == "r1"
    (sent,), call = done.requests, done.call
    assert (sent.first_line, sent.body) == (f"POST {CHAT} HTTP/1.1", BODY)
    assert (sent.headers["x-app"], sent.headers["host"]) == ("1", call.upstream[7:])
    assert (call.kind, call.end, call.path) == ("chat", "whole", CHAT)
    assert (call.request.content.data, call.reply.content.data) == (BODY, REPLY)
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


def test_what_follows_the_head_at_once_or_in_chunks_reaches_the_upstream(tmp_path):
    with (
        RawEndpoint(lambda r: json_reply(r.body)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        client.socket.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: {client.host}\r\nTransfer-Encoding: chunked\r\n\r\n"
            "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n".encode()
        )
        assert client.read().body == b"abcde"
        assert endpoint.requests[0].headers["transfer-encoding"] == "chunked"
        big = random.Random(1).randbytes(3 << 20)
        client.send("POST", CHAT, big)
        assert client.read().body == big
        client.send("POST", "/v1/files", big)
        assert client.read().body == big


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("br", brotli.compress),
        ("zstd", zstd.compress),
        ("gzip, br", lambda data: brotli.compress(gzip.compress(data))),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_encoded_reply_passes_as_it_is_and_is_recorded_in_plain(
    tmp_path, name, encode, is_stream
):
    plain = b"".join(EVENTS) if is_stream else REPLY * 50
    data = encode(plain)
    head = f"content-encoding: {name}".encode()

    def script(_):
        if not is_stream:
            return json_reply(data, head)
        start = STREAM_HEAD.replace(b"x-request-id: req_1", head)
        pieces = [chunk(data[i : i + 7]) for i in range(0, len(data), 7)]
        return [start, *pieces, CHUNK_END]

    done = exchange(tmp_path, script, BODY, "Accept-Encoding: gzip, deflate, br, zstd")

    assert (done.reply.body, done.reply.headers["content-encoding"]) == (data, name)
    assert done.requests[0].headers["accept-encoding"] == "gzip, deflate, br, zstd"
    assert done.call.reply.content.data == plain
    assert "content-encoding" not in dict(done.call.reply.headers)


def test_an_encoding_whose_library_is_missing_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.delitem(encodings._DECOMPRESSORS, "br")
    with (
        RawEndpoint(lambda _: json_reply(b"{}")) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        for accepted in ("gzip;q=1, br, zstd", "br", "*"):
            request(url, "POST", CHAT, BODY, f"Accept-Encoding: {accepted}")
        request(url, "GET", "/v1/models", b"", "Accept-Encoding: br")
    accepted = [sent.headers["accept-encoding"] for sent in endpoint.requests]
    assert accepted == ["gzip;q=1, zstd", "identity", "identity", "br"]


def test_a_reply_in_an_unknown_encoding_is_marked_and_holds_nothing(tmp_path):
    answer = json_reply(b"?", b"content-encoding: rot13")
    done = exchange(tmp_path, answer, BODY, "Accept-Encoding: gzip, rot13")
    assert (done.reply.body, done.call.reply.content.data) == (b"?", b"")
    assert "rot13" in done.call.reply.content.cut
    assert done.requests[0].headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("status", "header"),
    [
        (b"429 Too Many Requests", b"retry-after: 7"),
        (b"500 Oh no", b"x-a: 1"),
        (b"307 Temporary Redirect", b"location: http://example.com/"),
        (b"401 Unauthorized", b"www-authenticate: Bearer"),
    ],
)
def test_errors_and_redirects_pass_with_their_headers(tmp_path, status, header):
    body = b'\xff\xfe{"error":'
    done = exchange(tmp_path, json_reply(body, header, status=status), BODY)
    assert done.reply.head.startswith(b"HTTP/1.1 " + status)
    assert done.reply.body == done.call.reply.content.data == body
    name, _, value = header.decode().partition(": ")
    assert done.reply.headers[name] == value == dict(done.call.reply.headers)[name]
    assert len(done.requests) == 1


def test_other_requests_pass_through_and_are_not_recorded(tmp_path):
    replies = {
        "GET": json_reply(b'{"data":[]}'),
        "HEAD": b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n",
        "DELETE": b"HTTP/1.1 204 No Content\r\n\r\n",
        "OPTIONS": b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n",
    }

    def script(sent):
        return replies[sent.first_line.split()[0]]

    with (
        RawEndpoint(script) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        for method, reply in replies.items():
            client.send(method, "/v1/models?a=%20b&c")
            got = client.read(has_body=method == "GET")
            assert got.head.split(b"\r\n")[0] == reply.split(b"\r\n")[0]
        assert endpoint.requests[-1].first_line == "OPTIONS /v1/models?a=%20b&c HTTP/1.1"
        assert calls_in(tmp_path) == []


def test_headers_of_one_connection_and_those_for_the_proxy_go_no_further(tmp_path):
    hops = (b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"Keep-Alive: 5")
    answer = json_reply(REPLY, *hops, b"X-Empty:", b"X-On: 1")
    done = exchange(
        tmp_path, answer, BODY, "Connection: keep-alive, X-Own", "X-Own: 1", "TE: trailers",
        "X-Stillroom-Session: chat-7", "Proxy-Authorization: Basic abcdefghi", "X-Two: 1",
        "X-Two: 2", "X-Empty:", f"X-Last: {'é'.encode().decode('latin-1')}",
    )  # fmt: skip
    (sent,), reply = done.requests, done.reply
    assert sent.headers.keys() == {"host", "x-two", "x-empty", "x-last", "content-length"}
    assert sent.head.count(b"X-Two") == 2
    assert (sent.headers["x-empty"], sent.headers["x-last"]) == ("", "é".encode().decode("latin-1"))
    assert reply.headers["x-on"] == "1"
    assert reply.headers.keys().isdisjoint({"x-hop", "keep-alive"})
    assert done.call.session == "chat-7"


JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"


@pytest.mark.parametrize(
    ("script", "body", "is_whole", "end"),
    [
        ([STREAM_HEAD, chunk(EVENTS[0]), 0.01, None], EVENTS[0], False, "upstream_left"),
        # A body without a length ends with its connection.
        ([JSON_HEAD, REPLY, None], REPLY, True, "whole"),
    ],
)
def test_a_closed_connection_ends_or_breaks_off_a_reply(tmp_path, script, body, is_whole, end):
    done = exchange(tmp_path, script, BODY)
    assert (done.reply.is_whole, done.call.end) == (is_whole, end)
    assert done.reply.body == done.call.reply.content.data == body


def test_a_reset_is_no_end_of_a_body_without_a_length(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        recording(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}") as url,
        RawClient(url) as client,
    ):
        client.send("POST", CHAT, BODY)
        listener.settimeout(10)
        with listener.accept()[0] as upstream:
            upstream.recv(1 << 16)
            upstream.sendall(JSON_HEAD + REPLY)
            assert client.read_head()
            upstream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: calls_in(tmp_path))
        (call,) = calls_in(tmp_path)
    assert (call.end, call.reply.content.data) == ("upstream_left", REPLY)


def test_a_client_that_leaves_breaks_the_call_off_at_the_upstream_too(tmp_path):
    more = [step for _ in range(400) for step in (chunk(EVENTS[1]), 0.01)]
    with (
        RawEndpoint(lambda _: [STREAM_HEAD + chunk(EVENTS[0]), *more]) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        with RawClient(url) as client:
            client.send("POST", CHAT, BODY)
            client.read_head()
        assert endpoint.hung_up.wait(10)
        wait_until(lambda: calls_in(tmp_path))
        (call,) = calls_in(tmp_path)
    assert call.end == "client_left"
    assert call.reply.content.data.startswith(EVENTS[0])


def test_calls_that_are_open_when_the_proxy_stops_are_recorded_as_that(tmp_path):
    ended = threading.Event()

    def script(_):
        yield STREAM_HEAD + chunk(EVENTS[0])
        ended.wait(10)

    with RawEndpoint(script) as endpoint:
        with recording(tmp_path, endpoint.url) as url:
            clients = [RawClient(url) for _ in range(2)]
            for client in clients:
                client.send("POST", CHAT, BODY)
                assert client.read_head()
        for client in clients:
            with client:
                assert not client.socket.recv(1 << 16).endswith(CHUNK_END)
        ended.set()
    recorded = [(call.end, call.reply.content.data) for call in calls_in(tmp_path)]
    assert recorded == [("proxy_stopped", EVENTS[0])] * 2


@pytest.mark.parametrize(
    ("second", "status", "num_sent"),
    [
        # It finds the connection closed, and is sent again on another one.
        ([None], 200, 3),
        # The upstream has worked on it.
        ([0.1, None], 502, 2),
    ],
)
def test_only_a_request_that_met_a_closed_connection_is_sent_again(
    tmp_path, monkeypatch, second, status, num_sent
):
    monkeypatch.setattr("stillroom.recording.upstream_client._CLOSED_WITHIN_S", 0.05)
    num = count(1)
    with (
        RawEndpoint(lambda _: second if next(num) == 2 else json_reply(REPLY)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        for wanted in (200, status):
            client.send("POST", CHAT, BODY)
            assert client.read().status == wanted
    assert [sent.body for sent in endpoint.requests] == [BODY] * num_sent
    assert len(calls_in(tmp_path)) == 2


def test_a_request_that_met_a_connection_which_was_reset_is_sent_again(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        recording(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}") as url,
        RawClient(url) as client,
    ):
        listener.settimeout(10)
        client.send("POST", CHAT, BODY)
        with listener.accept()[0] as first:
            assert BODY in first.recv(1 << 16)
            first.sendall(json_reply(REPLY))
            assert client.read().body == REPLY
            client.send("POST", CHAT, BODY)
            assert first.recv(1 << 16)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with listener.accept()[0] as second:
            assert BODY in second.recv(1 << 16)
            second.sendall(json_reply(REPLY))
            assert client.read().body == REPLY
    assert len(calls_in(tmp_path)) == 2


def test_a_request_that_is_refused_on_a_new_connection_is_not_repeated(tmp_path):
    done = exchange(tmp_path, [None], BODY)
    assert (done.reply.status, len(done.requests)) == (502, 1)
    assert "closed the connection" in json.loads(done.reply.body)["error"]["message"]
    assert (done.call.end, done.call.reply) == ("upstream_left", None)


def test_what_is_longer_than_the_limit_passes_whole_and_is_cut_in_the_record(tmp_path):
    body, answer = b"a" * 5000, b"b" * 70_000
    done = exchange(tmp_path, json_reply(answer), body, max_recorded_bytes=1 << 16)
    assert (done.reply.body, done.call.request.content.data) == (answer, body)
    assert answer.startswith(done.call.reply.content.data)
    assert "longer than 65536 bytes" in done.call.reply.content.cut


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "encode"),
    [("gzip", gzip.compress), ("br", brotli.compress), ("zstd", zstd.compress)],
)
def test_a_few_bytes_that_decode_to_very_many_do_not_fill_the_memory(tmp_path, name, encode):
    data = encode(bytes(40 << 20))
    tracemalloc.start()
    answer = json_reply(data, f"content-encoding: {name}".encode())
    done = exchange(tmp_path, answer, BODY, max_recorded_bytes=1 << 20)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.reply.body == data
    assert done.call.reply.content.cut
    assert most < 24 << 20


COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize("last", [EVENTS[-1], STOPPED, COMPLETED, COMPLETED.split(b"\n", 1)[1]])
def test_the_event_after_which_clients_read_no_more_comes_once_the_call_is_recorded(tmp_path, last):
    """The upstream keeps the stream open behind the event, which comes in two pieces."""
    events = [*EVENTS[:2], last]
    pieces = [*map(chunk, EVENTS[:2]), chunk(last[:3]), 0.005, chunk(last[3:])]
    ended = threading.Event()

    def script(_):
        yield from [STREAM_HEAD, *pieces]
        ended.wait(10)
        yield CHUNK_END

    with (
        RawEndpoint(script) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        client.send("POST", CHAT, BODY)
        data = b""
        while last[3:] not in data:
            data += client.socket.recv(1 << 16)
        (call,) = calls_in(tmp_path)
        assert call.end == "whole"
        assert call.reply.content.data == b"".join(events)
        ended.set()
        while CHUNK_END not in data:
            data += client.socket.recv(1 << 16)
        assert len(calls_in(tmp_path)) == 1


def test_a_text_that_mentions_the_last_event_does_not_end_the_call(tmp_path):
    text = b'data: {"choices":[{"delta":{"content":"say\\ndata: [DONE]\\n"}}]}\n\n'
    steps = [STREAM_HEAD, chunk(text[:-20]), chunk(text[-20:]), 0.05]
    steps += [*map(chunk, EVENTS[1:]), CHUNK_END]
    done = exchange(tmp_path, steps, BODY)
    assert done.reply.body == done.call.reply.content.data == text + b"".join(EVENTS[1:])


@pytest.mark.thorough
def test_slow_readers_hold_the_stream_back_instead_of_filling_the_memory(tmp_path):
    size = 64 << 20
    answer = json_reply(bytes(size))
    with (
        RawEndpoint(lambda _: answer) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        tracemalloc.start()
        client.send("GET", "/v1/files/f/content")
        client.read_head()
        threading.Event().wait(0.3)
        now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert now < 16 << 20
        assert len(client._stream.read(size)) == size


def test_of_several_upstreams_each_is_reached_by_its_name(tmp_path):
    with (
        RawEndpoint(lambda _: json_reply(b'"a"')) as first,
        RawEndpoint(lambda _: json_reply(b'"b"')) as second,
        recording(tmp_path, f"one={first.url}/v1", f"two={second.url}/api/v1") as url,
    ):
        assert request(url, "POST", "/one/v1/chat/completions", BODY).body == b'"a"'
        assert request(url, "POST", "/two/api/v1/messages?x=1", BODY).body == b'"b"'
        refused = request(url, "POST", CHAT, BODY)
        calls = calls_in(tmp_path)
    assert first.requests[0].first_line == f"POST {CHAT} HTTP/1.1"
    assert second.requests[0].first_line == "POST /api/v1/messages?x=1 HTTP/1.1"
    assert [call.upstream for call in calls] == [first.url, second.url]
    assert refused.status == 404
    assert b"/one, /two" in refused.body


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/openai/deployments/d/chat/completions?api-version=1", "chat"),
        ("POST", "/api/v1/responses/", "responses"),
        ("POST", "/v1/messages?beta=true", "messages"),
        ("GET", "/v1/responses", None),
        ("POST", "/v1/messages/count_tokens", None),
        ("POST", "/v1/messages/batches", None),
        ("POST", "/v1/threads/t1/messages", None),
        ("POST", "/v1/embeddings", None),
    ],
)
def test_which_requests_are_recorded(method, path, kind):
    assert call_kind(method, path) == kind


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"220 smtp.example ready\r\n\r\n", b"is not HTTP/1.1: Bad status line"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000, b"Got more than 262144 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"is not HTTP"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", b"is not HTTP"),
    ],
)
def test_an_upstream_that_speaks_no_http_is_named_in_the_error(tmp_path, sent, problem):
    done = exchange(tmp_path, [sent, 0.05], BODY)
    assert done.reply.status == 502
    assert problem in done.reply.body
    assert (done.call.end, done.call.reply) == ("upstream_left", None)


def test_heads_that_announce_another_and_bytes_behind_a_reply_go_no_further(tmp_path):
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    behind = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    with (
        RawEndpoint(lambda _: early + json_reply(REPLY) + behind) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        for _ in range(2):
            client.send("POST", CHAT, BODY, "Expect: 100-continue")
            assert client.read_head() == b"HTTP/1.1 100 Continue\r\n"
            reply = client.read()
            assert (reply.status, reply.body) == (200, REPLY)
            assert "link" not in reply.headers
    assert "expect" not in endpoint.requests[0].headers


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stream_that_turns_out_to_be_no_http_ends_for_the_client_and_is_recorded(
    tmp_path, at_once
):
    wrong = [STREAM_HEAD, chunk(EVENTS[0]), 0.02, b"zz\r\n", 0.02]
    done = exchange(tmp_path, [STREAM_HEAD + b"zz\r\n", 0.02] if at_once else wrong, BODY)
    assert not done.reply.is_whole
    assert (done.call.end, done.call.reply.status) == ("upstream_left", 200)


@pytest.mark.parametrize("rest", [b"zz\r\n", b"3\r\nabcd\r\n", b"0\r\n no header\r\n\r\n"])
def test_a_request_that_turns_out_to_be_no_http_is_ended(tmp_path, rest):
    with (
        RawEndpoint(lambda _: json_reply(REPLY)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {client.host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.socket.sendall(head.encode() + chunk(b"abc"))
        wait_until(lambda: endpoint.num_connections)
        client.socket.sendall(rest)
        assert client.socket.recv(1 << 16) == b""
        wait_until(lambda: calls_in(tmp_path))
        (call,) = calls_in(tmp_path)
        assert call.end == "client_left"
        assert request(url, "POST", CHAT, BODY).body == REPLY


def test_bytes_that_are_no_text_in_heads_are_written_otherwise_and_lose_no_call(tmp_path):
    answer = json_reply(REPLY, b"x-odd: a\x0eb", status=b"200 D\xe9j\xe0")
    done = exchange(tmp_path, answer, BODY)
    assert (done.reply.body, done.reply.headers["x-odd"]) == (REPLY, "a b")
    assert done.reply.head.split(b"\r\n")[0].decode() == "HTTP/1.1 200 Déjà"
    assert done.call.reply.reason == "Déjà"


def test_a_call_on_which_the_proxy_itself_fails_is_recorded(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("a fault of ours")

    monkeypatch.setattr("stillroom.recording.proxy._response", fail)
    with (
        RawEndpoint(lambda _: json_reply(REPLY)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        client.send("POST", CHAT, BODY)
        with suppress(ConnectionError):
            assert client.socket.recv(1 << 16) == b""
        wait_until(lambda: calls_in(tmp_path))
        (call,) = calls_in(tmp_path)
    assert (call.end, call.problem) == ("proxy_stopped", "unexpected ValueError")
    assert call.request.content.data == BODY


JUNK = b"\x00junk \r\n\r\n behind"
EMPTY = b"HTTP/1.1 204 No Content\r\nx-id: 1\r\n\r\n"
STREAM = STREAM_HEAD + b"".join(map(chunk, EVENTS)) + CHUNK_END


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        # The announced length is too small.
        (json_reply(REPLY).replace(b"%d" % len(REPLY), b"%d" % (len(REPLY) - 5)), REPLY[:-5]),
        (json_reply(REPLY) + JUNK, REPLY),
        (STREAM + JUNK, b"".join(EVENTS)),
        (EMPTY + b"a body", b""),
        (EMPTY + JUNK, b""),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_bytes_behind_the_end_of_a_reply_do_not_lose_it(tmp_path, sent, body, at_once):
    """They come in the same read as the reply, or later."""
    end = sent.index(b"\r\n\r\n") + 4
    script = [sent] if at_once else [sent[: end - 2], 0.01, sent[end - 2 :]]
    with (
        RawEndpoint(lambda _: script) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        for number in range(1, 3):
            client.send("POST", CHAT, BODY)
            reply = client.read(has_body=bool(body))
            assert (reply.status, reply.body, reply.is_whole) == (204 - 4 * bool(body), body, True)
            # A connection with stray bytes is not used again.
            assert endpoint.num_connections == number
        calls = calls_in(tmp_path)
    assert [(call.end, call.reply.content.data) for call in calls] == [("whole", body)] * 2


def test_a_content_after_head_is_not_read_as_the_next_reply(tmp_path):
    with (
        RawEndpoint(lambda _: json_reply(REPLY)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        client.send("HEAD", "/v1/models")
        assert client.read(has_body=False).status in (200, 502)
        client.send("GET", "/v1/models")
        assert client.read().body == REPLY


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(tmp_path):
    with (
        RawEndpoint(lambda _: stream_reply(*EVENTS)) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        head = f"POST {CHAT} HTTP/1.0\r\nHost: {client.host}\r\nContent-Length: 2\r\n\r\n{{}}"
        client.socket.sendall(head.encode())
        reply = client.read()
    assert reply.body == b"".join(EVENTS)
    assert "transfer-encoding" not in reply.headers
    assert endpoint.requests[0].first_line.endswith("HTTP/1.1")


def test_a_reply_before_the_end_of_its_request_reaches_the_client(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        recording(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}") as url,
        RawClient(url) as client,
    ):
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {client.host}\r\nContent-Length: 1000\r\n\r\n"
        client.socket.sendall(head.encode() + b"begin")
        listener.settimeout(10)
        with listener.accept()[0] as upstream:
            upstream.recv(1 << 16)
            upstream.sendall(json_reply(b"too large", status=b"413 Content Too Large"))
            assert client.read().body == b"too large"
        (call,) = calls_in(tmp_path)
    assert (call.reply.status, call.request.content.data) == (413, b"begin")
