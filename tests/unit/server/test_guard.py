"""Which HTTP requests reach an application, and where the token that lets them stands."""

import stat
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from stillroom.errors import InputError
from stillroom.secrecy.readable import check_readable
from stillroom_mcp.http.guard import Guard
from stillroom_mcp.http.listening import default_token_file, server_token

TOKEN = "a-token-that-nobody-guesses"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def answer_to(
    headers: dict[str, str] | list[tuple[str, str]],
    *,
    url: str = "http://127.0.0.1:8765/runs",
    listening_at: str = "127.0.0.1",
    method: str = "GET",
    **options: Any,
) -> httpx.Response:
    """Returns what a guarded application answers to one request."""
    guard = Guard(PlainTextResponse("come in"), **{"token": TOKEN, **options})

    async def at_that_address(scope: Any, receive: Any, send: Any) -> None:
        await guard({**scope, "server": (listening_at, 8765)}, receive, send)

    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app=at_that_address)
        async with httpx.AsyncClient(transport=transport) as client:
            encoded = httpx.Headers(headers, encoding="utf-8")
            return await client.request(method, url, headers=encoded)

    return anyio.run(scenario)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_request_that_shows_the_token_is_let_through(scheme: str) -> None:
    assert answer_to({"authorization": f"{scheme} {TOKEN}"}).text == "come in"


@pytest.mark.parametrize(
    "shown",
    ["", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer x", f"Bearer {TOKEN}x", "Bearer \u00fc"],
)
def test_another_token_or_none_is_refused_with_what_to_do(shown: str) -> None:
    refused = answer_to([("authorization", shown)] if shown else {})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "\nfix: send the header `Authorization: Bearer TOKEN`" in refused.text
    assert TOKEN not in refused.text


@pytest.mark.parametrize(
    ("host", "listening_at"),
    [
        ("127.0.0.1:8765", "127.0.0.1"),
        ("localhost:8765", "127.0.0.1"),
        ("LOCALHOST", "127.0.0.1"),
        ("localhost:9000", "::1"),  # through a tunnel
        ("[::1]:8765", "::1"),
        ("192.0.2.7:8765", "192.0.2.7"),
        ("127.0.0.1:8765", "::ffff:127.0.0.1"),
        ("gpu-box.org:8765", "192.0.2.7"),
    ],
)
def test_its_own_address_and_names_are_hosts(host: str, listening_at: str) -> None:
    found = answer_to({**BEARER, "host": host}, listening_at=listening_at, hosts=["GPU-box.org"])
    assert found.status_code == 200


@pytest.mark.parametrize(
    ("host", "listening_at"),
    [
        ("evil.example", "127.0.0.1"),
        ("evil.example:8765", "127.0.0.1"),
        ("localhost.evil.example:8765", "127.0.0.1"),
        ("127.0.0.1.evil.example", "127.0.0.1"),
        ("127.0.0.1@evil.example", "127.0.0.1"),
        ("localhost:8765", "192.0.2.7"),
        ("192.0.2.8", "192.0.2.7"),
        ("[::1", "::1"),
        ("", "127.0.0.1"),
    ],
)
def test_a_foreign_host_is_refused_even_with_the_token(host: str, listening_at: str) -> None:
    refused = answer_to({**BEARER, "host": host}, listening_at=listening_at)
    assert refused.status_code == 403
    assert "fix: use the address that the server printed" in refused.text


def test_two_hosts_are_refused() -> None:
    hosts = [("host", "127.0.0.1:8765"), ("host", "evil.example")]
    assert answer_to([*BEARER.items(), *hosts]).status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3000", "http://127.0.0.1", "null", "file://", ""],
)
def test_pages_of_others_are_refused_even_with_the_token(origin: str) -> None:
    refused = answer_to({**BEARER, "origin": origin})
    assert refused.status_code == 403
    assert "open the page at this server's own address" in refused.text


def test_a_page_of_this_server_may_call_it() -> None:
    assert answer_to({**BEARER, "origin": "http://127.0.0.1:8765"}).status_code == 200


def test_without_a_token_the_host_and_the_origin_are_looked_at_all_the_same() -> None:
    assert answer_to({}, token=None).status_code == 200
    assert answer_to({"host": "evil.example"}, token=None).status_code == 403
    assert answer_to({"origin": "http://evil.example"}, token=None).status_code == 403


def test_a_page_opened_with_the_token_goes_on_with_a_cookie_that_is_not_the_token() -> None:
    url = f"http://127.0.0.1:8765/runs?token={TOKEN}&page=2"
    entered = answer_to({}, url=url, is_for_browsers=True)
    assert entered.status_code == 200
    assert 'content="0;url=/runs?page=2"' in entered.text
    assert TOKEN not in entered.text
    cookie = entered.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    shown = {"cookie": cookie.partition(";")[0]}
    assert answer_to(shown, is_for_browsers=True).status_code == 200
    # It opens pages, and calls no tools.
    assert answer_to(shown).status_code == 401
    with_origin = shown | {"origin": "http://localhost:3000"}
    assert answer_to(with_origin, is_for_browsers=True).status_code == 403


@pytest.mark.parametrize("cookie", ["", "stillroom-8765", "stillroom-8765=x", "=;;", "a=\x01"])
def test_a_cookie_of_another_value_is_refused(cookie: str) -> None:
    assert answer_to({"cookie": cookie}, is_for_browsers=True).status_code == 401


def test_the_token_in_an_address_is_for_opening_pages_only() -> None:
    url = f"http://127.0.0.1:8765/mcp?token={TOKEN}"
    assert answer_to({}, url=url).status_code == 401
    assert answer_to({}, url=url, method="POST", is_for_browsers=True).status_code == 401
    wrong = "http://127.0.0.1:8765/?token=wrong"
    assert answer_to({}, url=wrong, is_for_browsers=True).status_code == 401


def test_the_entrance_leads_to_no_other_server() -> None:
    url = f"http://127.0.0.1:8765//evil.example/x?token={TOKEN}"
    led_on = answer_to({}, url=url, is_for_browsers=True)
    assert 'url=/evil.example/x"' in led_on.text


def test_the_entrance_is_no_way_to_write_on_its_page() -> None:
    url = f"http://127.0.0.1:8765/%22%3E%3Cscript%3E?token={TOKEN}&a=%22%3E%3Cscript%3E"
    led_on = answer_to({}, url=url, is_for_browsers=True)
    assert "<script" not in led_on.text


def test_a_web_socket_is_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def scenario() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("nothing is read from it")

        await Guard(PlainTextResponse("in"), token=TOKEN)({"type": "websocket"}, receive, send)

    anyio.run(scenario)
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.fixture
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("STILLROOM_TOKEN", raising=False)
    return tmp_path / "state" / "stillroom"


def test_a_token_is_made_once_for_this_user_alone(state_folder: Path) -> None:
    made, again = server_token(None), server_token(None)
    assert made == again
    assert made.is_generated
    assert len(made.value) >= 40
    assert made.source == str(default_token_file())
    assert stat.S_IMODE(default_token_file().stat().st_mode) == 0o600
    assert [path.name for path in state_folder.iterdir()] == ["token"]
    assert made.value not in repr(made)
    with pytest.raises(
        InputError, match="cannot be read: files with this name usually contain keys"
    ):
        check_readable(default_token_file())


def test_a_given_token_is_taken_from_the_file_or_else_the_variable(
    state_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine"
    file.write_text(f"{TOKEN}\n", encoding="utf-8")
    file.chmod(0o600)
    monkeypatch.setenv("STILLROOM_TOKEN", "another-token-of-the-user")
    assert server_token(str(file)).value == TOKEN
    assert server_token(None).value == "another-token-of-the-user"
    assert not server_token(None).is_generated
    assert not state_folder.exists()


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text(TOKEN, encoding="utf-8")
    file.chmod(0o640)
    with pytest.raises(
        InputError, match=r"other users may read .* \(mode 0640\)\nfix: run `chmod 600"
    ):
        server_token(str(file))


@pytest.mark.parametrize("text", ["", "short", "has blanks in the middle of it", "ü" * 20])
def test_a_token_that_could_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(InputError, match="is not valid: it must have at least 16 printable ASCII"):
        server_token(str(file))


def test_a_token_file_that_is_not_there_is_refused_with_the_command_that_writes_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        InputError, match=r"does not exist\nfix: create it with `.umask 077; openssl"
    ):
        server_token(str(tmp_path / "none"))
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(InputError, match="cannot be read"):
        server_token(str(tmp_path / "folder"))


def test_a_client_that_leaves_while_its_request_is_read_is_no_fault_of_the_server() -> None:
    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        raise AssertionError("the request is whole")

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def sends(message: Any) -> None:
        raise AssertionError("nobody waits for an answer")

    host = [(b"host", b"127.0.0.1:8765"), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "query_string": b"",
             "headers": host, "server": ("127.0.0.1", 8765)}  # fmt: skip
    anyio.run(Guard(reads, token=TOKEN), scope, leaves, sends)
