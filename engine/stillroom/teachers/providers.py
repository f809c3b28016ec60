"""Which endpoints a provider name stands for, where its key is found, and how it wants requests."""

import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

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
    key_header: str = "authorization"
    terms: str | None = None
    """Where it says what its outputs may be used for."""


PROFILES: dict[ProviderName, Profile] = {
    "openai": Profile(
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        max_tokens_field="max_completion_tokens",
        terms="https://openai.com/policies",
    ),
    "openrouter": Profile(
        "https://openrouter.ai/api/v1",
        "OPENROUTER_API_KEY",
        wants_reasoning_back=True,
        terms="https://openrouter.ai/terms",
    ),
    "anthropic": Profile(
        "https://api.anthropic.com/v1",
        "ANTHROPIC_API_KEY",
        takes_seed=False,
        terms="https://www.anthropic.com/legal",
    ),
    "google": Profile(
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        takes_seed=False,
        terms="https://ai.google.dev/gemini-api/terms",
    ),
    "vllm": Profile("http://127.0.0.1:8000/v1", None, is_local=True),
    "sglang": Profile("http://127.0.0.1:30000/v1", None, is_local=True),
    "ollama": Profile("http://127.0.0.1:11434/v1", None, is_local=True),
}
ANY_ENDPOINT = Profile("", None)
"""What can be counted on where only the address is known."""
AZURE = Profile(
    "", "AZURE_OPENAI_API_KEY", max_tokens_field="max_completion_tokens", key_header="api-key"
)
"""A resource at Azure; each has an address of its own."""
_AZURE_HOST = re.compile(r"\.(openai|cognitiveservices|services\.ai)\.azure\.(com|us|cn)$")
_VERSION = "api-version"
_CHAT = "/chat/completions"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint; the key is named here and read only by the client."""

    base_url: str
    api_key_env: str | None
    """None: no key is sent."""
    provider: ProviderName = "openai"
    profile: Profile = ANY_ENDPOINT
    query: str = ""

    @property
    def chat_url(self) -> str:
        """The address that requests go to."""
        return f"{self.base_url}{_CHAT}" + (f"?{self.query}" if self.query else "")

    def key_headers(self, key: str | None) -> dict[str, str]:
        """Returns the header that carries the key."""
        if key is None:
            return {}
        is_bearer = self.profile.key_header == "authorization"
        return {self.profile.key_header: f"Bearer {key}" if is_bearer else key}


TEACHER_KEYS = frozenset(
    profile.api_key_env
    for profile in (*PROFILES.values(), AZURE)
    if profile.api_key_env is not None
)
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
    the provider's own key is for the provider's own address. One at Azure is sent Azure's.
    """
    profile = PROFILES[provider]
    parts = _address(base_url or profile.base_url)
    is_own = base_url is None
    if provider == "openai" and base_url is not None:
        is_own = _AZURE_HOST.search(parts.hostname or "") is not None
        # A gateway before Azure wants the same header, and a key of its own.
        profile = AZURE if is_own or _VERSION in parts.query else ANY_ENDPOINT
    if profile is AZURE:
        _check_azure(parts)
    endpoint = Endpoint(
        base_url=parts._replace(query="").geturl().rstrip("/").removesuffix(_CHAT),
        api_key_env=api_key_env or (profile.api_key_env if is_own else None),
        provider=provider,
        profile=profile,
        query=parts.query,
    )
    if endpoint.api_key_env is not None:
        _check_key(workspace, provider, endpoint.api_key_env)
    return endpoint


def terms_of(provider: ProviderName, base_url: str | None) -> str | None:
    """Returns where a provider's terms are; None where one serves the model oneself."""
    return PROFILES[provider].terms if provider in PROFILES and base_url is None else None


def _address(url: str) -> SplitResult:
    """Returns an address of one's own. Raises InputError where no request could go to it."""
    fix = "give e.g. http://127.0.0.1:8000/v1, without a query"
    # A line break or a blank would end the first line of a request.
    if url.isascii() and url.isprintable() and " " not in url:
        parts = _split(url)
        if parts is not None and parts.scheme in ("http", "https") and not parts.fragment:
            more = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - {_VERSION}
            if not more:
                return parts
            # It would be on record with the address.
            fix = f"take {min(more)!r} out of the query, and name a key with api_key_env"
    raise InputError(
        f"base_url {url!r} is not an http(s) address to which {_CHAT} can be added", fix
    )


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def _check_azure(parts: SplitResult) -> None:
    """Raises InputError for an address at which Azure has no chat."""
    path = parts.path.rstrip("/").removesuffix(_CHAT)
    if path.endswith("/v1") or (_VERSION in parts.query and "/deployments/" in path):
        return
    host = f"{parts.scheme}://{parts.netloc}"
    raise InputError(
        f"base_url {parts.geturl()!r} names no chat at Azure",
        f"give {host}/openai/v1 and the deployment's name as the model, or "
        f"{host}/openai/deployments/NAME?{_VERSION}=2024-10-21",
    )


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
