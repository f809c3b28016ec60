"""What the environments of child processes hold, and which child gets which."""

import os
from pathlib import Path

import pytest

from fakes.projects import allow_keys
from stillroom.secrecy import environments
from stillroom.secrecy.environments import (
    SHARED_SECRETS,
    bare_environment,
    container_environment,
    provisioning_environment,
    run_environment,
    shared_secrets,
    tool_environment,
)

SECRETS = [
    "OPENAI_API_KEY",
    "OPENAI_API_KEY_2",
    "teacher_key",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "GITHUB_TOKEN",
    "GH_PAT",
    "PGPASSWORD",
    "DATABASE_URL",
    "SLACK_WEBHOOK",
    "SENTRY_DSN",
    "SLURM_JWT",
    "HF_SECRET",
    "PYTHON_KEYRING_PASSWORD",
    "MY_SETTING",
]
KEPT = ["HF_HOME", "CUDA_VISIBLE_DEVICES", "PATH", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"]


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in [*SECRETS, *KEPT, "HF_TOKEN"]:
        monkeypatch.setenv(name, f"value of {name}")
    return SECRETS


def test_a_run_gets_no_secret_but_the_hubs_token(secrets: list[str]):
    environment = run_environment()
    assert [name for name in secrets if name in environment] == []
    assert [name for name in [*KEPT, "HF_TOKEN"] if name not in environment] == []
    # On a busy machine torch's threads would else spend their time waiting for one another.
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("make", [tool_environment, bare_environment, container_environment])
def test_tools_and_other_programs_get_no_secret_at_all(secrets: list[str], make):
    environment = make()
    assert [name for name in [*secrets, "HF_TOKEN"] if name in environment] == []
    assert "PATH" in environment


def test_the_user_can_give_tools_a_variable(
    secrets: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    allow_keys(monkeypatch, tmp_path, "{key: DATABASE_URL, tools: true}", "{key: GH_PAT, host: x}")
    for environment in (run_environment(), tool_environment()):
        assert environment["DATABASE_URL"] == "value of DATABASE_URL"
        assert "GH_PAT" not in environment
    assert "DATABASE_URL" not in bare_environment()


def test_what_starts_servers_of_tools_is_set_up_as_the_user_has_it(monkeypatch):
    """Only the engine's own processes get a proxy's login."""
    monkeypatch.setenv("UV_CACHE_DIR", "/cache")
    monkeypatch.setenv("UV_INDEX_URL", "https://me:hunter2@index.test/simple")
    monkeypatch.setenv("NPM_CONFIG__AUTHTOKEN", "hunter2")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2@proxy.test:3128")
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    environment = tool_environment()
    assert environment["UV_CACHE_DIR"] == "/cache"
    assert environment["http_proxy"] == "http://proxy.test:3128"
    assert "hunter2" not in str(environment)
    assert "HTTPS_PROXY" in run_environment()


def test_what_processes_of_one_run_share_goes_to_no_tool(monkeypatch: pytest.MonkeyPatch):
    assert shared_secrets() == {}
    monkeypatch.setenv(SHARED_SECRETS, '{"{secret:0123456789ab}": "hunter2"}')
    assert shared_secrets() == {"{secret:0123456789ab}": "hunter2"}
    for environment in (run_environment(), tool_environment(), bare_environment()):
        assert SHARED_SECRETS not in environment


def test_a_process_that_rents_machines_has_the_keys_of_clouds_and_no_others(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "https://sky.test")
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    provisioning = provisioning_environment()
    assert {"AWS_SECRET_ACCESS_KEY", "SKYPILOT_API_SERVER_ENDPOINT"} <= provisioning.keys()
    assert "OPENAI_API_KEY" not in provisioning
    assert "AWS_SECRET_ACCESS_KEY" not in run_environment()


def test_no_module_starts_a_process_with_the_whole_environment():
    """Each call that starts a process names the environment that it passes on."""
    starts = ("subprocess.run(", "subprocess.Popen(", "open_process(", "run_process(",
              "subprocess_exec(")  # fmt: skip
    engine = Path(environments.__file__).parents[1]
    found: list[str] = []
    for path in engine.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for start in starts:
            for part in text.split(start)[1:]:
                call = part[: _closing(part)]
                if "env=" not in call:
                    found.append(f"{path.name}: {start}{call[:60]}")
        if path != Path(environments.__file__):
            assert "os.environ)" not in text, path
            assert "os.environ.copy" not in text, path
    assert found == []
    assert os.environ


def _closing(text: str) -> int:
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)
