"""Connections to upstreams: TLS, and the proxy that the environment names."""

import socket
import socketserver
import ssl
import subprocess
import threading
from base64 import b64encode
from contextlib import suppress

import pytest

from fakes.raw_endpoint import RawEndpoint, stream_reply
from fakes.recording import CHAT, RawClient, calls_in, recording, request


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of its own for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*command.split(), *names, "-out", str(files[0]), "-keyout", str(files[1])],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    return files


@pytest.fixture
def secure(certificate):
    """An endpoint with this certificate, and its address by its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    events = (b"data: 1\n\n", b"data: [DONE]\n\n")
    with RawEndpoint(lambda _: stream_reply(*events), tls=context) as endpoint:
        yield endpoint, endpoint.url.replace("http://127.0.0.1", "https://localhost")


class Tunnel(socketserver.ThreadingTCPServer):
    """A proxy on the loopback that opens tunnels, and keeps the heads of the requests for them."""

    daemon_threads = True

    def __init__(self, answer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), TunnelOpener)
        self.answer, self.heads = answer, list[bytes]()
        self.url = f"http://me:pa%20ss@127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.socket.close()


class TunnelOpener(socketserver.StreamRequestHandler):
    timeout = 60

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.read(1)
        self.server.heads.append(head)
        self.request.sendall(self.server.answer)
        if b" 200 " in self.server.answer:
            host, _, port = head.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as upstream:
                back = threading.Thread(target=_copy, args=(upstream, self.request), daemon=True)
                back.start()
                _copy(self.request, upstream)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def no_proxies(monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


STREAM = b"data: 1\n\ndata: [DONE]\n\n"


def test_calls_go_over_tls_to_a_host_that_the_system_trusts(
    tmp_path, no_proxies, certificate, secure
):
    no_proxies.setenv("SSL_CERT_FILE", str(certificate[0]))
    endpoint, upstream = secure
    with recording(tmp_path, upstream) as url, RawClient(url) as client:
        for _ in range(2):
            client.send("POST", CHAT, b"{}")
            assert client.read().body == STREAM
    assert endpoint.num_connections == 1
    assert [call.upstream for call in calls_in(tmp_path)] == [upstream] * 2


def test_a_host_that_cannot_prove_its_name_gets_no_request(tmp_path, no_proxies, secure):
    endpoint, upstream = secure
    with recording(tmp_path, upstream) as url:
        reply = request(url, "POST", CHAT, b"{}", "Authorization: Bearer sk-a-secret-key")
    assert endpoint.requests == []
    assert reply.status == 502
    assert b"certificate verify failed" in reply.body.lower()


def test_the_proxy_of_the_environment_opens_a_tunnel(tmp_path, no_proxies, certificate, secure):
    no_proxies.setenv("SSL_CERT_FILE", str(certificate[0]))
    _, upstream = secure
    with Tunnel(b"HTTP/1.1 200 Connected\r\n\r\n") as tunnel:
        no_proxies.setenv("HTTPS_PROXY", tunnel.url)
        with recording(tmp_path, upstream) as url:
            reply = request(url, "POST", CHAT, b"{}", "Authorization: Bearer sk-a-secret-key")
    assert reply.body == STREAM
    (head,) = tunnel.heads
    assert head.startswith(b"CONNECT localhost:")
    assert b"Proxy-Authorization: Basic " + b64encode(b"me:pa ss") in head
    assert b"secret" not in head


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 407 Who are you\r\n\r\n", b"HTTPS_PROXY refused the connection: Who"),
        (b"what\r\n\r\n", b"not HTTP/1.1"),
    ],
)
def test_a_proxy_that_refuses_is_named_in_the_error(tmp_path, no_proxies, answer, problem):
    with Tunnel(answer) as tunnel, recording(tmp_path, "https://localhost:1") as url:
        no_proxies.setenv("HTTPS_PROXY", tunnel.url)
        reply = request(url, "POST", CHAT, b"{}")
    assert reply.status == 502
    assert problem in reply.body
    assert b"pa" + b"%20ss" not in reply.body
