"""Connections that never ask for anything whole are closed, and others are answered meanwhile."""

import socket

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from stillroom_mcp.http.listening import bound_socket, http_server

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
