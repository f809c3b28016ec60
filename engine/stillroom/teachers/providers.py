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
    api_key_env: str | None
    """None: no key is sent."""


_DEFAULTS = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
}


TEACHER_KEYS = frozenset(api_key_env for _, api_key_env in _DEFAULTS.values())
"""Environment variables with teachers' keys, which a training process must not have."""


def endpoint_for(
    provider: ProviderName, *, base_url: str | None, api_key_env: str | None
) -> Endpoint:
    """Returns the endpoint to call. Raises InputError if its key is missing.

    A `base_url` of one's own (vLLM, SGLang, Ollama, a gateway) is sent no key unless one is named:
    the provider's own key is for the provider's own address.
    """
    own_url, own_key = _DEFAULTS[provider]
    endpoint = Endpoint(
        base_url=(base_url or own_url).rstrip("/"),
        api_key_env=api_key_env or (own_key if base_url is None else None),
    )
    if not endpoint.base_url.startswith(("http://", "https://")):
        raise InputError(
            f"base_url {base_url!r} is not an http(s) address",
            "give e.g. http://127.0.0.1:8000/v1",
        )
    if endpoint.api_key_env is not None:
        _check_key(provider, endpoint.api_key_env)
    return endpoint


def _check_key(provider: ProviderName, name: str) -> None:
    key = read_key(name)
    if key is None:
        raise InputError(
            f"provider {provider!r} needs a key, and the environment variable {name} is not set",
            f"set {name} where stillroom is started, or name another variable with api_key_env",
        )
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            f"the key in {name} holds characters that cannot be sent in a header",
            "set it to the key alone: no line breaks, quotes or typographic characters",
        )
