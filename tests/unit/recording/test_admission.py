"""Who may call the proxy, and what it refuses."""

import pytest

from fakes.raw_endpoint import RawEndpoint, json_reply
from fakes.recording import CHAT, RawClient, calls_in, recording, request

TOKEN = "a-token-of-these-tests"


@pytest.fixture
def endpoint():
    with RawEndpoint(lambda _: json_reply(b"{}")) as found:
        yield found


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 200),
        (("Host: localhost:1",), 200),
        (("Host: 127.0.0.1",), 200),
        (("Host: gateway.example:99",), 200),
        (("Host: evil.example",), 403),
        (("Host: 127.0.0.2",), 403),
        (("Host: a", "Host: localhost"), 400),
        (("Origin: http://evil.example",), 403),
        (("Origin: null",), 403),
        (("Origin: http://localhost:3000", "Host: localhost:8788"), 403),
        (("Origin: http://localhost:8788", "Host: localhost:8788"), 200),
    ],
)
def test_only_those_who_name_the_proxy_and_are_no_other_page_are_let_in(
    tmp_path, endpoint, headers, status
):
    with recording(tmp_path, endpoint.url, hosts=["gateway.example"]) as url:
        assert request(url, "POST", CHAT, b"{}", *headers).status == status
    assert len(endpoint.requests) == (status == 200)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CHAT, (), 401),
        (CHAT, ("x-stillroom-token: wrong",), 401),
        (CHAT, (f"Authorization: Bearer {TOKEN}",), 401),
        (f"/token/wrong{CHAT}", (), 401),
        (f"/token/{TOKEN}", (), 200),
        (CHAT, (f"X-Stillroom-Token: {TOKEN}",), 200),
        (f"/token/{TOKEN}{CHAT}", (), 200),
        (f"/token/other{CHAT}", (f"X-Stillroom-Token: {TOKEN}",), 200),
    ],
)
def test_a_token_is_asked_for_and_goes_no_further(tmp_path, endpoint, path, headers, status):
    with recording(tmp_path, endpoint.url, token=TOKEN) as url:
        # A refusal is read by a client that is still sending, too.
        reply = request(url, "POST", path, b"{}" if status == 200 else bytes(3 << 20), *headers)
        calls = calls_in(tmp_path)
    assert reply.status == status
    for sent in endpoint.requests:
        assert TOKEN.encode() not in sent.head
        assert sent.first_line in (f"POST {CHAT} HTTP/1.1", "POST / HTTP/1.1")
    assert all(TOKEN not in str(call) for call in calls)


HOST = b"Host: localhost\r\n"
UPGRADE = b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n"
TWO_LENGTHS = b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"GET http://example.com/ HTTP/1.1\r\n" + HOST + b"\r\n", 400, b"is an absolute URL"),
        (b"CONNECT a:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400, b"is an absolute URL"),
        (b"nonsense\r\n\r\n", 400, b"Invalid method"),
        (b"GET / HTTP/1.1\r\n" + HOST + UPGRADE, 501, b"WebSockets"),
        (b"POST / HTTP/1.1\r\n" + HOST + TWO_LENGTHS, 400, b"can't be present with"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000, 400, b"more than 262144 bytes"),
    ],
)
def test_what_is_no_plain_request_is_refused(tmp_path, endpoint, sent, status, said):
    with recording(tmp_path, endpoint.url) as url, RawClient(url) as client:
        client.socket.sendall(sent)
        reply = client.read()
    assert reply.status == status
    assert said in reply.body
    assert endpoint.requests == []


def test_requests_that_are_sent_ahead_are_answered_in_their_order(tmp_path, endpoint):
    def one(body: str) -> bytes:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        return f"{head}\r\n\r\n{body}".encode()

    with recording(tmp_path, endpoint.url) as url, RawClient(url) as client:
        client.socket.sendall(one("{}") + one("[1]"))
        assert [client.read().status for _ in range(2)] == [200, 200]
    assert [sent.body for sent in endpoint.requests] == [b"{}", b"[1]"]
