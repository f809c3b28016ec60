"""Which endpoints a provider name stands for, where its key is found, and how it wants requests."""

import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom.types import SamplingSettings

ProviderName = Literal[
    "demo", "hf", "openai", "openrouter", "anthropic", "google", "vllm", "sglang", "ollama"
]
IN_PROCESS = frozenset({"demo", "hf"})
# Models that reason by themselves take no temperature from outside.
_REASONS = re.compile(r"gpt-5|o\d")


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a provider."""

    base_url: str
    api_key_env: str | None
    takes_seed: bool = True
    max_tokens_field: str = "max_tokens"
    wants_reasoning_back: bool = False
    """Whether its own reasoning must come back with the next request."""
    is_local: bool = False
    """Runs on one's own machine, where tokens have no price."""


PROFILES: dict[ProviderName, Profile] = {
    "openai": Profile(
        "https://api.openai.com/v1", "OPENAI_API_KEY", max_tokens_field="max_completion_tokens"
    ),
    "openrouter": Profile(
        "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", wants_reasoning_back=True
    ),
    "anthropic": Profile("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", takes_seed=False),
    "google": Profile(
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        takes_seed=False,
    ),
    "vllm": Profile("http://127.0.0.1:8000/v1", None, is_local=True),
    "sglang": Profile("http://127.0.0.1:30000/v1", None, is_local=True),
    "ollama": Profile("http://127.0.0.1:11434/v1", None, is_local=True),
}
ANY_ENDPOINT = Profile("", None)
"""What can be counted on where only the address is known."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint; the key is named here and read only by the client."""

    base_url: str
    api_key_env: str | None
    """None: no key is sent."""
    provider: ProviderName = "openai"
    profile: Profile = ANY_ENDPOINT


TEACHER_KEYS = frozenset(p.api_key_env for p in PROFILES.values() if p.api_key_env is not None)
"""Environment variables with teachers' keys, which a training process must not have."""


def endpoint_for(
    workspace: Workspace,
    provider: ProviderName,
    *,
    base_url: str | None,
    api_key_env: str | None,
) -> Endpoint:
    """Returns the endpoint to call. Raises InputError if its key is missing.

    A `base_url` of one's own (vLLM, SGLang, Ollama, a gateway) is sent no key unless one is named:
    the provider's own key is for the provider's own address.
    """
    own = PROFILES[provider]
    is_generic = provider == "openai" and base_url is not None
    endpoint = Endpoint(
        base_url=(base_url or own.base_url).rstrip("/"),
        api_key_env=api_key_env or (own.api_key_env if base_url is None else None),
        provider=provider,
        profile=ANY_ENDPOINT if is_generic else own,
    )
    if not _is_address(endpoint.base_url):
        raise InputError(
            f"base_url {base_url!r} is not an http(s) address to which /chat/completions can be "
            "added",
            "give e.g. http://127.0.0.1:8000/v1, without a query",
        )
    if endpoint.api_key_env is not None:
        _check_key(workspace, provider, endpoint.api_key_env)
    return endpoint


def _is_address(url: str) -> bool:
    # A line break or a blank would end the first line of a request.
    if not (url.isascii() and url.isprintable()) or " " in url:
        return False
    try:
        parts = urlsplit(url)
        is_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and is_host and not (parts.query or parts.fragment)


def sampling_fields(endpoint: Endpoint, model: str, sampling: SamplingSettings) -> dict[str, Any]:
    """Returns how to sample as a request to this endpoint says it; the seed is left out."""
    provider, profile = endpoint.provider, endpoint.profile
    fields: dict[str, Any] = {profile.max_tokens_field: sampling.max_tokens}
    if not (provider == "openai" and profile is not ANY_ENDPOINT and _REASONS.match(model)):
        fields["temperature"] = sampling.temperature
        if sampling.top_p < 1:
            fields["top_p"] = sampling.top_p
    if sampling.reasoning_effort is not None:
        if provider == "openrouter":
            fields["reasoning"] = {"effort": sampling.reasoning_effort}
        else:
            fields["reasoning_effort"] = sampling.reasoning_effort
    if provider == "openrouter":
        # Its answers then say what they cost.
        fields["usage"] = {"include": True}
    return fields


def _check_key(workspace: Workspace, provider: ProviderName, name: str) -> None:
    key = workspace.read_key(name)
    if key is None:
        raise InputError(
            f"provider {provider!r} needs a key, and the environment variable {name} is not set",
            f"set {name} where stillroom is started or in {workspace.root / '.env'}, or name "
            "another variable with api_key_env",
        )
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            f"the key in {name} holds characters that cannot be sent in a header",
            "set it to the key alone: no line breaks, quotes or typographic characters",
        )
