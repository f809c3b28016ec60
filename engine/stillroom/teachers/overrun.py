"""How far answers exceed the worst case that was computed from a request before it was sent."""

from dataclasses import dataclass

from stillroom.teachers.pricing import Price
from stillroom.types import SampledTurn


@dataclass(slots=True)
class Overrun:
    """The most by which any answer so far exceeded the worst case computed for its request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    """Beyond the price of the tokens."""

    def record(
        self, turn: SampledTurn, num_bytes: int, max_tokens: int, price: Price | None
    ) -> None:
        """Records what an answer took; later calls reserve as much beyond their worst case."""
        usage = turn.usage
        self.prompt_tokens = max(self.prompt_tokens, usage.prompt_tokens - num_bytes)
        self.completion_tokens = max(self.completion_tokens, usage.completion_tokens - max_tokens)
        if price is not None and turn.cost_usd is not None and usage.completion_tokens:
            self.usd = max(self.usd, turn.cost_usd - price.of(usage))
