"""A key goes to the hosts that it is made for, and to those that the user allows it."""

import copy
from pathlib import Path

import pytest

from fakes.projects import allow_keys
from stillroom import api
from stillroom.errors import InputError
from stillroom.secrecy.keys import KeyNotAllowedError, allow_host, keys_file, tool_variables
from stillroom.settings import Workspace
from stillroom.teachers.providers import Endpoint, ProviderName, endpoint_for


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "work").mkdir()
    return Workspace(tmp_path / "work")


def endpoint(
    workspace: Workspace, name: str, base_url: str | None, provider: ProviderName = "openai"
) -> Endpoint:
    return endpoint_for(workspace, provider, base_url=base_url, api_key_env=name)


@pytest.mark.parametrize(
    ("name", "base_url"),
    [
        ("GITHUB_TOKEN", "https://gateway.test/v1"),
        ("GITHUB_TOKEN", "http://127.0.0.1:8000/v1"),
        ("GITHUB_TOKEN", None),
        ("OPENAI_API_KEY", "https://api.openai.com.evil.test/v1"),
        ("OPENAI_API_KEY", "http://127.0.0.1:8000/v1"),
        ("OPENAI_API_KEY", "https://openrouter.ai/api/v1"),
        ("ANTHROPIC_API_KEY", "https://api.openai.com/v1"),
        ("VLLM_API_KEY", "http://gpu.test:8000/v1"),
        ("AZURE_OPENAI_API_KEY", "https://openai.azure.com.evil.test/openai/v1"),
    ],
)
def test_a_key_is_not_sent_to_a_host_it_was_not_made_for(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str, base_url: str | None
):
    monkeypatch.setenv(name, "sk-canary-5f2d81c0")
    with pytest.raises(InputError, match=f"the key in {name} may not be sent to") as caught:
        endpoint(workspace, name, base_url)
    assert "sk-canary" not in str(caught.value)
    line = caught.value.fix.partition("the workspace: - ")[2]
    # The line that the error names is the one that allows it.
    allow_keys(monkeypatch, workspace.root.parent / "config", line)
    assert endpoint(workspace, name, base_url).api_key_env == name


@pytest.mark.parametrize(
    ("name", "provider", "base_url"),
    [
        ("OPENAI_API_KEY", "openai", None),
        ("OPENAI_API_KEY", "openai", "https://api.openai.com/v1"),
        ("OPENAI_API_KEY_2", "openai", None),
        ("WORK_OPENAI_API_KEY", "openai", None),
        ("OPENROUTER_API_KEY", "openrouter", None),
        ("VLLM_KEY", "openai", "http://127.0.0.1:8000/v1"),
        ("VLLM_API_KEY", "vllm", None),
        ("SGLANG_API_KEY", "sglang", "http://localhost:30000/v1"),
        ("OLLAMA_KEY", "ollama", "http://[::1]:11434/v1"),
        ("LOCAL_API_KEY", "openai", "http://127.0.0.1:1234/v1"),
    ],
)
def test_a_key_goes_where_its_name_says(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    provider: ProviderName,
    base_url: str | None,
):
    monkeypatch.setenv(name, "sk-canary-5f2d81c0")
    assert endpoint(workspace, name, base_url, provider).api_key_env == name


def test_an_allowed_port_is_that_port_alone(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MY_KEY", "sk-canary-5f2d81c0")
    entry = '{key: MY_KEY, host: "127.0.0.1:8000"}'
    allow_keys(monkeypatch, tmp_path / "config", entry, "{key: MY_KEY, host: gw.test}")
    for base_url in ("http://127.0.0.1:8000/v1", "https://gw.test/v1", "https://gw.test:444/v1"):
        assert endpoint(workspace, "MY_KEY", base_url).api_key_env == "MY_KEY"
    for base_url in ("http://127.0.0.1:8001/v1", "https://evil-gw.test/v1", "https://gw.test.x/v1"):
        with pytest.raises(InputError, match="may not be sent"):
            endpoint(workspace, "MY_KEY", base_url)


def test_a_key_in_env_goes_to_the_host_that_is_named_below_it(workspace: Workspace):
    lines = "ATLAS_KEY=sk-canary-5f2d81c0\nATLAS_KEY_HOST=127.0.0.1:8000, gw.test\n"
    (workspace.root / ".env").write_text(lines)
    for base_url in ("http://127.0.0.1:8000/v1", "https://gw.test/v1", "https://gw.test:444/v1"):
        assert endpoint(workspace, "ATLAS_KEY", base_url).api_key_env == "ATLAS_KEY"
    for base_url in ("http://127.0.0.1:8001/v1", "https://evil.test/v1"):
        with pytest.raises(InputError, match="may not be sent") as caught:
            endpoint(workspace, "ATLAS_KEY", base_url)
        assert "ATLAS_KEY_HOST=" in caught.value.fix
    # The host is no secret, so it is not taken out of texts.
    assert "127.0.0.1:8000" in workspace.redactor().redact_text("at 127.0.0.1:8000, gw.test")


def test_env_allows_no_key_that_it_does_not_hold(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    """An agent that writes .env could read no key of the environment by it."""
    monkeypatch.setenv("MY_KEY", "sk-canary-5f2d81c0")
    for line in ("", "MY_KEY=another\n", "MY_KEY=\n"):
        (workspace.root / ".env").write_text(f"{line}MY_KEY_HOST=gw.test\n")
        with pytest.raises(InputError, match="may not be sent"):
            endpoint(workspace, "MY_KEY", "https://gw.test/v1")


@pytest.mark.parametrize("host", ["gw.test", "127.0.0.1:8000", "::1", "::1:8000"])
@pytest.mark.parametrize("before", [None, "- {key: MY_KEY, tools: true}", "# none yet\n"])
def test_what_the_user_agreed_to_is_an_entry_beside_the_others(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, before: str
):
    monkeypatch.setenv("STILLROOM_CONFIG", str(tmp_path / "config" / "new"))
    monkeypatch.setenv("MY_KEY", "sk-canary-5f2d81c0")
    if before is not None:
        keys_file().parent.mkdir(parents=True)
        keys_file().write_text(before, encoding="utf-8")

    allow_host("MY_KEY", host)

    assert keys_file().read_text(encoding="utf-8").startswith(before or "- ")
    address = {"::1": "[::1]", "::1:8000": "[::1]:8000"}.get(host, host)
    assert endpoint(workspace, "MY_KEY", f"http://{address}/v1").api_key_env == "MY_KEY"
    with pytest.raises(KeyNotAllowedError, match="may not be sent") as caught:
        endpoint(workspace, "MY_KEY", "https://evil.test:444/v1")
    assert (caught.value.name, caught.value.host) == ("MY_KEY", "evil.test:444")
    again = copy.copy(caught.value)
    assert (again.problem, again.host) == (caught.value.problem, "evil.test:444")


def test_a_list_to_which_nothing_can_be_appended_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    path = allow_keys(monkeypatch, tmp_path / "config")
    path.write_text("[{key: MY_KEY, host: gw.test}]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"keys\.yml"):
        allow_host("MY_KEY", "other.test")
    assert path.read_text(encoding="utf-8") == "[{key: MY_KEY, host: gw.test}]\n"


def test_a_list_of_allowed_keys_in_the_workspace_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sk-canary-5f2d81c0")
    allow_keys(monkeypatch, workspace.root / "config", "{key: MY_KEY, host: gw.test}")
    with pytest.raises(InputError, match="inside the workspace"):
        endpoint(workspace, "MY_KEY", "https://gw.test/v1")


def test_no_output_can_be_written_where_keys_are_allowed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    path = allow_keys(monkeypatch, workspace.root / "config")
    for name in (path, path.parent / "x.jsonl"):
        with pytest.raises(InputError, match="where only the user may write"):
            workspace.output_file(name, label="output")


@pytest.mark.parametrize(
    "text", ["- {key: MY_KEY, hosts: x}\n", "MY_KEY: gw.test\n", "- [\n", "- {key: 'a b'}\n", "3\n"]
)
def test_a_malformed_list_is_an_error_and_allows_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
):
    monkeypatch.setenv("MY_KEY", "sk-canary-5f2d81c0")
    allow_keys(monkeypatch, tmp_path / "config").write_text(text)
    with pytest.raises(InputError, match=r"keys\.yml"):
        endpoint(workspace, "MY_KEY", "https://gw.test/v1")


def test_the_list_is_in_the_users_config_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("STILLROOM_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert keys_file() == tmp_path / "stillroom/keys.yml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys_file() == tmp_path / ".config/stillroom/keys.yml"
    assert tool_variables() == frozenset()


def test_a_run_with_such_a_key_is_refused_before_it_starts(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GITHUB_TOKEN", "sk-canary-5f2d81c0")
    (workspace.root / "prompts.jsonl").write_text('{"prompt": "Hello?"}\n')
    address = {"base_url": "http://127.0.0.1:9/v1", "api_key_env": "GITHUB_TOKEN"}
    judge = "model: m\nrubric: r\nbase_url: http://127.0.0.1:9/v1\napi_key_env: GITHUB_TOKEN\n"
    (workspace.root / "judge.yml").write_text(judge)
    teacher = {"model": "m", "provider": "openai", **address}
    judged = {"model": "teacher", "provider": "demo", "judge": "judge.yml"}
    for options in (teacher, judged):
        request = api.GenerateRollouts(input="prompts.jsonl", **options)
        with pytest.raises(InputError, match="may not be sent"):
            api.generate_rollouts(workspace, request)
    assert not workspace.runs.exists()
