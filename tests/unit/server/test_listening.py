"""Connections with requests that stay incomplete, or are invalid, are closed; others are served."""

import socket
from contextlib import suppress

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from stillroom.errors import InputError
from stillroom_mcp.http.listening import (
    ServerToken,
    bound_socket,
    http_server,
    listening_socket,
)

CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
BEGUN = {"nothing": [], "half a head": [WHOLE[:20], b"x"], "half a body": [WHOLE, b"x"]}


async def app(scope, receive, send) -> None:
    if scope["type"] == "http":
        body = await Request(scope, receive).body()
        await PlainTextResponse(f"got {len(body)}")(scope, receive, send)
    else:
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})


@pytest.mark.thorough
@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_a_connection_without_a_whole_request_is_closed(begun: list[bytes]) -> None:
    async def scenario() -> None:
        listener = bound_socket(socket.AF_INET, ("127.0.0.1", 0))
        server = http_server(app, stop_s=1, request_s=0.5)
        port = listener.getsockname()[1]
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(server.serve, [listener])
                async with await anyio.connect_tcp("127.0.0.1", port) as slow:
                    # Later bytes of the same request give it no more time.
                    for piece in begun:
                        await slow.send(piece)
                    async with await anyio.connect_tcp("127.0.0.1", port) as quick:
                        await quick.send(WHOLE + b"ab")
                        assert b"200 OK" in await quick.receive(65536)
                    with pytest.raises(anyio.EndOfStream):
                        await slow.receive()
                server.should_exit = True

    anyio.run(scenario)


@pytest.mark.parametrize("is_answered_first", [False, True])
def test_an_invalid_body_of_a_request_that_is_being_answered_ends_the_connection(
    is_answered_first: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    last: list[str] = []

    async def answering(scope, receive, send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while not last:
            if (await receive())["type"] == "http.disconnect":
                last.append("disconnect")
        await send({"type": "http.response.body", "body": b"too late"})

    async def scenario() -> None:
        listener = bound_socket(socket.AF_INET, ("127.0.0.1", 0))
        server = http_server(answering, stop_s=1)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(server.serve, [listener])
                port, got = listener.getsockname()[1], b""
                async with await anyio.connect_tcp("127.0.0.1", port) as client:
                    await client.send(CHUNKED + (b"" if is_answered_first else b"no number\r\n"))
                    while is_answered_first and b"begun" not in got:
                        got += await client.receive(65536)
                    if is_answered_first:
                        await client.send(b"no number\r\n")
                    with suppress(anyio.EndOfStream):
                        while piece := await client.receive(65536):
                            got += piece
                assert (b"400 Bad Request" in got) is not is_answered_first
                assert b"too late" not in got
                server.should_exit = True

    anyio.run(scenario)
    assert last == ["disconnect"]
    assert "Traceback" not in capsys.readouterr().err
    assert not caplog.records


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    token = ServerToken("a" * 16, "$TOKEN", is_generated=True)
    with pytest.raises(InputError, match=f"there is no port {port}"):
        listening_socket("127.0.0.1", port, token)
