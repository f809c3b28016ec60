"""The server over HTTP, at a real socket: who is let in, and answers that are those of stdio."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest

from fakes.http_server import TOKEN, ServedWorkspace, client_at, served
from stillroom.api import OPERATIONS
from stillroom.errors import EngineError, InputError
from stillroom_mcp.cli import main
from stillroom_mcp.http.listening import ServerToken, listening_socket

MADE = ServerToken(TOKEN, "a file", is_generated=True)
GIVEN = ServerToken(TOKEN, "a file", is_generated=False)
EVERYWHERE = "0.0.0.0"  # noqa: S104
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "0"},
    },
}
ACCEPT = {"accept": "application/json, text/event-stream"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedWorkspace]:
    root = tmp_path_factory.mktemp("served")
    with served(root) as found:
        yield found


def text_of(result: Any) -> str:
    return " ".join(block.text for block in result.content)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_clients_of_both_eras_get_the_tools_and_the_errors_of_stdio(
    server: ServedWorkspace, mode: str
) -> None:
    async def scenario() -> None:
        with anyio.fail_after(60):
            async with client_at(server.url, mode) as client:
                assert len((await client.list_tools()).tools) == len(OPERATIONS)
                assert not (await client.call_tool("list_runs", {})).is_error
                wrong = await client.call_tool("list_runs", {"sttus": "failed"})
                assert "did you mean 'status'?" in text_of(wrong)
                assert "\nfix: " in text_of(wrong)

    anyio.run(scenario)


def test_eight_clients_at_once_each_get_their_own_answers(server: ServedWorkspace) -> None:
    async def calls(number: int) -> None:
        async with client_at(server.url, "legacy" if number % 2 else "auto") as client:
            for count in range(3):
                name = f"run-{number}-{count}"
                answer = await client.call_tool("get_run", {"run_id": name})
                assert f"there is no run '{name}'" in text_of(answer)

    async def scenario() -> None:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(calls, number)

    anyio.run(scenario)


def post(server: ServedWorkspace, **headers: str) -> httpx.Response:
    return httpx.post(server.url, json=HELLO, headers={**ACCEPT, **headers}, timeout=60)


def test_nobody_is_let_in_without_the_token(server: ServedWorkspace) -> None:
    refused = post(server)
    assert refused.status_code == 401
    assert "file with the token" in refused.text
    assert post(server, authorization="Bearer wrong").status_code == 401
    assert post(server, authorization=f"Bearer {TOKEN}").status_code == 200


def test_a_foreign_host_or_origin_gets_403_with_the_token_too(server: ServedWorkspace) -> None:
    bearer = f"Bearer {TOKEN}"
    assert post(server, authorization=bearer, host="evil.example").status_code == 403
    assert post(server, authorization=bearer, origin="http://evil.example").status_code == 403
    own = server.url.removesuffix("/mcp")
    assert post(server, authorization=bearer, origin=own).status_code == 200


def test_the_token_is_in_no_command_line_no_first_line_and_no_answer(
    server: ServedWorkspace,
) -> None:
    assert TOKEN not in " ".join(psutil.Process(server.process.pid).cmdline())
    assert TOKEN not in server.first_lines
    row = {"messages": [{"role": "user", "content": f"it is {TOKEN}"}]}
    (server.root / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

    async def scenario() -> str:
        with anyio.fail_after(60):
            async with client_at(server.url) as client:
                return text_of(await client.call_tool("inspect_examples", {"path": "rows.jsonl"}))

    shown = anyio.run(scenario)
    assert "it is " in shown
    assert TOKEN not in shown


def test_it_stops_when_asked_though_a_client_listens(tmp_path: Path) -> None:
    token_file = tmp_path / "mine"
    token_file.write_text("a-token-in-a-file-of-the-user", encoding="utf-8")
    token_file.chmod(0o600)

    async def scenario(server: ServedWorkspace) -> None:
        with anyio.fail_after(60):
            # A client of the handshake era keeps a stream open for what the server has to say.
            async with client_at(server.url, "legacy", "a-token-in-a-file-of-the-user") as client:
                await client.list_tools()
                server.process.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(server.process.wait, 30) == -signal.SIGTERM

    with served(tmp_path, "--token-file", str(token_file)) as server:
        # The client of a server that has gone ends as it likes.
        with suppress(Exception):
            anyio.run(scenario, server)
        assert server.process.poll() == -signal.SIGTERM


@pytest.mark.parametrize("host", [EVERYWHERE, "::"])
def test_without_a_token_of_the_users_own_nothing_listens_beyond_this_machine(host: str) -> None:
    with pytest.raises(InputError, match=r"from other machines(.|\n)*--token-file TOKEN_FILE"):
        listening_socket(host, 0, MADE)


def test_with_a_token_of_the_users_own_it_listens_where_it_is_asked_to() -> None:
    with listening_socket(EVERYWHERE, 0, GIVEN) as listener:
        assert listener.getsockname()[0] == EVERYWHERE
    with listening_socket("localhost", 0, MADE) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_an_address_that_is_taken_or_none_is_refused_with_what_to_do() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(EngineError, match="choose another port with --port"),
    ):
        listening_socket("127.0.0.1", taken.getsockname()[1], MADE)
    with pytest.raises(InputError, match="is not an address of this machine"):
        listening_socket("no such host", 0, MADE)
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1"):
        listening_socket("192.0.2.1", 0, GIVEN)


def test_options_of_http_are_refused_for_a_server_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--port", "9000"])
    assert "--port is an option of the HTTP server" in capsys.readouterr().err


def test_a_client_that_leaves_before_its_request_is_whole_leaves_no_traceback(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as server:
        address = server.url.removeprefix("http://").removesuffix("/mcp")
        host, _, port = address.rpartition(":")
        head = f"POST /mcp HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert post(server, authorization=f"Bearer {TOKEN}").status_code == 200
        server.stop()
        assert server.process.stderr is not None
        assert "Disconnect" not in server.process.stderr.read()
