"""What answers take beyond the worst case that can be told of a request before it is sent."""

from dataclasses import dataclass

from stillroom.teachers.pricing import Price
from stillroom.types import SampledTurn


@dataclass(slots=True)
class Excess:
    """How much more than the worst case, as far as it is known before, answers have taken."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    """Beside what the tokens cost."""

    def learn(
        self, turn: SampledTurn, num_bytes: int, max_tokens: int, price: Price | None
    ) -> None:
        """Takes in what an answer took; the next ones may take as much."""
        usage = turn.usage
        self.prompt_tokens = max(self.prompt_tokens, usage.prompt_tokens - num_bytes)
        self.completion_tokens = max(self.completion_tokens, usage.completion_tokens - max_tokens)
        if price is not None and turn.cost_usd is not None and usage.completion_tokens:
            self.usd = max(self.usd, turn.cost_usd - price.of(usage))
