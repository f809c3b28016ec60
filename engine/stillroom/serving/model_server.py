"""The HTTP client for a vLLM or SGLang server that the user runs with an open-weight model."""

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import anyio
import msgspec

from stillroom import bounds
from stillroom.errors import CallFailedError, FailureClass, InputError, TeacherError
from stillroom.secrecy.redaction import Redactor
from stillroom.teachers.endpoint.attempts import (
    MAX_QUOTED_CHARS,
    MAX_RATE_LIMIT_WAIT_S,
    Attempts,
    Retry,
    open_channel,
    post_once,
    retry_of,
    retry_unreadable,
    run_limited,
    text_of,
)
from stillroom.teachers.endpoint.http_channel import HttpReply, RedactedChannel
from stillroom.teachers.limits.limit_types import LimitSettings
from stillroom.teachers.limits.limiter import Limiter
from stillroom.teachers.providers import Endpoint
from stillroom.teachers.tls import client_context
from stillroom.types import SamplingSettings, ToolSchema

MAX_DOWN_S = float(bounds.DOWN.limit)
"""The maximum number of seconds that a call waits for a server that is down."""
_CHECK_URL = "start the server and check base_url"

_T = TypeVar("_T")


class UnreadableResponseError(Exception):
    """A server's response cannot be parsed, or lacks what was requested."""


def decode_response(body: bytes, kind: type[_T]) -> _T:
    """Decodes a response's JSON as `kind`. Raises UnreadableResponseError if it does not match."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        beginning = body[:120].decode("utf-8", "replace")
        raise UnreadableResponseError(f"{error}: {beginning}") from error


class NotServedError(TeacherError):
    """The server answered HTTP 404: it does not have the requested path or model."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits on the calls to a server."""

    concurrency: int = 32
    """The maximum number of calls in flight at once."""
    timeout_s: float = 120.0
    """The timeout of a call in seconds, until its response is complete."""


class ModelServerClient:
    """Posts JSON to a server and reads its responses. Use it as an async context manager.

    A call that fails (5xx, timeout, unreadable body) is attempted at most `MAX_ATTEMPTS` times. If
    the server is down, calls wait up to `MAX_DOWN_S` for it to restart. A rejected key or an
    unknown path raises TeacherError, which ends the run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: str | None = None,
        settings: ServerSettings | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.endpoint = endpoint
        self._key, self._sleep = key, sleep
        self.settings = settings or ServerSettings()
        concurrency = self.settings.concurrency
        self._limiter = Limiter(
            LimitSettings(initial_in_flight=concurrency, max_in_flight=concurrency)
        )
        self._redactor = Redactor([key])
        channel = open_channel(self.root, endpoint.key_headers(key))
        self._channel = RedactedChannel(channel, self._redactor)
        self._jitter = random.Random(0)
        self.note: Callable[[str], None] = lambda _text: None
        """The callback that reports to the user when the server goes down or is up again."""
        self._down_since: float | None = None

    @property
    def root(self) -> str:
        """The base URL without the `/v1` prefix of its OpenAI-compatible paths."""
        return self.endpoint.base_url.removesuffix("/v1")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.aclose()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        parse: Callable[[bytes], _T],
        *,
        tokens: float = 0.0,
    ) -> _T:
        """Posts `body` as JSON to a path and returns the response body as parsed by `parse`.

        `parse` must raise UnreadableResponseError for a body that it cannot parse; the call is then
        retried. `tokens` is the approximate size of the call, which matters only if the server
        limits tokens.

        Raises:
            CallFailedError: every attempt failed, or the server rejected this particular request.
            TeacherError: no call can succeed, because the key was rejected or the path is unknown.
        """
        encoded = msgspec.json.encode(body)
        attempts = Attempts(
            self._jitter, max_refused_wait_s=MAX_RATE_LIMIT_WAIT_S, max_down_s=MAX_DOWN_S
        )
        while True:
            outcome = await self._attempt(path, encoded, parse, tokens)
            if not isinstance(outcome, Retry):
                self._note_up()
                return outcome
            wait_s = attempts.count_failure(outcome)
            # An idle connection that the server has closed fails once.
            if outcome.is_down and attempts.num_down > 1:
                self._note_down(outcome)
            await self._sleep(wait_s)

    def _note_down(self, failure: Retry) -> None:
        """Reports once to the user that the server is down."""
        if self._down_since is None:
            self._down_since = time.monotonic()
            self.note(
                f"{self.root} does not answer ({failure.message}): the run waits up to "
                f"{MAX_DOWN_S / 60:.0f} minutes; restart the server, or cancel the run"
            )

    def _note_up(self) -> None:
        """Reports to the user that a server that was down answers again."""
        if self._down_since is not None:
            down_s = time.monotonic() - self._down_since
            self._down_since = None
            self.note(f"{self.root} answers again, after {down_s:.0f} s")

    async def fetch(self, path: str, payload: Mapping[str, Any] | None = None) -> bytes:
        """Returns the response body of a GET, or of a POST if there is a `payload` to send as JSON.

        Raises TeacherError if the status is not 200.
        """
        import httpx

        url = self.root + path
        headers = {**self.endpoint.key_headers(self._key), "accept-encoding": "identity"}
        body, bound, timeout_s = bytearray(), bounds.SERVER_LIST, bounds.SERVER_RESPONSE.limit
        try:
            with anyio.fail_after(timeout_s):
                async with (
                    httpx.AsyncClient(
                        headers=headers, timeout=timeout_s, verify=client_context()
                    ) as client,
                    client.stream(
                        "GET" if payload is None else "POST", url, json=payload
                    ) as response,
                ):
                    # Raw blocks, since a few compressed bytes may decode to any size.
                    async for block in response.aiter_raw():
                        body += block
                        if len(body) > bound.limit:
                            raise TeacherError(f"{url} sent more than {bound.size}", _CHECK_URL)
        except (httpx.HTTPError, TimeoutError) as error:
            raise TeacherError(
                self._redactor.redact_text(
                    f"no response from {url}: {type(error).__name__}: {error}"
                ),
                _CHECK_URL,
            ) from error
        data = self._redactor.redact_bytes(bytes(body))
        if response.status_code != 200:
            text = data.decode(errors="replace").strip()[:MAX_QUOTED_CHARS]
            raise TeacherError(
                f"{url} returned HTTP {response.status_code}: {text}",
                "check base_url and the key that api_key_env names",
            )
        return data

    async def context_lengths(self) -> dict[str, int | None]:
        """Returns the context length in tokens of each served model by name; None if not stated.

        Raises TeacherError or UnreadableResponseError if the server does not list its models.
        """
        models = decode_response(await self.fetch("/v1/models"), _Models).data
        return {model.id: model.max_model_len for model in models}

    async def ignores_tools(self, model: str, tools: Sequence[ToolSchema]) -> bool:
        """Returns whether the model's chat template ignores tools; False if unknown.

        It is unknown if the server cannot tokenize a conversation.
        """
        conversation = {"model": model, "messages": [{"role": "user", "content": "?"}]}
        try:
            ids_without_tools, ids_with_tools = [
                decode_response(await self.fetch("/tokenize", request), Tokens).tokens
                for request in (conversation, {**conversation, "tools": list(tools)})
            ]
        except (TeacherError, UnreadableResponseError):
            return False
        return ids_without_tools == ids_with_tools

    async def _attempt(
        self, path: str, body: bytes, parse: Callable[[bytes], _T], tokens: float
    ) -> _T | Retry:
        ticket = await self._limiter.acquire(tokens)
        return await run_limited(self._limiter, ticket, self._send(path, body, parse))

    async def _send(self, path: str, body: bytes, parse: Callable[[bytes], _T]) -> _T | Retry:
        """Sends a request once; returns the parsed response, or a Retry."""
        reply = await post_once(self._channel, body, timeout_s=self.settings.timeout_s, path=path)
        if isinstance(reply, Retry):
            return reply
        if reply.status != 200:
            return self._retry_or_raise(path, reply)
        try:
            return parse(reply.body)
        except UnreadableResponseError as error:
            return retry_unreadable(error)

    def _retry_or_raise(self, path: str, reply: HttpReply) -> Retry:
        """Returns a Retry for an error response if the request may succeed when repeated.

        Raises TeacherError or CallFailedError if it cannot.
        """
        status = reply.status
        message = f"HTTP {status}: {text_of(reply)[:MAX_QUOTED_CHARS]}"
        if (retry := retry_of(reply, message)) is not None:
            return retry
        if status in (401, 403):
            name = self.endpoint.api_key_env
            raise TeacherError(
                f"{self.root + path} rejected the key: {message}",
                f"check the key in {name}"
                if name
                else "set api_key_env to the variable that holds the key",
            )
        if status == 404:
            raise NotServedError(
                f"{self.root + path} was not found: {message}",
                "check base_url, the model's name and how the server was started",
            )
        raise CallFailedError(FailureClass.BAD_REQUEST, message)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class Tokens(msgspec.Struct):
    """The response of a server's /tokenize."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class FittedSampling:
    """Sampling settings that fit a server's context, and notes for the user."""

    sampling: SamplingSettings
    notes: Sequence[str] = ()


async def fit_max_tokens(
    endpoint: Endpoint,
    model: str,
    sampling: SamplingSettings,
    tools: Sequence[ToolSchema] = (),
    *,
    key: str | None,
) -> FittedSampling:
    """Returns the settings with a `max_tokens` that fits the server's context, and notes.

    The default `max_tokens` is lowered to half of the context length, which a note reports. Another
    note reports that the chat template ignores the `tools`. Nothing changes if the server does not
    state a context length, which hosted providers never do.

    Raises InputError if a `max_tokens` other than the default leaves no room for a prompt.
    """
    if not endpoint.is_own_server:
        return FittedSampling(sampling)
    notes: list[str] = []
    async with ModelServerClient(endpoint, key=key) as server:
        try:
            context = (await server.context_lengths()).get(model)
        except (TeacherError, UnreadableResponseError):
            # The first call will report the problem with the server.
            return FittedSampling(sampling)
        if context is not None and tools and await server.ignores_tools(model, tools):
            notes.append(
                f"the chat template of {model} at {endpoint.base_url} ignores tools, so the model "
                "cannot call them: serve it with a template that supports tools (vLLM: "
                "--chat-template), or use another model"
            )
    if context is None or sampling.max_tokens <= context // 2:
        return FittedSampling(sampling, notes)
    limit = f"{model} at {endpoint.base_url} has a context length of {context} tokens"
    if sampling.max_tokens != SamplingSettings().max_tokens:
        if sampling.max_tokens < context:
            return FittedSampling(sampling, notes)
        raise InputError(
            f"{limit}: max_tokens {sampling.max_tokens} leaves no room for a prompt",
            f"set max_tokens to {context // 2} or less, or serve the model with a longer context "
            "(vLLM: --max-model-len)",
        )
    notes.append(f"{limit}: max_tokens was lowered to {context // 2} (set max_tokens to override)")
    return FittedSampling(msgspec.structs.replace(sampling, max_tokens=context // 2), notes)


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank accepts."""


def vllm_lora_rank(rank: int | None) -> int | None:
    """Returns vLLM's smallest --max-lora-rank that is at least `rank`; None if there is none."""
    return next((supported for supported in _RANKS if rank is not None and supported >= rank), None)
