from pathlib import Path
from typing import Any

import pytest

from fakes.projects import allow_keys
from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom.teachers.providers import (
    ANY_ENDPOINT,
    PROVIDERS,
    ProviderName,
    endpoint_for,
    sampling_fields,
)
from stillroom.types import SamplingSettings

WORKSPACE = Workspace(Path("/nowhere"))
OWN_KEYS = [provider.api_key_env for provider in PROVIDERS.values() if provider.api_key_env]
OWN_KEYS += ["AZURE_OPENAI_API_KEY"]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OWN_KEYS, "MY_KEY", "VLLM_KEY"):
        monkeypatch.delenv(name, raising=False)


def write_dot_env(folder: Path, text: str) -> Workspace:
    (folder / ".env").write_text(text, encoding="utf-8")
    return Workspace(folder)


@pytest.mark.parametrize(
    ("provider", "variable", "host"),
    [
        ("openai", "OPENAI_API_KEY", "api.openai.com"),
        ("openrouter", "OPENROUTER_API_KEY", "openrouter.ai"),
        ("google", "GEMINI_API_KEY", "generativelanguage.googleapis.com"),
    ],
)
def test_a_hosted_provider_needs_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, provider: Any, variable: str, host: str
) -> None:
    workspace = write_dot_env(tmp_path, f"{variable}_OLD=x\n{variable}=\n")
    with pytest.raises(InputError) as caught:
        endpoint_for(workspace, provider, base_url=None, api_key_env=None)
    # Both places for the key are named.
    assert variable in caught.value.fix
    assert str(tmp_path / ".env") in caught.value.fix

    monkeypatch.setenv(variable, "sk-canary")
    endpoint = endpoint_for(workspace, provider, base_url=None, api_key_env=None)

    assert endpoint.api_key_env == variable
    assert endpoint.base_url.startswith(f"https://{host}/")
    assert "sk-canary" not in repr(endpoint)


def test_an_endpoint_of_ones_own_needs_a_key_only_if_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = endpoint_for(
        WORKSPACE, "openai", base_url="http://127.0.0.1:8000/v1/", api_key_env=None
    )
    assert endpoint.base_url == "http://127.0.0.1:8000/v1"

    base_url = "http://127.0.0.1:8000/v1"
    with pytest.raises(InputError, match="VLLM_KEY is not set"):
        endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env="VLLM_KEY")
    monkeypatch.setenv("VLLM_KEY", "k")
    named = endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env="VLLM_KEY")
    assert named.api_key_env == "VLLM_KEY"


@pytest.mark.parametrize(
    "base_url", ["http://gateway.test/v1", "https://openai.azure.com.evil.test/openai/v1"]
)
def test_the_providers_own_key_is_not_sent_to_another_address(
    monkeypatch: pytest.MonkeyPatch, base_url: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "sk-canary")

    endpoint = endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env=None)

    assert (endpoint.api_key_env, endpoint.provider) == (None, ANY_ENDPOINT)


AZURE_HOST = "https://lab.openai.azure.com"


@pytest.mark.parametrize(
    ("base_url", "requested"),
    [
        (
            f"{AZURE_HOST}/openai/deployments/four?api-version=2024-10-21",
            f"{AZURE_HOST}/openai/deployments/four/chat/completions?api-version=2024-10-21",
        ),
        (
            f"{AZURE_HOST}/openai/deployments/four/chat/completions?api-version=2024-10-21",
            f"{AZURE_HOST}/openai/deployments/four/chat/completions?api-version=2024-10-21",
        ),
        (f"{AZURE_HOST}/openai/v1/", f"{AZURE_HOST}/openai/v1/chat/completions"),
        (
            "https://lab.services.ai.azure.com/openai/v1",
            "https://lab.services.ai.azure.com/openai/v1/chat/completions",
        ),
    ],
)
def test_a_resource_at_azure_is_asked_as_azure_wants_it(
    monkeypatch: pytest.MonkeyPatch, base_url: str, requested: str
) -> None:
    with pytest.raises(InputError, match="AZURE_OPENAI_API_KEY"):
        endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env=None)
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "canary")

    endpoint = endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env=None)

    assert endpoint.chat_url == requested
    assert endpoint.key_headers("canary") == {"api-key": "canary"}
    fields = sampling_fields(endpoint, "gpt-5-mini", SamplingSettings(max_tokens=7))
    assert fields == {"max_completion_tokens": 7}


@pytest.mark.parametrize(
    "path", ["", "/", "/openai", "/openai/deployments/four", "/openai?api-version=2024-10-21"]
)
def test_an_address_at_azure_without_a_chat_is_refused_with_one_that_has_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "canary")
    with pytest.raises(
        InputError, match="is not the address of an Azure chat deployment"
    ) as caught:
        endpoint_for(WORKSPACE, "openai", base_url=AZURE_HOST + path, api_key_env=None)
    assert f"{AZURE_HOST}/openai/v1" in caught.value.fix


def test_a_gateway_before_azure_is_sent_the_key_that_is_named_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base_url = "https://gateway.test/openai/deployments/four?api-version=2024-10-21"
    allow_keys(monkeypatch, tmp_path, "{key: MY_KEY, host: gateway.test}")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "canary")
    monkeypatch.setenv("MY_KEY", "mine")

    unnamed = endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env=None)
    named = endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env="MY_KEY")

    assert (unnamed.api_key_env, named.api_key_env) == (None, "MY_KEY")
    assert named.chat_url.endswith("/four/chat/completions?api-version=2024-10-21")
    assert named.key_headers("mine") == {"api-key": "mine"}


@pytest.mark.parametrize(
    "base_url",
    [
        "127.0.0.1:8000",
        "ftp://host/v1",
        "file:///etc",
        "/v1",
        " ",
        "http://",
        "http://:80/v1",
        "http://host:99999/v1",
        "http://host:x/v1",
        "http://[::1/v1",
        "http://a host/v1",
        "http://host/v1 HTTP/1.1\r\nx: y",
        "http://höst/v1",
        "http://host/v1?version=1",
        "http://host/v1?api-version=1&key=secret",
        "http://host/v1?key",
        "http://host/v1#chat",
    ],
)
def test_an_address_that_is_not_http_is_refused(base_url: str) -> None:
    with pytest.raises(InputError, match="is not an http"):
        endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env=None)


@pytest.mark.parametrize("login", ["user:hunter2@", "hunter2@"])
def test_an_address_with_a_login_is_refused_without_showing_it(login: str) -> None:
    with pytest.raises(InputError, match="contains a login") as caught:
        endpoint_for(WORKSPACE, "openai", base_url=f"https://{login}gw.test/v1", api_key_env=None)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-\nsecond line", "sk-schlüssel"])
def test_a_key_no_header_can_carry_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(InputError, match="OPENAI_API_KEY") as caught:
        endpoint_for(WORKSPACE, "openai", base_url=None, api_key_env=None)
    assert "sk-" not in str(caught.value)


def test_a_key_may_stand_in_the_workspaces_env_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow_keys(monkeypatch, tmp_path / "config", "{key: MY_KEY, host: gateway.test}")
    (tmp_path / "work").mkdir()
    workspace = write_dot_env(
        tmp_path / "work",
        "# keys of this workspace\nexport OPENAI_API_KEY = 'sk-of-the-file'\nMY_KEY=own\n",
    )

    endpoint = endpoint_for(workspace, "openai", base_url=None, api_key_env=None)
    named = endpoint_for(
        workspace, "openai", base_url="http://gateway.test/v1", api_key_env="MY_KEY"
    )

    assert (endpoint.api_key_env, named.api_key_env) == ("OPENAI_API_KEY", "MY_KEY")
    assert workspace.read_key("OPENAI_API_KEY") == "sk-of-the-file"
    assert "sk-of-the-file" not in repr(endpoint)


def test_the_environments_key_comes_before_that_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace = write_dot_env(tmp_path, "OPENAI_API_KEY=sk-of-the-file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")

    assert workspace.read_key("OPENAI_API_KEY") == "sk-of-the-environment"

    monkeypatch.setenv("OPENAI_API_KEY", " ")
    assert workspace.read_key("OPENAI_API_KEY") == "sk-of-the-file"


@pytest.mark.parametrize("provider", ["vllm", "sglang", "ollama"])
def test_a_provider_on_ones_own_machine_needs_no_key(provider: ProviderName) -> None:
    endpoint = endpoint_for(WORKSPACE, provider, base_url=None, api_key_env=None)

    assert endpoint.api_key_env is None
    assert endpoint.base_url.startswith("http://127.0.0.1:")
    assert endpoint.provider.is_local

    elsewhere = endpoint_for(WORKSPACE, provider, base_url="http://gpu:8000/v1", api_key_env=None)
    assert (elsewhere.base_url, elsewhere.api_key_env) == ("http://gpu:8000/v1", None)
    assert elsewhere.provider == endpoint.provider


TEMPERATURE = {"temperature": 0.25, "top_p": 0.5}
GATEWAY = "http://gateway.test/v1"


@pytest.mark.parametrize(
    ("provider", "model", "base_url", "fields"),
    [
        # OpenAI's reasoning models and newer Claude models refuse a temperature.
        ("openai", "gpt-5", None, {"max_completion_tokens": 7}),
        ("openai", "gpt-5-mini-2025-08-07", None, {"max_completion_tokens": 7}),
        ("openai", "o3", None, {"max_completion_tokens": 7}),
        ("openai", "gpt-4o", None, {"max_completion_tokens": 7, **TEMPERATURE}),
        ("openai", "gpt-4.1-nano", None, {"max_completion_tokens": 7, **TEMPERATURE}),
        ("openai", "ft:gpt-4o:o3", None, {"max_completion_tokens": 7, **TEMPERATURE}),
        ("anthropic", "claude-opus-4-7", None, {"max_tokens": 7}),
        ("anthropic", "claude-opus-4-8-20260601", None, {"max_tokens": 7}),
        ("anthropic", "claude-sonnet-5", None, {"max_tokens": 7}),
        ("anthropic", "claude-haiku-5-5", None, {"max_tokens": 7}),
        ("anthropic", "claude-opus-4-6", None, {"max_tokens": 7, **TEMPERATURE}),
        ("anthropic", "claude-opus-4-20250514", None, {"max_tokens": 7, **TEMPERATURE}),
        ("anthropic", "claude-sonnet-4-5-20250929", None, {"max_tokens": 7, **TEMPERATURE}),
        # An endpoint of which only the address is known gets the oldest fields.
        ("openai", "gpt-5", GATEWAY, {"max_tokens": 7}),
        ("openai", "bedrock/us.anthropic.claude-opus-4-7-v1:0", GATEWAY, {"max_tokens": 7}),
        ("openai", "gpt-oss-20b", GATEWAY, {"max_tokens": 7, **TEMPERATURE}),
        ("openai", "models/o1-style-7b", GATEWAY, {"max_tokens": 7, **TEMPERATURE}),
        ("openai", "m", GATEWAY, {"max_tokens": 7, **TEMPERATURE}),
        ("google", "gemini-3-pro", None, {"max_tokens": 7, **TEMPERATURE}),
        ("vllm", "gpt-5", None, {"max_tokens": 7, **TEMPERATURE}),
        ("sglang", "gpt-5", None, {"max_tokens": 7, **TEMPERATURE}),
        ("ollama", "gpt-5", None, {"max_tokens": 7, **TEMPERATURE}),
        # OpenRouter states the cost of a call if it is asked to.
        ("openrouter", "openai/gpt-4o", None,
         {"max_tokens": 7, **TEMPERATURE, "usage": {"include": True}}),
        ("openrouter", "anthropic/claude-opus-4.7", None,
         {"max_tokens": 7, "usage": {"include": True}}),
    ],
)  # fmt: skip
def test_the_fields_of_a_request_are_those_that_its_endpoint_knows(
    monkeypatch: pytest.MonkeyPatch,
    provider: ProviderName,
    model: str,
    base_url: str | None,
    fields: dict[str, Any],
) -> None:
    for name in OWN_KEYS:
        monkeypatch.setenv(name, "k")
    endpoint = endpoint_for(WORKSPACE, provider, base_url=base_url, api_key_env=None)
    sampling = SamplingSettings(**TEMPERATURE, max_tokens=7, seed=3)
    assert sampling_fields(endpoint, model, sampling) == fields

    thinking = SamplingSettings(**TEMPERATURE, max_tokens=7, reasoning_effort="low")
    is_nested = provider == "openrouter"
    effort = {"reasoning": {"effort": "low"}} if is_nested else {"reasoning_effort": "low"}
    assert sampling_fields(endpoint, model, thinking) == fields | effort
