"""Which endpoints a provider name stands for, and where its key is found."""

from dataclasses import dataclass
from typing import Literal

from stillroom.errors import InputError
from stillroom.settings import read_key

ProviderName = Literal["demo", "hf", "openai", "openrouter"]
IN_PROCESS = frozenset({"demo", "hf"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint; the key is named here and read only by the client."""

    base_url: str
    api_key_env: str
    is_key_required: bool


_DEFAULTS = {
    "openai": Endpoint("https://api.openai.com/v1", "OPENAI_API_KEY", is_key_required=True),
    "openrouter": Endpoint(
        "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", is_key_required=True
    ),
}


TEACHER_KEYS = frozenset(endpoint.api_key_env for endpoint in _DEFAULTS.values())
"""Environment variables with teachers' keys, which a training process must not have."""


def endpoint_for(
    provider: ProviderName, *, base_url: str | None, api_key_env: str | None
) -> Endpoint:
    """Returns the endpoint to call. Raises InputError if its key is missing.

    A `base_url` of one's own (vLLM, SGLang, Ollama, a gateway) needs no key unless one is named.
    """
    default = _DEFAULTS[provider]
    endpoint = Endpoint(
        base_url=(base_url or default.base_url).rstrip("/"),
        api_key_env=api_key_env or default.api_key_env,
        is_key_required=base_url is None or api_key_env is not None,
    )
    if not endpoint.base_url.startswith(("http://", "https://")):
        raise InputError(
            f"base_url {base_url!r} is not an http(s) address",
            "give e.g. http://127.0.0.1:8000/v1",
        )
    if endpoint.is_key_required and read_key(endpoint.api_key_env) is None:
        raise InputError(
            f"provider {provider!r} needs a key, and the environment variable "
            f"{endpoint.api_key_env} is not set",
            f"set {endpoint.api_key_env} where stillroom is started, or name another variable with "
            "api_key_env",
        )
    return endpoint
