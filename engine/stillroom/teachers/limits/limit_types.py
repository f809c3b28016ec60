"""The types that describe the limits of an endpoint, and the requests that count towards them."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class LimitKind(StrEnum):
    """What an endpoint limits, according to the message of a refusal; many messages do not say."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    UNKNOWN = "unknown"


class LimitUnit(StrEnum):
    """The unit that a rate limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"


_MAX_COUNTED_REFUSALS = 4


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """The settings of a limiter."""

    initial_in_flight: int = 20
    """The maximum number of requests in flight at the start."""
    max_in_flight: int = 256
    """The maximum number of requests in flight at any time."""
    accepted_per_refusal: int = 125
    """The number of requests that must be accepted, for each refusal that the last probe caused,
    before a limit is probed again."""

    def num_accepted_needed(self, num_refused: int) -> int:
        """Returns how many requests must be accepted before a limit is probed again.

        `num_refused` is the number of refusals since the last probe; only the first few count.
        """
        return self.accepted_per_refusal * min(num_refused, _MAX_COUNTED_REFUSALS)


class SentRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that was sent, as the controller recorded it."""

    number: int
    """The request's place in the order of sending, counted from 1."""
    at: float
    """The controller's time in seconds when it was sent."""
    in_flight: int
    """The number of requests in flight when it was sent, including itself."""
    fills_window: bool
    """Whether no further request could be sent after it until a response arrived."""
    tokens: float = 0.0
    """The estimated number of tokens for which it counts towards a limit on tokens."""
    tokens_before: float = 0.0
    """The estimated tokens of all requests sent before it."""

    def amount(self, unit: LimitUnit) -> float:
        """Returns the amount that this request counts: 1 request, or its estimated tokens."""
        return 1.0 if unit is LimitUnit.REQUESTS else self.tokens

    def before(self, unit: LimitUnit) -> float:
        """Returns the total amount that all requests sent before this one count."""
        return self.number - 1.0 if unit is LimitUnit.REQUESTS else self.tokens_before
