"""Secrets in the command lines and URLs of MCP servers are hidden, and put back for the start."""

import pytest

from stillroom.errors import InputError
from stillroom.secrecy.commands import (
    hide_secrets,
    redactor_for_commands,
    restore_secrets,
    without_secrets,
)

HIDDEN = [
    ("npx shop-mcp --token hunter2", "hunter2"),
    ("npx shop-mcp --api-key=hunter2 --port 80", "hunter2"),
    ("npx shop-mcp --password 'my hunter2'", "my"),
    ("env SHOP_KEY=hunter2 npx shop-mcp", "hunter2"),
    ("env DATABASE_URL=postgres://u:hunter2@db/x npx shop-mcp", "hunter2"),
    ("docker run -e API_TOKEN=hunter2 image", "hunter2"),
    ("npx remote https://x.test/mcp --header 'Authorization: Bearer hunter2'", "hunter2"),
    ('npx remote https://x.test/mcp --header "X-Api-Key:hunter2"', "hunter2"),
    ("""npx shop --config '{"api_key": "hunter2"}'""", "hunter2"),
    ("https://user:hunter2@x.test/mcp", "hunter2"),
    ("https://x.test/mcp?key=hunter2&profile=a", "hunter2"),
    ("https://x.test/mcp/s/aB3dE5fG7hJ9kL1mN3pQ5/sse", "aB3dE5fG7hJ9kL1mN3pQ5"),
    ("npx shop-mcp sk-proj-abc123def456ghi789", "sk-proj-abc123def456ghi789"),
    ("npx shop-mcp ghp_abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnopqrstuvwx"),
    ("npx shop-mcp 5f2d81c05f2d81c05f2d81c0", "5f2d81c05f2d81c05f2d81c0"),
]


@pytest.mark.parametrize(("command", "secret"), HIDDEN)
def test_a_secret_is_hidden_and_put_back(command: str, secret: str):
    shown, secrets = hide_secrets(command)
    assert secret not in shown
    assert restore_secrets(shown, secrets) == command
    # A hidden command stays as it is, so that a resumed run is known for the same.
    assert hide_secrets(shown) == (shown, {})
    assert without_secrets(command.replace(secret, "another1another2ABC")) != shown


@pytest.mark.parametrize(
    "command",
    [
        "npx @playwright/mcp@latest --headless --port {port}",
        "uvx mcp-server-time --local-timezone Europe/Berlin",
        "python tools/server.py --data data/rows.jsonl --max-tokens 100",
        "npx -y @modelcontextprotocol/server-filesystem /home/me/some-long-project-name",
        "http://localhost:8931/mcp",
        "npx shop-mcp --token $SHOP_TOKEN",
    ],
)
def test_a_command_without_secrets_is_left_as_it_is(command: str):
    assert hide_secrets(command) == (command, {})


def test_a_value_of_a_secret_variable_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("SHOP_PASSWORD", "correct horse")
    assert "correct horse" not in without_secrets("shop-mcp 'correct horse'")


def test_a_secret_that_is_not_known_is_asked_for():
    shown, _ = hide_secrets("npx shop-mcp --token hunter2")
    with pytest.raises(InputError, match="no secret is stored for the placeholder"):
        restore_secrets(shown, {})


def test_what_a_server_repeats_of_its_secrets_is_taken_out():
    redactor = redactor_for_commands(["npx shop-mcp --token hunter22"])
    assert redactor.redact_text("bad token hunter22") == "bad token [key]"
