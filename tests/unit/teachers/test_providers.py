from pathlib import Path

import pytest

from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom.teachers.providers import TEACHER_KEYS, endpoint_for

WORKSPACE = Workspace(Path("/nowhere"))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TEACHER_KEYS, "MY_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("provider", "variable", "host"),
    [
        ("openai", "OPENAI_API_KEY", "api.openai.com"),
        ("openrouter", "OPENROUTER_API_KEY", "openrouter.ai"),
    ],
)
def test_a_hosted_provider_needs_its_key(
    monkeypatch: pytest.MonkeyPatch, provider: str, variable: str, host: str
) -> None:
    with pytest.raises(InputError, match=variable):
        endpoint_for(WORKSPACE, provider, base_url=None, api_key_env=None)

    monkeypatch.setenv(variable, "sk-canary")
    endpoint = endpoint_for(WORKSPACE, provider, base_url=None, api_key_env=None)

    assert endpoint.api_key_env == variable
    assert endpoint.base_url.startswith(f"https://{host}/")
    assert variable in TEACHER_KEYS
    assert "sk-canary" not in repr(endpoint)


def test_an_endpoint_of_ones_own_needs_a_key_only_if_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = endpoint_for(
        WORKSPACE, "openai", base_url="http://127.0.0.1:8000/v1/", api_key_env=None
    )
    assert endpoint.base_url == "http://127.0.0.1:8000/v1"

    with pytest.raises(InputError, match="MY_KEY"):
        endpoint_for(WORKSPACE, "openai", base_url="http://127.0.0.1:8000/v1", api_key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", "k")
    named = endpoint_for(
        WORKSPACE, "openai", base_url="http://127.0.0.1:8000/v1", api_key_env="MY_KEY"
    )
    assert named.api_key_env == "MY_KEY"


def test_the_providers_own_key_is_not_sent_to_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")

    endpoint = endpoint_for(
        WORKSPACE, "openai", base_url="http://gateway.test/v1", api_key_env=None
    )

    assert endpoint.api_key_env is None


@pytest.mark.parametrize("base_url", ["127.0.0.1:8000", "ftp://host/v1", "file:///etc", "/v1", " "])
def test_an_address_that_is_not_http_is_refused(base_url: str) -> None:
    with pytest.raises(InputError, match="is not an http"):
        endpoint_for(WORKSPACE, "openai", base_url=base_url, api_key_env=None)


@pytest.mark.parametrize("key", ["sk-\nsecond line", "sk-schlüssel"])
def test_a_key_no_header_can_carry_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(InputError, match="OPENAI_API_KEY") as caught:
        endpoint_for(WORKSPACE, "openai", base_url=None, api_key_env=None)
    assert "sk-" not in str(caught.value)
