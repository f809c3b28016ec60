"""`stillroom setup` enters the server in each host's file, destroys nothing, and takes it back."""

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.source_tree import ROOT
from stillroom_mcp.cli import main
from stillroom_mcp.host_setup.config_text import json_with_entry, parse_json, toml_with_entry
from stillroom_mcp.host_setup.hosts import HOSTS, Host

EACH_HOST = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
OTHERS_JSON = """// what the user wrote
{
\t"theme": "dark", /* keep */
\t"SECTION": {
\t\t"files": { "command": "npx", "env": { "TOKEN": "abc-secret-xyz" }, }, // mine
\t},
}
"""
OTHERS_TOML = """# mine
model = "m" # keep
[mcp_servers.files]
command = "npx"
env = { TOKEN = "abc-secret-xyz" }

# about profiles
[profiles.a]
x = 1979-05-27
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "CODEX_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))


def setup(*arguments: str, project: Path) -> int:
    with pytest.raises(SystemExit) as ending:
        main(["setup", *arguments, "--workspace", str(project)])
    assert isinstance(ending.value.code, int)
    return ending.value.code


def others_of(host: Host) -> str:
    if host.syntax == "toml":
        return OTHERS_TOML
    return OTHERS_JSON.replace("SECTION", host.section[0])


def values_of(host: Host, text: str) -> dict[str, Any]:
    return tomllib.loads(text) if host.syntax == "toml" else parse_json(text)


def entry_of(host: Host, text: str) -> dict[str, Any]:
    return values_of(host, text)[host.section[0]]["stillroom"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def written(host: Host, project: Path, text: str) -> Path:
    path = project / host.project_file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    path.chmod(0o640)
    return path


@EACH_HOST
def test_a_new_file_is_made_and_undone_without_a_trace(host: Host, project: Path) -> None:
    assert setup(host.name, "--yes", project=project) == 0
    entry = entry_of(host, (project / host.project_file).read_text())
    command = entry["command"]
    assert "serve" in (command if isinstance(command, list) else entry["args"])

    assert setup(host.name, "--undo", "--yes", project=project) == 0
    assert list(project.iterdir()) == []


@EACH_HOST
def test_other_servers_comments_and_rights_stay_and_undo_gives_the_same_bytes(
    host: Host, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = others_of(host)
    path = written(host, project, before)

    assert setup(host.name, "--yes", project=project) == 0
    text = path.read_text()
    assert entry_of(host, text)
    without = values_of(host, text)
    del without[host.section[0]]["stillroom"]
    assert without == values_of(host, before)
    for kept in ("keep", "// mine" if host.syntax == "json" else "# about profiles"):
        assert kept in text
    assert path.stat().st_mode & 0o777 == 0o640
    # What is shown may go into an agent's context, so other servers' keys are not in it.
    assert "abc-secret-xyz" not in capsys.readouterr().out

    assert setup(host.name, "--yes", project=project) == 0
    assert path.read_text() == text, "a second call changes nothing"
    assert setup(host.name, "--undo", "--yes", project=project) == 0
    assert path.read_bytes() == before.encode()
    assert path.stat().st_mode & 0o777 == 0o640


@EACH_HOST
def test_windows_line_ends_stay(host: Host, project: Path) -> None:
    before = others_of(host).replace("\n", "\r\n")
    path = written(host, project, before)

    setup(host.name, "--yes", project=project)
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")
    setup(host.name, "--undo", "--yes", project=project)
    assert path.read_bytes() == before.encode()


@EACH_HOST
def test_a_malformed_file_is_named_with_its_line_and_left_alone(
    host: Host, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = others_of(host) + "\n]{\n"
    path = written(host, project, broken)

    assert setup(host.name, "--yes", project=project) == 1
    said = capsys.readouterr().err
    assert str(path) in said
    assert "line" in said
    assert "--print" in said
    assert path.read_text() == broken


@EACH_HOST
def test_print_changes_nothing(
    host: Host, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup(host.name, "--print", project=project) == 0
    assert entry_of(host, capsys.readouterr().out.split("\n", 1)[1])
    assert list(project.iterdir()) == []


def test_without_a_terminal_and_yes_the_difference_is_shown_and_nothing_written(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup("cursor", project=project) == 1
    said = capsys.readouterr().out
    assert '+     "stillroom": {' in said
    assert "--yes" in said
    assert list(project.iterdir()) == []


def test_a_users_additions_to_the_entry_stay_and_an_address_is_replaced(project: Path) -> None:
    path = project / ".mcp.json"
    path.write_text('{"mcpServers": {"stillroom": {"command": "old", "env": {"A": "1"}}}}')
    setup("claude-code", "--yes", project=project)
    entry = json.loads(path.read_text())["mcpServers"]["stillroom"]
    assert entry["env"] == {"A": "1"}
    assert entry["command"] != "old"

    path.write_text('{"mcpServers": {"stillroom": {"type": "http", "url": "http://x"}}}')
    setup("claude-code", "--yes", project=project)
    assert set(json.loads(path.read_text())["mcpServers"]["stillroom"]) == {"command", "args"}


def test_a_table_of_codex_that_is_there_is_brought_up_to_date_with_its_own_tables(
    project: Path,
) -> None:
    path = written(next(h for h in HOSTS if h.name == "codex"), project, "")
    path.write_text(
        '[mcp_servers.stillroom] # ours\ncommand = "old"\n[mcp_servers.stillroom.env]\nA = "1"\n'
        '\n# next\n[mcp_servers.z]\ncommand = "z"\n'
    )
    setup("codex", "--yes", project=project)
    servers = tomllib.loads(path.read_text())["mcp_servers"]
    assert servers["stillroom"]["env"] == {"A": "1"}
    assert servers["stillroom"]["tool_timeout_sec"] == 150
    assert servers["z"] == {"command": "z"}


def test_a_table_written_in_one_line_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codex = next(h for h in HOSTS if h.name == "codex")
    text = 'mcp_servers = { files = { command = "npx" } }\n'
    path = written(codex, project, text)
    assert setup("codex", "--yes", project=project) == 1
    assert "under the header [mcp_servers.stillroom]" in capsys.readouterr().err
    assert path.read_text() == text


def test_undo_keeps_what_others_wrote_since(project: Path) -> None:
    path = project / ".mcp.json"
    path.write_text('{\n  "mcpServers": {\n    "a": {"command": "a"}\n  }\n}\n')
    setup("claude-code", "--yes", project=project)
    path.write_text(path.read_text().replace('"command": "a"', '"command": "changed"'))

    assert setup("claude-code", "--undo", "--yes", project=project) == 0
    assert json.loads(path.read_text()) == {"mcpServers": {"a": {"command": "changed"}}}


def test_undo_refuses_where_its_own_entry_was_edited_and_where_it_did_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup("claude-code", "--undo", "--yes", project=project) == 1
    assert "has changed nothing" in capsys.readouterr().err

    setup("claude-code", "--yes", project=project)
    path = project / ".mcp.json"
    path.write_text(path.read_text().replace("serve", "serve2"))
    edited = path.read_text()
    assert setup("claude-code", "--undo", "--yes", project=project) == 1
    assert "by hand" in capsys.readouterr().err
    assert path.read_text() == edited


def with_absolute_command(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose entry setup has changed from `stillroom` to `/x/bin/stillroom`."""
    path = project / ".mcp.json"
    entry = {"command": "stillroom", "args": ["serve"]}
    path.write_text(json_with_entry("", ("mcpServers", "stillroom"), entry))
    command = ("/x/bin/stillroom", "serve")
    monkeypatch.setattr("stillroom_mcp.host_setup.apply.start_command", lambda: command)
    assert setup("claude-code", "--yes", project=project) == 0
    return path


def test_undo_restores_its_own_entry_if_another_has_the_same_text(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_absolute_command(project, monkeypatch)
    other = '"other": {"command": "/x/bin/other"},'
    path.write_text(path.read_text().replace('"stillroom": {', f'{other}\n    "stillroom": {{'))

    assert setup("claude-code", "--undo", "--yes", project=project) == 0
    servers = json.loads(path.read_text())["mcpServers"]
    assert servers["stillroom"] == {"command": "stillroom", "args": ["serve"]}
    assert servers["other"] == {"command": "/x/bin/other"}


@pytest.mark.parametrize(
    "changed",
    [
        '{"mcpServers": {"other": {"command": "/x/bin/other"}}}',
        '{"mcpServers": {"stillroom": {"command": "/x/bin/stillroom", "env": {"A": "/x/bin/"}}}}',
    ],
    ids=["only in another entry", "twice in its entry"],
)
def test_undo_refuses_if_its_change_is_not_in_one_place_of_its_entry(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    path = with_absolute_command(project, monkeypatch)
    path.write_text(changed)

    assert setup("claude-code", "--undo", "--yes", project=project) == 1
    assert "by hand" in capsys.readouterr().err
    assert path.read_text() == changed


@EACH_HOST
def test_undo_leaves_a_server_that_was_added_to_the_file_that_setup_made(
    host: Host, project: Path
) -> None:
    setup(host.name, "--yes", project=project)
    path = project / host.project_file
    other = Host.with_entry(replace(host, entry=lambda _: {"command": "other"}), "", ())
    other = other.replace("stillroom", "other")
    if host.syntax == "toml":
        path.write_text(path.read_text() + "\n" + other)
    else:
        text = path.read_text()
        entry = '"other": {"command": "other"}'
        place = text.rindex("}", 0, text.rindex("}", 0, text.rindex("}")))
        path.write_text(text[: place + 1] + f",\n    {entry}" + text[place + 1 :])

    assert setup(host.name, "--undo", "--yes", project=project) == 0
    assert values_of(host, path.read_text()) == {host.section[0]: {"other": {"command": "other"}}}


def test_a_pipe_in_place_of_the_file_is_refused_at_once(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(project / ".mcp.json")
    assert setup("claude-code", "--yes", project=project) == 1
    assert "is not a regular file" in capsys.readouterr().err


def skills_in(project: Path, host: Host) -> set[str]:
    folder = project / (host.skills_folder or "nowhere")
    return {path.parent.name for path in folder.glob("*/SKILL.md")}


@EACH_HOST
def test_the_skills_come_with_the_server_where_the_host_has_skills(
    host: Host, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    all_skills = {path.parent.name for path in ROOT.glob("skills/*/SKILL.md")}
    setup(host.name, "--yes", project=project)
    assert skills_in(project, host) == (all_skills if host.skills_folder else set())
    assert ("off-policy-distillation" in capsys.readouterr().out) == bool(host.skills_folder)


def test_skills_that_hosts_share_go_with_the_last_of_them_and_changed_ones_stay(
    project: Path,
) -> None:
    codex = next(host for host in HOSTS if host.name == "codex")
    for name in ("codex", "cursor"):
        setup(name, "--yes", project=project)
    setup("cursor", "--undo", "--yes", project=project)
    assert "import-traces" in skills_in(project, codex)
    changed = project / ".agents/skills/import-traces/SKILL.md"
    changed.write_text("mine")
    setup("codex", "--yes", project=project)
    assert changed.read_text() == "mine"
    setup("codex", "--undo", "--yes", project=project)
    assert skills_in(project, codex) == {"import-traces"}


def test_the_server_alone_is_set_up_on_request(project: Path) -> None:
    setup("cursor", "--no-skills", "--yes", project=project)
    assert not (project / ".agents").exists()


def test_a_linked_file_is_changed_where_it_is(project: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}\n")
    (project / ".mcp.json").symlink_to(real)
    setup("claude-code", "--yes", project=project)
    assert (project / ".mcp.json").is_symlink()
    assert "stillroom" in real.read_text()


def test_the_users_own_file_is_written_on_request_and_claudes_is_left_to_claude(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup("codex", "--user", "--yes", project=project) == 0
    assert "stillroom" in (tmp_path / "home/codex_home/config.toml").read_text()
    assert setup("claude-code", "--user", "--yes", project=project) == 1
    assert "claude mcp add" in capsys.readouterr().err


def test_opencode_with_comments_is_found_by_its_other_name(project: Path) -> None:
    (project / "opencode.jsonc").write_text("{ // empty\n}\n")
    setup("opencode", "--yes", project=project)
    assert "stillroom" in (project / "opencode.jsonc").read_text()
    assert not (project / "opencode.json").exists()


def test_an_unknown_host_is_answered_with_the_nearest(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup("curser", project=project) == 2
    assert "did you mean 'cursor'" in capsys.readouterr().err


@EACH_HOST
def test_the_documents_show_what_setup_writes(host: Host) -> None:
    """To mend it, put the text of `stillroom setup HOST --print` into the page."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    section = page.split(f"## {host.title}\n", 1)[1].split("\n## ", 1)[0]
    assert f"```{host.syntax}\n{host.snippet().rstrip()}\n```" in section
    assert f"stillroom setup {host.name}" in section
    assert f"`{host.project_file}`" in section


_KEYS = st.text('ab/*"\\,{}é', max_size=3)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _KEYS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    document=st.dictionaries(_KEYS, _VALUES, max_size=3),
    servers=st.none() | st.dictionaries(_KEYS, st.dictionaries(_KEYS, _VALUES), max_size=2),
    indent=st.sampled_from([None, 1, 4, "\t"]),
    is_noted=st.booleans(),
)
def test_whatever_the_file_holds_only_the_entry_is_added(
    document: dict[str, Any], servers: dict[str, Any] | None, indent: Any, is_noted: bool
) -> None:
    if servers is not None:
        document = {**document, "s": servers}
    text = json.dumps(document, indent=indent)
    if is_noted and indent is not None:
        text = "\n".join(f"{line} // }} note" for line in text.split("\n"))
    entry = {"command": "c", "args": ["${a}"]}

    changed = json_with_entry(text, ("s", "stillroom"), entry)

    expected = {**document, "s": {**(servers or {}), "stillroom": entry}}
    assert parse_json(changed) == expected
    assert json_with_entry(changed, ("s", "stillroom"), entry) == changed
    assert changed.count("// } note") == text.count("// } note")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "not an object"),
        ('{"s": []}', "not an object"),
        ('{"s": {}, "s": {}}', "duplicate key"),
        ('{"s": {} "t": 1}', "expected ,"),
        ('{"s": nul}', "not a JSON value"),
        ('{"s": "a\nb"}', "not JSON"),
        ("{", "unexpected end of file"),
        ("{} {}", "unexpected text after"),
        ("[" * 100_000, "nested"),
    ],
)
def test_what_is_no_json_object_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        json_with_entry(text, ("s", "x"), {})


def test_a_toml_date_beside_our_keys_is_refused_rather_than_changed() -> None:
    with pytest.raises(ValueError, match="is not written as plain values"):
        toml_with_entry("[s.x]\nd = 1979-05-27\n", ("s", "x"), {"command": "c"})
