"""A server of one's own that runs an open-weight model: vLLM or SGLang."""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx
import msgspec

from stillroom.errors import CallFailedError, FailureClass, TeacherError
from stillroom.teachers.http_channel import (
    ConnectionFailedError,
    HttpChannel,
    HttpReply,
    UnreadableReplyError,
    open_channel,
)
from stillroom.teachers.limit_types import LimitSettings
from stillroom.teachers.limiter import Limiter
from stillroom.teachers.providers import Endpoint
from stillroom.teachers.replies import limit_kind, retry_after

MAX_ATTEMPTS = 6
"""Of a call that fails; waiting for a rate limit is no failure."""
PATIENCE_S = 900.0
"""How long a call waits for a rate limit in all."""
_SHOWN = 300
_GET_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class UnreadableAnswerError(Exception):
    """A server's answer is not what was asked for."""


class NotServedError(TeacherError):
    """A server has no such path, or no such model."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server is called."""

    concurrency: int = 32
    """Calls on their way at once, at most."""
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class _Retry:
    kind: FailureClass
    message: str
    wait_s: float | None = None


class ModelServer:
    """Sends a server JSON and reads its answers. Use as an async context manager.

    A call that fails (5xx, timeout, lost connection, unreadable body) is made up to `MAX_ATTEMPTS`
    times. A refused key or an address that is not there raises TeacherError and ends the run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: str | None = None,
        settings: ServerSettings | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.endpoint = endpoint
        self._key, self._sleep, self._transport = key, sleep, transport
        self.settings = settings or ServerSettings()
        most = self.settings.concurrency
        self._limiter = Limiter(LimitSettings(start=most, most=most))
        self._channels: dict[str, HttpChannel] = {}
        self._jitter = random.Random(0)

    @property
    def root(self) -> str:
        """The server's address without the version that its OpenAI-like paths begin with."""
        return self.endpoint.base_url.removesuffix("/v1")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for channel in self._channels.values():
            await channel.aclose()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[bytes], _T],
        *,
        tokens: float = 0.0,
    ) -> _T:
        """Returns what `read` makes of the answer to a JSON body sent to a path of the server.

        `read` raises UnreadableAnswerError for what is not an answer. `tokens` is about what the
        call counts where tokens are limited.

        Raises:
            CallFailedError: every attempt failed, or the request was refused as such.
            TeacherError: no call can succeed.
        """
        encoded = msgspec.json.encode(body)
        num_failed = num_refused = 0
        waited_s = 0.0
        while True:
            outcome = await self._attempt(path, encoded, read, tokens)
            if not isinstance(outcome, _Retry):
                return outcome
            is_refused = outcome.kind is FailureClass.RATE_LIMIT
            num_refused += is_refused
            num_failed += not is_refused
            wait_s = self._wait_s(outcome, num_refused if is_refused else num_failed)
            waited_s += wait_s if is_refused else 0.0
            if num_failed == MAX_ATTEMPTS or waited_s > PATIENCE_S:
                attempts = num_failed + num_refused
                raise CallFailedError(outcome.kind, f"{outcome.message} ({attempts} attempts)")
            await self._sleep(wait_s)

    async def get(self, path: str) -> bytes:
        """Returns the body at a path. Raises TeacherError if the server does not give it."""
        url = self.root + path
        headers = self.endpoint.key_headers(self._key)
        client = httpx.AsyncClient(
            headers=headers, timeout=_GET_TIMEOUT_S, transport=self._transport
        )
        try:
            async with client:
                response = await client.get(url)
        except httpx.HTTPError as error:
            raise TeacherError(
                f"nothing answers at {url}: {type(error).__name__}: {error}",
                "start the server and check base_url",
            ) from error
        if response.status_code != 200:
            text = self._without_key(response.text).strip()[:_SHOWN]
            raise TeacherError(
                f"{url} answers HTTP {response.status_code}: {text}",
                "check base_url and the key that api_key_env names",
            )
        return response.content

    async def _attempt(
        self, path: str, body: bytes, read: Callable[[bytes], _T], tokens: float
    ) -> _T | _Retry:
        sent = await self._limiter.acquire(tokens)
        try:
            outcome = await self._send(path, body, read)
        except BaseException:
            self._limiter.failed(sent)
            raise
        if not isinstance(outcome, _Retry):
            self._limiter.accepted(sent)
        elif outcome.kind is FailureClass.RATE_LIMIT:
            self._limiter.refused(sent, limit_kind(outcome.message))
        else:
            self._limiter.failed(sent)
        return outcome

    async def _send(self, path: str, body: bytes, read: Callable[[bytes], _T]) -> _T | _Retry:
        try:
            reply = await self._channel(path).post(body, timeout_s=self.settings.timeout_s)
        except TimeoutError:
            message = f"no answer within {self.settings.timeout_s:g} s"
            return _Retry(FailureClass.TIMEOUT, message)
        except ConnectionFailedError as error:
            return _Retry(FailureClass.CONNECTION, self._without_key(str(error)))
        except UnreadableReplyError as error:
            return _Retry(FailureClass.BAD_RESPONSE, f"unreadable response: {error}")
        if reply.status != 200:
            return self._refusal(path, reply)
        try:
            return read(reply.body)
        except UnreadableAnswerError as error:
            message = f"unreadable response: {self._without_key(str(error))[:_SHOWN]}"
            return _Retry(FailureClass.BAD_RESPONSE, message)

    def _refusal(self, path: str, reply: HttpReply) -> _Retry:
        status = reply.status
        text = self._without_key(reply.body.decode("utf-8", "replace")).strip()
        message = f"HTTP {status}: {text[:_SHOWN]}"
        if status == 429:
            return _Retry(FailureClass.RATE_LIMIT, message, retry_after(reply.headers))
        if status >= 500 or status == 408:
            return _Retry(FailureClass.SERVER_ERROR, message, retry_after(reply.headers))
        if status in (401, 403):
            name = self.endpoint.api_key_env
            raise TeacherError(
                f"{self.root + path} refused the key: {message}",
                f"check the key in {name}" if name else "name its variable with api_key_env",
            )
        if status == 404:
            raise NotServedError(
                f"{self.root + path} was not found: {message}",
                "check base_url, the model's name and how the server was started",
            )
        raise CallFailedError(FailureClass.BAD_REQUEST, message)

    def _wait_s(self, retry: _Retry, attempt: int) -> float:
        if retry.wait_s is not None:
            return min(max(retry.wait_s, 0.008 * 2 ** min(attempt, 12)), PATIENCE_S)
        return 0.5 * 2 ** min(attempt, 6) * self._jitter.uniform(0.5, 1.0)

    def _channel(self, path: str) -> HttpChannel:
        if path not in self._channels:
            headers = self.endpoint.key_headers(self._key)
            self._channels[path] = open_channel(
                self.root + path, headers, transport=self._transport
            )
        return self._channels[path]

    def _without_key(self, text: str) -> str:
        """Returns text that may go into a log: some servers repeat the key they refuse."""
        return text.replace(self._key, "[key]") if self._key else text
