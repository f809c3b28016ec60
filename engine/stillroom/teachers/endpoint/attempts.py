"""Opens channels to servers, and decides which failed calls are retried and after what wait."""

import math
import random
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from stillroom import bounds
from stillroom.errors import CallFailedError, FailureClass, InputError
from stillroom.settings import proxy_for
from stillroom.teachers.endpoint.http_channel import (
    ConnectionFailedError,
    HttpChannel,
    HttpReply,
    NotConnectedError,
    UnreadableReplyError,
)
from stillroom.teachers.endpoint.replies import limit_kind, retry_after
from stillroom.teachers.limits.limit_types import SentRequest
from stillroom.teachers.limits.limiter import Limiter

MAX_ATTEMPTS = bounds.ATTEMPTS.limit
"""The maximum number of failed attempts at one call, not counting rate-limited attempts (429)."""
MAX_RATE_LIMIT_WAIT_S = float(bounds.RATE_LIMIT.limit)
"""The maximum total wait of one call for a rate limit, in seconds."""
MAX_QUOTED_CHARS = 300
"""The number of characters of a response that error messages quote."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retry:
    """The failure of an attempt after which another attempt may succeed."""

    kind: FailureClass
    message: str
    wait_s: float | None = None
    """The seconds that the server asked to wait; None if it did not say."""
    may_be_billed: bool = False
    """Whether the provider may bill the failed attempt."""
    is_down: bool = False
    """Whether the server is unreachable, directly or behind a gateway; it may be restarting."""


@dataclass(slots=True)
class Attempts:
    """Counts the unsuccessful attempts at one call, and says how long to wait after each."""

    jitter: random.Random
    """Shortens the waits of several calls differently, so that they do not coincide."""
    max_refused_wait_s: float = math.inf
    """The maximum of one wait for a rate limit, in seconds; without a limit, a call that would have
    to wait longer than `MAX_RATE_LIMIT_WAIT_S` fails immediately."""
    max_down_s: float = 0.0
    """The maximum total wait for a server that is down, in seconds; 0 counts these attempts as
    failed."""
    num_failed: int = 0
    """The number of attempts that failed, other than by a rate limit or a server that is down."""
    num_refused: int = 0
    """The number of attempts that a rate limit refused."""
    num_down: int = 0
    """The number of attempts made while the server was down."""
    waited_s: float = 0.0
    """The seconds that the call has waited for a rate limit so far."""
    down_s: float = 0.0
    """The seconds that the call has waited for a server that is down."""

    def count_failure(self, retry: Retry) -> float:
        """Counts a failed attempt, and returns the seconds to wait before the next one.

        Raises CallFailedError if no further attempt is allowed.
        """
        if retry.kind is FailureClass.RATE_LIMIT:
            self.num_refused += 1
            seconds = self._wait_s(retry, self.num_refused)
            self.waited_s += seconds
        elif retry.is_down and self.max_down_s:
            self.num_down += 1
            seconds = self._wait_s(retry, self.num_down)
            self.down_s += seconds
        else:
            self.num_failed += 1
            seconds = self._wait_s(retry, self.num_failed)
        has_waited_too_long = self.waited_s > MAX_RATE_LIMIT_WAIT_S or self.down_s > self.max_down_s
        if self.num_failed == MAX_ATTEMPTS or has_waited_too_long:
            attempts = self.num_failed + self.num_refused + self.num_down
            raise CallFailedError(retry.kind, f"{retry.message} ({attempts} attempts)")
        return seconds

    def _wait_s(self, retry: Retry, attempt: int) -> float:
        """Returns the seconds to wait after the `attempt`-th failure of one kind.

        Without a Retry-After, the wait doubles with each attempt, up to 32 s, and is shortened by a
        random factor. With one, and no limit on attempts, the wait has a minimum that doubles too,
        so that a server that always asks for no wait is not called in a tight loop.
        """
        if retry.wait_s is None:
            return 0.5 * 2 ** min(attempt, 6) * self.jitter.uniform(0.5, 1.0)
        is_refused = retry.kind is FailureClass.RATE_LIMIT
        min_wait_s = 0.008 * 2 ** min(attempt, 12) if is_refused or self.max_down_s else 0.0
        max_wait_s = self.max_refused_wait_s if is_refused else MAX_RATE_LIMIT_WAIT_S
        return min(max(retry.wait_s, min_wait_s), max_wait_s)


def open_channel(url: str, headers: Mapping[str, str]) -> HttpChannel:
    """Returns an HTTP client for a URL, which honours HTTP_PROXY, HTTPS_PROXY and NO_PROXY.

    Raises InputError if the environment sets a proxy that is not an HTTP proxy.
    """
    # aiohttp is imported only here, because the server process imports this module but makes no
    # calls; only worker processes do.
    from stillroom.teachers.endpoint.aiohttp_channel import AiohttpChannel

    return AiohttpChannel(url, headers, proxy=http_proxy(url))


def http_proxy(url: str) -> str | None:
    """Returns the proxy URL that the environment sets for a URL, with its scheme; None without one.

    Raises InputError if it is not an HTTP proxy.
    """
    proxy = proxy_for(url)
    if proxy is None:
        return None
    # As curl does, a proxy without a scheme is taken for an HTTP proxy.
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(proxy)
    if parts.scheme in ("http", "https"):
        return proxy
    # The user information is left out of the message, since it may hold a password.
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    raise InputError(
        f"the environment sets the proxy {address} for {url}; only HTTP proxies are supported",
        "set HTTP_PROXY and HTTPS_PROXY to an http:// proxy, or add the host to NO_PROXY",
    )


async def post_once(
    channel: HttpChannel, body: bytes, *, timeout_s: float, path: str = ""
) -> HttpReply | Retry:
    """Posts a body once and returns the response, whatever its status; a Retry if there is none."""
    try:
        return await channel.post(body, timeout_s=timeout_s, path=path)
    except TimeoutError:
        message = f"timed out after {timeout_s:g} s"
        return Retry(FailureClass.TIMEOUT, message, may_be_billed=True)
    except NotConnectedError as error:
        return Retry(FailureClass.CONNECTION, str(error), is_down=True)
    except ConnectionFailedError as error:
        return Retry(FailureClass.CONNECTION, str(error), may_be_billed=True, is_down=True)
    except UnreadableReplyError as error:
        message = f"unreadable response: {error}"
        return Retry(FailureClass.BAD_RESPONSE, message, may_be_billed=True)


async def run_limited(
    limiter: Limiter, sent: SentRequest, attempt: Awaitable[_T | Retry]
) -> _T | Retry:
    """Awaits an attempt, reports its outcome to the limiter, and returns it.

    `sent` is what the limiter's `acquire` returned for the attempt.
    """
    try:
        outcome = await attempt
    except BaseException:
        limiter.record_failed(sent)
        raise
    if not isinstance(outcome, Retry):
        limiter.record_accepted(sent)
    elif outcome.kind is FailureClass.RATE_LIMIT:
        limiter.record_refused(sent, limit_kind(outcome.message))
    else:
        limiter.record_failed(sent)
    return outcome


def retry_of(reply: HttpReply, message: str) -> Retry | None:
    """Returns a Retry for a response whose request may succeed when repeated, else None.

    These are rate limits (429), timeouts (408) and server errors (5xx).
    """
    if reply.status == 429:
        return Retry(FailureClass.RATE_LIMIT, message, retry_after(reply.headers))
    if reply.status >= 500 or reply.status == 408:
        is_down = reply.status in (502, 503, 504)
        wait_s = retry_after(reply.headers)
        return Retry(FailureClass.SERVER_ERROR, message, wait_s, is_down=is_down)
    return None


def retry_unreadable(error: Exception) -> Retry:
    """Returns the Retry for a response whose content does not fit the request."""
    message = f"unreadable response: {str(error)[:MAX_QUOTED_CHARS]}"
    return Retry(FailureClass.BAD_RESPONSE, message, may_be_billed=True)


def text_of(reply: HttpReply) -> str:
    """Returns a response's body as text."""
    return reply.body.decode("utf-8", "replace").strip()
