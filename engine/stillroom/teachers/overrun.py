"""Measures how far responses exceed the worst case that was computed before the call."""

from dataclasses import dataclass

from stillroom.teachers.pricing import Price
from stillroom.types import SampledTurn


@dataclass(slots=True)
class Overrun:
    """The most by which any response so far exceeded the worst case computed for its request."""

    prompt_tokens: int = 0
    """The most prompt tokens beyond the number of bytes in the request."""
    completion_tokens: int = 0
    """The most completion tokens beyond the request's `max_tokens`."""
    usd: float = 0.0
    """The most US dollars by which a call cost more than the price of its tokens."""

    def record(
        self, turn: SampledTurn, num_bytes: int, max_tokens: int, price: Price | None
    ) -> None:
        """Records the usage of a response, so that later calls reserve as much in addition.

        `num_bytes` and `max_tokens` are the size and the completion limit of its request.
        """
        usage = turn.usage
        self.prompt_tokens = max(self.prompt_tokens, usage.prompt_tokens - num_bytes)
        self.completion_tokens = max(self.completion_tokens, usage.completion_tokens - max_tokens)
        if price is not None and turn.cost_usd is not None and usage.completion_tokens:
            self.usd = max(self.usd, turn.cost_usd - price.of(usage))
