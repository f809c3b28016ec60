"""How an MCP server is named."""

import pytest

from stillroom.tools.mcp.spec import is_local_port, parse_spec


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8931", "http://localhost:8931/mcp"),
        (" 127.0.0.1:8931/sse ", "http://127.0.0.1:8931/sse"),
        ("[::1]:80", "http://[::1]:80/mcp"),
        ("tools.example.com:443/a/b", "http://tools.example.com:443/a/b"),
        ("http://localhost:8931", "http://localhost:8931"),
    ],
)
def test_a_host_with_its_port_is_a_url(given: str, url: str) -> None:
    assert parse_spec(given).url == url


@pytest.mark.parametrize(
    "given", ["npx @playwright/mcp@latest", "server --port 8931", "localhost", "run a:1", "./a:1"]
)
def test_a_command_line_stays_one(given: str) -> None:
    assert parse_spec(given).url == ""


def test_only_a_bare_port_of_this_machine_may_be_that_of_a_container() -> None:
    assert is_local_port("localhost:8931", 8931)
    assert not is_local_port("http://localhost:8931/mcp", 8931)
    assert not is_local_port("localhost:8932", 8931)
    assert not is_local_port("tools.example.com:8931", 8931)
