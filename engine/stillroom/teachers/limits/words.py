"""The words in which limits are spoken of."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class LimitKind(StrEnum):
    """What an endpoint said it limits; many do not say."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    UNKNOWN = "unknown"


class LimitUnit(StrEnum):
    """What is counted where something is limited in a span of time."""

    REQUESTS = "requests"
    TOKENS = "tokens"


_MAX_COUNTED_REFUSALS = 4


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What is wished of a limiter."""

    start: int = 20
    """Requests in flight at first."""
    most: int = 256
    """Never more in flight."""
    accepted_per_refusal: int = 125
    """A limit is tried again only after so many requests for each that the last try cost."""

    def owed(self, num_refused: int) -> int:
        """Returns how many must be taken after a try that cost so many, of which few count."""
        return self.accepted_per_refusal * min(num_refused, _MAX_COUNTED_REFUSALS)


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A request on its way, as the controller knows it."""

    number: int
    at: float
    in_flight: int
    """How many there were with it."""
    fills_window: bool
    tokens: float = 0.0
    """What it is thought to count where tokens are limited."""
    tokens_before: float = 0.0
    """What all that went before it count together."""

    def amount(self, unit: LimitUnit) -> float:
        """Returns what it counts."""
        return 1.0 if unit is LimitUnit.REQUESTS else self.tokens

    def before(self, unit: LimitUnit) -> float:
        """Returns what all that went before it count together."""
        return self.number - 1.0 if unit is LimitUnit.REQUESTS else self.tokens_before
