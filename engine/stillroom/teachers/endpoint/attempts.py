"""What every client of a server does with a call that fails: which is made again, and when."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from stillroom.errors import CallFailedError, FailureClass
from stillroom.teachers.endpoint.http_channel import (
    ConnectionFailedError,
    HttpChannel,
    HttpReply,
    NotConnectedError,
    UnreadableReplyError,
)
from stillroom.teachers.endpoint.replies import limit_kind, retry_after
from stillroom.teachers.limits.limiter import Limiter
from stillroom.teachers.limits.words import Sent

MAX_ATTEMPTS = 6
"""Of a call that fails; waiting for a rate limit is no failure."""
PATIENCE_S = 900.0
"""How long a call waits for a rate limit in all."""
SHOWN = 300
"""Characters of a response that are shown where it is not as it should be."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retry:
    """A failure that another attempt may mend."""

    kind: FailureClass
    message: str
    wait_s: float | None = None
    may_be_billed: bool = False


@dataclass(slots=True)
class Attempts:
    """The attempts at one call that came to nothing."""

    num_failed: int = 0
    num_refused: int = 0
    """By a rate limit."""
    waited_s: float = 0.0
    """For a rate limit."""

    def wait_s(self, retry: Retry, wait_s: Callable[[Retry, int], float]) -> float:
        """Returns how long to wait for the next attempt: `wait_s` of the failure and its number.

        Raises CallFailedError if this was the last one.
        """
        is_refused = retry.kind is FailureClass.RATE_LIMIT
        self.num_refused += is_refused
        self.num_failed += not is_refused
        seconds = wait_s(retry, self.num_refused if is_refused else self.num_failed)
        self.waited_s += seconds if is_refused else 0.0
        if self.num_failed == MAX_ATTEMPTS or self.waited_s > PATIENCE_S:
            attempts = self.num_failed + self.num_refused
            raise CallFailedError(retry.kind, f"{retry.message} ({attempts} attempts)")
        return seconds


def backoff_s(attempt: int, jitter: random.Random) -> float:
    """Returns how long to wait after a failure where the server does not say."""
    return 0.5 * 2 ** min(attempt, 6) * jitter.uniform(0.5, 1.0)


def least_wait_s(attempt: int) -> float:
    """Returns how long to wait where the server says "at once": believed less and less."""
    return 0.008 * 2 ** min(attempt, 12)


async def post_once(
    channel: HttpChannel, body: bytes, *, timeout_s: float, key: str | None, path: str = ""
) -> HttpReply | Retry:
    """Returns the response to a body, whatever its status; without one, what went wrong."""
    try:
        return await channel.post(body, timeout_s=timeout_s, path=path)
    except TimeoutError:
        message = f"no answer within {timeout_s:g} s"
        return Retry(FailureClass.TIMEOUT, message, may_be_billed=True)
    except NotConnectedError as error:
        return Retry(FailureClass.CONNECTION, without_key(str(error), key))
    except ConnectionFailedError as error:
        message = without_key(str(error), key)
        return Retry(FailureClass.CONNECTION, message, may_be_billed=True)
    except UnreadableReplyError as error:
        message = f"unreadable response: {error}"
        return Retry(FailureClass.BAD_RESPONSE, message, may_be_billed=True)


async def limited(limiter: Limiter, sent: Sent, attempt: Awaitable[_T | Retry]) -> _T | Retry:
    """Returns what an attempt comes to, and tells the limiter that let it out."""
    try:
        outcome = await attempt
    except BaseException:
        limiter.failed(sent)
        raise
    if not isinstance(outcome, Retry):
        limiter.accepted(sent)
    elif outcome.kind is FailureClass.RATE_LIMIT:
        limiter.refused(sent, limit_kind(outcome.message))
    else:
        limiter.failed(sent)
    return outcome


def retry_of(reply: HttpReply, message: str) -> Retry | None:
    """Returns what to do about a response that says to come again; None for any other."""
    if reply.status == 429:
        return Retry(FailureClass.RATE_LIMIT, message, retry_after(reply.headers))
    if reply.status >= 500 or reply.status == 408:
        return Retry(FailureClass.SERVER_ERROR, message, retry_after(reply.headers))
    return None


def unreadable(error: Exception, key: str | None) -> Retry:
    """Returns what to do about a response that is not what was asked for."""
    message = f"unreadable response: {without_key(str(error), key)[:SHOWN]}"
    return Retry(FailureClass.BAD_RESPONSE, message, may_be_billed=True)


def text_of(reply: HttpReply, key: str | None) -> str:
    """Returns a response's body as text that may go into a log."""
    return without_key(reply.body.decode("utf-8", "replace"), key).strip()


def without_key(text: str, key: str | None) -> str:
    """Returns text that may go into a log: some servers repeat the key they refuse."""
    return text.replace(key, "[key]") if key else text
