"""Describes each provider: its address, the variable with its key, and how requests are written."""

import re
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import SplitResult, parse_qsl, urlsplit

from stillroom.errors import InputError
from stillroom.secrecy.keys import check_host
from stillroom.settings import Workspace
from stillroom.types import SamplingSettings

ProviderName = Literal[
    "demo", "hf", "openai", "openrouter", "anthropic", "google", "vllm", "sglang", "ollama"
]
IN_PROCESS = frozenset({"demo", "hf"})
_BY_NAME: tuple[tuple[ProviderName, re.Pattern[str]], ...] = (
    ("openai", re.compile(r"(gpt-\d|chatgpt-|ft:)[\w.:-]*")),
    ("openai", re.compile(r"o[134](-(mini|pro|preview))?(-\d[\d-]*)?")),
    ("anthropic", re.compile(r"claude-(\d|opus|sonnet|haiku|fable|mythos)[\w.-]*")),
    ("google", re.compile(r"gemini-\d[\w.-]*")),
    ("openrouter", re.compile(r"openai/(gpt-\d|o\d|chatgpt-)\S*|anthropic/claude-\S+")),
    ("openrouter", re.compile(r"google/gemini-\S+|x-ai/grok-\S+|openrouter/\S+|\S+/\S+:free")),
)
"""Names of models that only one provider serves, and that no folder or hub id can be."""
# OpenAI's reasoning models take no temperature and no top_p in the request.
_REASONS = re.compile(r"gpt-[5-9]|o\d")


@dataclass(frozen=True, slots=True)
class Profile:
    """The properties of a provider's API."""

    base_url: str
    """The default address, up to and including the version; empty if there is none."""
    api_key_env: str | None
    """The environment variable with the API key; None if no key is sent by default."""
    takes_seed: bool = True
    """Whether requests may have a `seed`."""
    max_tokens_field: str = "max_tokens"
    """The request's field for the most tokens of a completion."""
    wants_reasoning_back: bool = False
    """Whether a model's reasoning must be sent back to it with the next request."""
    is_local: bool = False
    """Whether it is a server on the user's own machine, where tokens have no price."""
    key_header: str = "authorization"
    """The HTTP header that carries the key, as a bearer token if it is `authorization`."""
    terms: str | None = None
    """The URL of the terms that say how outputs may be used; None if no terms are known."""


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
"""The profile of an endpoint of which only the address is known."""
AZURE = Profile(
    "", "AZURE_OPENAI_API_KEY", max_tokens_field="max_completion_tokens", key_header="api-key"
)
"""The profile of an Azure OpenAI resource; each resource has its own address."""
_AZURE_HOST = re.compile(r"\.(openai|cognitiveservices|services\.ai)\.azure\.(com|us|cn)$")
_VERSION = "api-version"
_CHAT = "/chat/completions"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint. It holds the name of the key's variable, never the key."""

    base_url: str
    """The address to which `/chat/completions` is appended."""
    api_key_env: str | None
    """The environment variable with the API key; None if no key is sent."""
    provider: ProviderName = "openai"
    profile: Profile = ANY_ENDPOINT
    query: str = ""
    """The query of each request's URL, without the `?`; Azure has its API version there."""

    @property
    def chat_url(self) -> str:
        """The URL to which chat requests are posted."""
        return f"{self.base_url}{_CHAT}" + (f"?{self.query}" if self.query else "")

    def key_headers(self, key: str | None) -> dict[str, str]:
        """Returns the HTTP header that carries the key; nothing without a key."""
        if key is None:
            return {}
        is_bearer = self.profile.key_header == "authorization"
        return {self.profile.key_header: f"Bearer {key}" if is_bearer else key}


def provider_of(model: str) -> ProviderName | None:
    """Returns the provider that a model's name alone tells; None if it may be of several.

    `openai/gpt-4o` is a name at OpenRouter, and `openai/gpt-oss-20b` may be there or on the hub.
    """
    return next((name for name, pattern in _BY_NAME if pattern.fullmatch(model)), None)


def with_provider(given: Any) -> Any:
    """Returns a document's fields with the provider that its model's name tells, if none is given.

    An address that is given decides instead. What is no object of fields is returned as it is.
    """
    if not isinstance(given, dict):
        return given
    fields = cast("dict[str, Any]", given)
    if fields.get("base_url") is not None or fields.get("provider") is not None:
        return fields
    provider = provider_of(str(fields.get("model", "")))
    return fields if provider is None else {**fields, "provider": provider}


def endpoint_for(
    workspace: Workspace,
    provider: ProviderName,
    *,
    base_url: str | None,
    api_key_env: str | None,
    needs_key: bool = True,
) -> Endpoint:
    """Returns the endpoint that a provider name, and optionally another address, stands for.

    Another `base_url` (vLLM, SGLang, Ollama, a gateway) is sent no key unless `api_key_env` names
    one, because the provider's key must reach only the provider's own address. An address at Azure
    is sent Azure's key. Which other keys an address may be sent is in the user's keys.yml. Without
    `needs_key` nothing will be sent, so the key need not be set.

    Raises InputError if the address cannot be used, if the key may not be sent there, or if it is
    missing or malformed.
    """
    profile = PROFILES[provider]
    parts = _address(base_url or profile.base_url)
    is_own = base_url is None
    if provider == "openai" and base_url is not None:
        is_own = _AZURE_HOST.search(parts.hostname or "") is not None
        # A gateway in front of Azure (its URL has an api-version) expects Azure's header as well,
        # but its key is not Azure's, so one is sent only if api_key_env names it.
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
    name = endpoint.api_key_env
    if name is not None:
        _check_host(workspace, name, parts)
        if needs_key or workspace.read_key(name) is not None:
            _check_key(workspace, provider, name)
    return endpoint


def _check_host(workspace: Workspace, name: str, parts: SplitResult) -> None:
    """Raises InputError if the key in variable `name` may not be sent to an address."""
    host = parts.hostname or ""
    own = [
        profile.api_key_env
        for profile in PROFILES.values()
        if profile.api_key_env is not None and urlsplit(profile.base_url).hostname == host
    ]
    if AZURE.api_key_env is not None and _AZURE_HOST.search(host):
        own.append(AZURE.api_key_env)
    check_host(name, host, parts.port, workspace=workspace.root, own=own)


def terms_of(provider: ProviderName, base_url: str | None) -> str | None:
    """Returns the URL of a provider's terms; None for a local provider or another base_url."""
    return PROFILES[provider].terms if provider in PROFILES and base_url is None else None


def _address(url: str) -> SplitResult:
    """Returns the parts of a base URL, or raises InputError if no request could be sent to it."""
    fix = "give e.g. http://127.0.0.1:8000/v1, without a query"
    # A line break or space in the URL would corrupt the first line of the HTTP request.
    if url.isascii() and url.isprintable() and " " not in url:
        parts = _split(url)
        if parts is not None and "@" in parts.netloc:
            # It would stand in the request, in reports and in manifests.
            host = parts.netloc.rpartition("@")[2]
            raise InputError(
                f"base_url for {host} holds a login, and it would be recorded with the run",
                "take it out, and name the variable with the key as api_key_env",
            )
        if parts is not None and parts.scheme in ("http", "https") and not parts.fragment:
            more = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - {_VERSION}
            if not more:
                return parts
            # Such a parameter may be a key, and reports record the address with its query.
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
    """Raises InputError for an address at which Azure has no chat completions."""
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
    """Returns the request fields that set how this endpoint samples, without the seed."""
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
        # OpenRouter then states in each response what the call cost.
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
