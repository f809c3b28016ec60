"""Keys go to the upstream, and into no file, log or error."""

import base64
import gzip
import json
import socket
import tracemalloc

import pytest

from fakes.raw_endpoint import CHUNK_END, STREAM_HEAD, chunk, json_reply, stream_reply
from fakes.recording import CHAT, RawClient, calls_in, exchange, recording, request
from stillroom.recording.headers import Headers, RequestHead
from stillroom.recording.request_keys import request_keys

KEY = "sk-proj-Abc/123+very~secret.key"
OPAQUE = "abc-1234567890-very-secret"
PLACES = [
    (f"Authorization: Bearer {KEY}", ""),
    (f"x-api-key: {KEY}", ""),
    (f"API-KEY: {KEY}", ""),
    (f"x-goog-api-key: {KEY}", ""),
    (f"Cookie: session={KEY}", ""),
    ("X-None: 1", f"?alt=sse&key={KEY}"),
    ("X-None: 1", "?api_key=sk-proj-Abc%2F123%2Bvery~secret.key&a=1"),
    ("X-None: 1", f"?sv=1&sig={KEY}"),
    ("X-None: 1", f"?X-Amz-Date=1&X-Amz-Signature={KEY}&b=2"),
    ("X-None: 1", f"?code={KEY}"),
    ("X-None: 1", f"?a=1;key={KEY};b=2"),
    (f"Authorization: AWS4-HMAC-SHA256 Credential=AK/1, SignedHeaders=host, Signature={KEY}", ""),
    (f"Authorization: Basic {base64.b64encode(f'me:{KEY}'.encode()).decode()}", ""),
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
    done = exchange(tmp_path, answer, body, header, path=CHAT + query)
    (sent,), reply, call = done.requests, done.reply, done.call
    assert header.encode() in sent.head
    assert sent.first_line == f"POST {CHAT + query} HTTP/1.1"
    assert reply.body in answer
    assert b"very~secret" not in files_of(tmp_path)
    assert b"no such key: [key]" in call.reply.content.data
    assert b"my key is [key]" in call.request.content.data
    assert dict(call.reply.headers)["x-seen"] == "[key]"
    printed = capfd.readouterr()
    assert "secret" not in printed.out + printed.err


BODIES = [
    {"api_key": KEY},
    {"extra_body": {"api_key": KEY}},
    {"tools": [{"type": "mcp", "server_url": "https://mcp.test", "authorization": KEY}]},
    {"tools": [{"type": "mcp", "headers": {"Authorization": f"Bearer {KEY}"}}]},
    {"tools": [{"type": "mcp", "headers": {"X-Api-Key": KEY}}]},
    {"tools": [{"type": "mcp", "server_url": f"https://mcp.test/sse?a=1&api_key={KEY}"}]},
    {"mcp_servers": [{"type": "url", "url": "https://m.test", "authorization_token": KEY}]},
    {"data_sources": [{"parameters": {"authentication": {"type": "api_key", "key": KEY}}}]},
    {"data_sources": [{"parameters": {"authentication": {"encoded_api_key": KEY}}}]},
    {"litellm_params": {"vertex_credentials": {"type": "service_account", "private_key": KEY}}},
    {"fallbacks": [{"model": "m", "aws_secret_access_key": KEY}]},
]
PARTS = [
    {"tools": [{"type": "mcp", "headers": {"X-Tenant": OPAQUE, "Accept": "application/json"}}]},
    {"tools": [{"container": {"network_policy": {"domain_secrets": [
        {"domain": "application/json", "name": "A_TOKEN", "value": OPAQUE}]}}}]},
    {"tools": [{"type": "connector", "authorization": {"type": "api-key", "value": OPAQUE}}]},
    {"tools": [{"retrieval": {"externalApi": {"apiAuth": {"apiKeyConfig": {
        "apiKeyString": OPAQUE}}}}}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", BODIES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_key_in_a_field_for_keys_is_passed_on_and_stored_nowhere(tmp_path, fields, is_whole):
    """Fields of the conversation with such a name are recorded."""
    said = {
        "role": "assistant",
        "content": [{"type": "tool_use", "input": {"password": "in-use-77"}}],
    }
    fields = {**fields, "messages": [said], "prompt_cache_key": "cache-of-7"}
    body = json.dumps(fields).encode()
    body = body if is_whole else body[:-1]
    answer = json_reply(json.dumps({"error": f"no such token: {KEY}"}).encode())
    done = exchange(tmp_path, answer, body)
    assert done.requests[0].body == body
    assert b"very~secret" not in files_of(tmp_path)
    request_text = done.call.request.content.text
    assert "cache-of-7" in request_text
    assert "in-use-77" in request_text
    assert done.call.reply.content.data == b'{"error": "no such token: [key]"}'


@pytest.mark.parametrize("fields", PARTS)
def test_a_key_is_found_by_what_its_field_belongs_to(tmp_path, fields):
    body = json.dumps({**fields, "user": "as application/json"}).encode()
    answer = json_reply(json.dumps({"error": f"no such token: {OPAQUE}"}).encode())
    call = exchange(tmp_path, answer, body).call
    assert b"very-secret" not in files_of(tmp_path)
    assert "as application/json" in call.request.content.text


def test_a_key_in_a_body_of_which_only_the_beginning_came_is_stored_nowhere(tmp_path):
    """The endpoint answers before the end of the request, and repeats the key in its stream."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        recording(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}") as url,
        RawClient(url) as client,
    ):
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {client.host}\r\nContent-Length: 9999\r\n\r\n"
        client.socket.sendall(head.encode() + b'{"api_key": "%b", "m' % KEY.encode())
        listener.settimeout(10)
        with listener.accept()[0] as upstream:
            upstream.recv(1 << 16)
            upstream.sendall(STREAM_HEAD + chunk(b"data: %b\n\n" % KEY.encode()) + CHUNK_END)
            assert KEY.encode() in client.read().body
    assert calls_in(tmp_path)[0].reply.content.data == b"data: [key]\n\n"
    assert b"very~secret" not in files_of(tmp_path)


def test_a_key_without_its_last_characters_is_taken_out_too(tmp_path):
    texts = [f"cut: {KEY[:-1]}", f"cut: {KEY[:-6]}…", f"short: {KEY[:9]}"]
    answer = json_reply(json.dumps(texts).encode())
    call = exchange(tmp_path, answer, b"{}", f"x-api-key: {KEY}").call
    assert json.loads(call.reply.content.data) == ["cut: [key]", "cut: [key]…", f"short: {KEY[:9]}"]


def test_a_signed_address_that_an_upstream_redirects_to_is_recorded_without_its_signature(tmp_path):
    target = b"location: https://files.test/a?X-Amz-Expires=9&X-Amz-Signature=0123456789abcdef"
    done = exchange(tmp_path, json_reply(b"", target, status=b"307 Elsewhere"))
    assert done.reply.headers["location"].endswith("0123456789abcdef")
    recorded = dict(done.call.reply.headers)["location"]
    assert recorded == "https://files.test/a?X-Amz-Expires=9&X-Amz-Signature=[key]"


@pytest.mark.parametrize("order", [("index", "delta"), ("delta", "index")])
@pytest.mark.parametrize("is_together", [False, True])
def test_keys_in_pieces_of_two_choices_are_taken_out_of_both(tmp_path, order, is_together):
    """With `n: 2` pieces of the choices come in turn, or in one event."""
    pieces = [KEY[i : i + 5] for i in range(0, len(KEY), 5)]
    choices = []
    for piece in pieces:
        for index in range(2):
            choice = {"index": index, "delta": {"content": piece}}
            choices.append({name: choice[name] for name in order})
    size = 2 if is_together else 1
    events = [
        b"data: %b\n\n" % json.dumps({"choices": choices[i : i + size]}).encode()
        for i in range(0, len(choices), size)
    ]
    script = stream_reply(*events, b"data: [DONE]\n\n")
    call = exchange(tmp_path, script, b"{}", f"Authorization: Bearer {KEY}").call
    said = {0: "", 1: ""}
    for line in call.reply.content.text.split("\n\n")[:-2]:
        for choice in json.loads(line[6:])["choices"]:
            said[choice["index"]] += choice["delta"]["content"]
    assert said == {0: "[key]", 1: "[key]"}


def test_a_key_that_a_stream_says_in_pieces_is_taken_out_of_all_of_them(tmp_path):
    pieces = [KEY[:3], KEY[3:9], KEY[9:-2], KEY[-2:] + " is it"]
    events = [
        b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()
        for text in ["yes: ", *pieces]
    ]
    script = stream_reply(*events, b"data: [DONE]\n\n")
    done = exchange(tmp_path, script, b"{}", f"Authorization: Bearer {KEY}")
    assert done.reply.blocks[:-1] == events
    call = done.call
    lines = [line for line in call.reply.content.text.split("\n\n") if line.startswith("data: {")]
    said = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines]
    assert said == ["yes: ", "[key]", "", "", " is it"]
    assert call.reply.blocks == []


def test_a_key_in_an_encoded_reply_is_taken_out_too(tmp_path):
    answer = json_reply(gzip.compress(f"the key {KEY}".encode()), b"content-encoding: gzip")
    call = exchange(tmp_path, answer, b"{}", f"x-api-key: {KEY}").call
    assert call.reply.content.data == b"the key [key]"


def test_a_key_in_the_query_of_a_request_that_fails_is_taken_out_too(tmp_path, capfd):
    with recording(tmp_path, "http://127.0.0.1:9") as url:
        reply = request(url, "POST", f"{CHAT}?key={KEY}", b"{}")
    assert reply.status == 502
    (call,) = calls_in(tmp_path)
    assert call.path == f"{CHAT}?key=[key]"
    assert b"very~secret" not in files_of(tmp_path) + reply.body
    assert "secret" not in capfd.readouterr().err


def test_the_beginning_of_a_key_at_which_a_record_was_cut_is_left_out(tmp_path):
    body = b"a" * 65_530 + KEY.encode() * 4000
    headers = [f"x-api-key: {KEY}"]
    call = exchange(tmp_path, json_reply(b"{}"), body, *headers, max_recorded_bytes=1 << 16).call
    assert call.request.content.cut
    assert set(call.request.content.data) == {ord("a")}


def test_keys_of_the_environment_are_taken_out_as_well(tmp_path):
    answer = json_reply(b"an OTHER-secret-value")
    call = exchange(tmp_path, answer, secrets=["OTHER-secret-value"]).call
    assert call.reply.content.text == "an [key]"


def test_of_a_call_with_thousands_of_keys_no_text_is_recorded(tmp_path):
    tools = [{"type": "mcp", "authorization": f"a-key-of-{n}-tools"} for n in range(2000)]
    body = json.dumps({"messages": [], "tools": tools}).encode()
    done = exchange(tmp_path, json_reply(b'{"a": "a-key-of-7-tools"}'), body)
    assert done.reply.body == b'{"a": "a-key-of-7-tools"}'
    assert (done.call.end, done.call.request.content.data) == ("whole", b"[key]")
    assert done.call.reply.content.data == b"[key]"


def test_keys_of_a_long_body_that_is_not_whole_are_found_in_little_memory():
    head = RequestHead("POST", CHAT, Headers())
    body = b'{"api_key": "a-key-in-a-body", "messages": "' + b"long " * (1 << 20)
    tracemalloc.start()
    keys = request_keys(head, body)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "a-key-in-a-body" in keys
    assert most < 64 << 20
