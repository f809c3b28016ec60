"""The table of providers: their addresses, keys, terms and request formats."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from stillroom.errors import InputError
from stillroom.home_paths import is_remote_process
from stillroom.secrecy.keys import check_host, is_loopback
from stillroom.settings import Workspace
from stillroom.types import SamplingSettings

EndpointProvider = Literal[
    "openai", "openrouter", "anthropic", "google", "vllm", "sglang", "ollama"
]
"""The providers that are called over HTTP; each has its entry in `PROVIDERS`."""
ProviderName = Literal["demo", "hf", EndpointProvider]
IN_PROCESS = frozenset({"demo", "hf"})
"""The providers whose models are loaded into this process."""
# OpenAI's reasoning models, and Claude from Opus 4.7 on, also behind a gateway's prefix.
_WITHOUT_TEMPERATURE = re.compile(
    r"(?:^|[/.])(?:gpt-[5-9]|o[134](?:-(?:mini|pro|preview))?(?:-\d|$)"
    r"|claude-(?:opus-4[-.][7-9]|(?:opus|sonnet|haiku|fable|mythos)-(?:[5-9]|preview))\b)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A provider of models: its address, key, terms and request format."""

    name: EndpointProvider = "openai"
    base_url: str = ""
    """The default address, up to and including the version; empty if there is none."""
    api_key_env: str | None = None
    """The environment variable with the API key; None if no key is sent by default."""
    key_header: str = "authorization"
    """The HTTP header that carries the key, as a bearer token if it is `authorization`."""
    model_names: re.Pattern[str] | None = None
    """The names of models that only this provider serves, and that cannot be a folder or hub id."""
    makes_models: bool = False
    """Whether it serves its own models, so that OpenRouter lists them at the provider's prices."""
    is_local: bool = False
    """Whether it is a server on the user's own machine, where tokens have no price."""
    scores_tokens: bool = False
    """Whether it returns the log-probabilities of tokens that another model wrote."""
    terms: str | None = None
    """The URL of the terms that say how outputs may be used; None if no terms are known."""
    takes_seed: bool = True
    """Whether requests may have a `seed`."""
    max_tokens_field: str = "max_tokens"
    """The request's field for the maximum number of tokens of a completion."""
    nests_effort: bool = False
    """Whether the reasoning effort is sent as `reasoning.effort`, not as `reasoning_effort`."""
    other_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of each request."""
    wants_reasoning_back: bool = False
    """Whether a model's reasoning must be sent back to it with the next request."""
    limit_headers: str = "x-ratelimit-{part}-{unit}"
    """The names of the response headers that state a rate limit; `part` is limit, remaining or
    reset, and `unit` is requests or tokens."""


_PROVIDERS = (
    Provider(
        name="openai",
        base_url="https://api.openai.com/v1",
        api_key_env="OPENAI_API_KEY",
        model_names=re.compile(
            r"(gpt-\d|chatgpt-|ft:)[\w.:-]*|o[134](-(mini|pro|preview))?(-\d[\d-]*)?"
        ),
        makes_models=True,
        terms="https://openai.com/policies",
        max_tokens_field="max_completion_tokens",
    ),
    Provider(
        name="openrouter",
        base_url="https://openrouter.ai/api/v1",
        api_key_env="OPENROUTER_API_KEY",
        model_names=re.compile(
            r"openai/(gpt-\d|o\d|chatgpt-)\S*|anthropic/claude-\S+|google/gemini-\S+"
            r"|x-ai/grok-\S+|openrouter/\S+|\S+/\S+:free"
        ),
        terms="https://openrouter.ai/terms",
        nests_effort=True,
        # OpenRouter then states in each response what the call cost.
        other_fields={"usage": {"include": True}},
        wants_reasoning_back=True,
    ),
    Provider(
        name="anthropic",
        base_url="https://api.anthropic.com/v1",
        api_key_env="ANTHROPIC_API_KEY",
        model_names=re.compile(r"claude-(\d|opus|sonnet|haiku|fable|mythos)[\w.-]*"),
        makes_models=True,
        terms="https://www.anthropic.com/legal",
        takes_seed=False,
        limit_headers="anthropic-ratelimit-{unit}-{part}",
    ),
    Provider(
        name="google",
        base_url="https://generativelanguage.googleapis.com/v1beta/openai",
        api_key_env="GEMINI_API_KEY",
        model_names=re.compile(r"gemini-\d[\w.-]*"),
        makes_models=True,
        terms="https://ai.google.dev/gemini-api/terms",
        takes_seed=False,
    ),
    Provider(name="vllm", base_url="http://127.0.0.1:8000/v1", is_local=True, scores_tokens=True),
    Provider(
        name="sglang", base_url="http://127.0.0.1:30000/v1", is_local=True, scores_tokens=True
    ),
    Provider(name="ollama", base_url="http://127.0.0.1:11434/v1", is_local=True),
)
PROVIDERS: Mapping[str, Provider] = {provider.name: provider for provider in _PROVIDERS}
"""The table of providers, by name: a new one needs an entry here and its name in
`EndpointProvider`; its prices come from list_prices.yml."""
ANY_ENDPOINT = Provider()
"""An OpenAI-compatible endpoint of an unknown provider."""
AZURE = Provider(
    api_key_env="AZURE_OPENAI_API_KEY",
    key_header="api-key",
    max_tokens_field="max_completion_tokens",
)
"""An Azure OpenAI resource; each resource has its own address."""
_AZURE_HOST = re.compile(r"\.(openai|cognitiveservices|services\.ai)\.azure\.(com|us|cn)$")
_VERSION = "api-version"
_CHAT_PATH = "/chat/completions"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint. It holds the name of the key's variable, never the key."""

    base_url: str
    """The address to which `/chat/completions` is appended."""
    api_key_env: str | None
    """The environment variable with the API key; None if no key is sent."""
    provider: Provider = ANY_ENDPOINT
    query: str = ""
    """The query of each request's URL, without the `?`; for Azure it holds the API version."""

    @property
    def chat_url(self) -> str:
        """The URL to which chat requests are posted."""
        return f"{self.base_url}{_CHAT_PATH}" + (f"?{self.query}" if self.query else "")

    @property
    def is_own_server(self) -> bool:
        """Whether it may be a server such as vLLM, which reports its maximum context length."""
        return self.provider.is_local or (self.provider == ANY_ENDPOINT and not self.query)

    def takes_temperature(self, model: str) -> bool:
        """Whether a model, judged by its name, accepts `temperature` and `top_p`."""
        return self.provider.is_local or _WITHOUT_TEMPERATURE.search(model) is None

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it is a server on this machine, whose calls cost nothing."""
        return self.provider.is_local or is_loopback(urlsplit(self.base_url).hostname or "")

    def key_headers(self, key: str | None) -> dict[str, str]:
        """Returns the HTTP header that carries the key; nothing without a key."""
        if key is None:
            return {}
        header = self.provider.key_header
        return {header: f"Bearer {key}" if header == "authorization" else key}


def provider_of(model: str) -> EndpointProvider | None:
    """Returns the only provider that serves a model of this name; None if several may.

    `openai/gpt-4o` is a name at OpenRouter; `openai/gpt-oss-20b` may be one there or on the hub.
    """
    for provider in PROVIDERS.values():
        if provider.model_names is not None and provider.model_names.fullmatch(model):
            return provider.name
    return None


def provider_at(host: str) -> EndpointProvider | None:
    """Returns the provider whose own host this is; None for any other host."""
    for provider in PROVIDERS.values():
        if not provider.is_local and urlsplit(provider.base_url).hostname == host:
            return provider.name
    return None


def provider_serving(logged_name: str | None, address: str | None) -> str | None:
    """Returns the provider that served a logged call; the log names a provider and an address.

    Loggers record the name of the API. If another host serves that API, returns the host.
    """
    try:
        host = (
            urlsplit(address if "//" in address else f"//{address}").hostname if address else None
        )
    except ValueError:
        return logged_name
    if host is None:
        return logged_name
    if _AZURE_HOST.search(host):
        return "azure"
    provider = PROVIDERS.get(logged_name or "")
    url = None if provider is None else provider.base_url
    is_elsewhere = url is not None and _domain(urlsplit(url).hostname or "") != _domain(host)
    return provider_at(host) or (host if is_elsewhere else logged_name)


def _domain(host: str) -> str:
    """Returns the last two labels of a host name."""
    return ".".join(host.split(".")[-2:])


def endpoint_for(
    workspace: Workspace,
    provider: ProviderName,
    *,
    base_url: str | None,
    api_key_env: str | None,
    needs_key: bool = True,
) -> Endpoint:
    """Returns the endpoint of a provider, at its own address or at another one.

    Another `base_url` (vLLM, SGLang, Ollama, a gateway) is sent no key unless `api_key_env` names
    one, because the provider's key must reach only the provider's own address. An address at Azure
    is sent Azure's key. The user's keys.yml lists which other keys may be sent to an address.
    Without `needs_key` nothing will be sent, so the key need not be set, nor be allowed at the
    address.

    Raises InputError if the address cannot be used, if the key may not be sent there, or if it is
    missing or malformed.
    """
    resolved = PROVIDERS[provider]
    parts = _address(base_url or resolved.base_url)
    is_own = base_url is None
    if provider == "openai" and base_url is not None:
        is_own = _AZURE_HOST.search(parts.hostname or "") is not None
        # A gateway in front of Azure (its URL has an api-version) expects Azure's header as well,
        # but its key is not Azure's, so one is sent only if api_key_env names it.
        resolved = AZURE if is_own or _VERSION in parts.query else ANY_ENDPOINT
    if resolved is AZURE:
        _check_azure(parts)
    endpoint = Endpoint(
        base_url=parts._replace(query="").geturl().rstrip("/").removesuffix(_CHAT_PATH),
        api_key_env=api_key_env or (resolved.api_key_env if is_own else None),
        provider=resolved,
        query=parts.query,
    )
    name = endpoint.api_key_env
    if name is not None and needs_key:
        _check_host(workspace, name, parts)
    if name is not None and (needs_key or workspace.read_key(name) is not None):
        _check_key(workspace, provider, name)
    return endpoint


def _check_host(workspace: Workspace, name: str, parts: SplitResult) -> None:
    """Raises InputError if the key in variable `name` may not be sent to an address."""
    host = parts.hostname or ""
    # On another machine, the keys that came with the run were checked where it was started.
    is_checked = is_remote_process() and name in workspace.secrets
    if is_checked or not {host, f"{host}:{parts.port}"}.isdisjoint(workspace.key_hosts(name)):
        return
    variables = [
        provider.api_key_env
        for provider in PROVIDERS.values()
        if provider.api_key_env is not None and urlsplit(provider.base_url).hostname == host
    ]
    if AZURE.api_key_env is not None and _AZURE_HOST.search(host):
        variables.append(AZURE.api_key_env)
    check_host(name, host, parts.port, workspace=workspace.root, provider_variables=variables)


def terms_of(provider: ProviderName, base_url: str | None) -> str | None:
    """Returns the URL of a provider's terms; None for a local provider or another base_url."""
    return PROVIDERS[provider].terms if provider in PROVIDERS and base_url is None else None


def _address(url: str) -> SplitResult:
    """Returns the parts of a base URL. Raises InputError if no request can be sent to it."""
    fix = "give e.g. http://127.0.0.1:8000/v1, without a query"
    parts = url_parts(url)
    if parts is not None and "@" in parts.netloc:
        # The login would be in the request, in reports and in manifests.
        host = parts.netloc.rpartition("@")[2]
        raise InputError(
            f"base_url for {host} contains a login, which would be recorded with the run",
            "remove the login, and set api_key_env to the variable that holds the key",
        )
    if parts is not None and not parts.fragment:
        extra = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - {_VERSION}
        if not extra:
            return parts
        # Such a parameter may be a key, and reports record the address with its query.
        fix = f"remove {min(extra)!r} from the query, and name a key with api_key_env"
    raise InputError(
        f"base_url {url!r} is not an http(s) URL to which {_CHAT_PATH} can be appended", fix
    )


def url_parts(url: str) -> SplitResult | None:
    """Returns the parts of an http(s) URL; None if a request cannot be sent to it."""
    # A line break or space in the URL would corrupt the first line of the HTTP request.
    if not (url.isascii() and url.isprintable()) or " " in url:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_address else None


def _check_azure(parts: SplitResult) -> None:
    """Raises InputError for an address that is not an Azure endpoint for chat completions."""
    path = parts.path.rstrip("/").removesuffix(_CHAT_PATH)
    if path.endswith("/v1") or (_VERSION in parts.query and "/deployments/" in path):
        return
    host = f"{parts.scheme}://{parts.netloc}"
    raise InputError(
        f"base_url {parts.geturl()!r} is not the address of an Azure chat deployment",
        f"give {host}/openai/v1 and the deployment's name as the model, or "
        f"{host}/openai/deployments/NAME?{_VERSION}=2024-10-21",
    )


def sampling_fields(endpoint: Endpoint, model: str, sampling: SamplingSettings) -> dict[str, Any]:
    """Returns the request fields that set how this endpoint samples, without the seed."""
    provider, effort = endpoint.provider, sampling.reasoning_effort
    fields: dict[str, Any] = {provider.max_tokens_field: sampling.max_tokens}
    if endpoint.takes_temperature(model):
        fields["temperature"] = sampling.temperature
        if sampling.top_p < 1:
            fields["top_p"] = sampling.top_p
    if effort is not None:
        fields |= (
            {"reasoning": {"effort": effort}}
            if provider.nests_effort
            else {"reasoning_effort": effort}
        )
    return {**fields, **provider.other_fields}


def _check_key(workspace: Workspace, provider: ProviderName, name: str) -> None:
    """Raises InputError if the variable `name` is not set, or cannot be sent as an HTTP header."""
    key = workspace.read_key(name)
    if key is None:
        raise InputError(
            f"provider {provider!r} requires a key, but the environment variable {name} is not set",
            f"set {name} where stillroom is started or in {workspace.root / '.env'}, or name "
            "another variable with api_key_env",
        )
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            f"the key in {name} contains characters that are not allowed in an HTTP header",
            "set it to the key alone: no line breaks, quotes or typographic characters",
        )
