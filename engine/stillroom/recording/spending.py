"""Keeps the cost of recorded calls within a budget in dollars."""

from collections.abc import Callable

import msgspec

from stillroom.recording.records import RecordedCall
from stillroom.teachers.budget import Budget, BudgetSpentError, Cost
from stillroom.teachers.pricing import Price
from stillroom.types import Usage

_DEFAULT_REPLY_TOKENS = 4096
"""The number of reply tokens to expect of a request that sets no limit."""
_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class _Request(msgspec.Struct):
    """The fields of a request that limit its cost."""

    model: str
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None

    @property
    def completion_limit(self) -> int:
        limits = [value for name in _LIMIT_FIELDS if (value := getattr(self, name)) is not None]
        return max(1, self.n or 1) * (max(limits) if limits else _DEFAULT_REPLY_TOKENS)


class CallBudget:
    """Admits calls as long as they cannot exceed a budget of `usd` dollars.

    `price_of` returns the price of a model, and `usage_of` the usage that a call's reply reports.
    """

    def __init__(
        self,
        usd: float,
        *,
        price_of: Callable[[str], Price | None],
        usage_of: Callable[[RecordedCall], Usage | None],
    ) -> None:
        self.budget = Budget(usd=usd)
        self.price_of, self.usage_of = price_of, usage_of
        self._prices = dict[str, Price]()
        self.is_free = False
        """Whether calls that are not recorded cost nothing."""
        self.num_unpriced = 0
        """The number of calls recorded earlier whose cost is unknown."""
        self._excess = Usage()
        """The maximum number of tokens by which a call exceeded its expected usage."""

    def add_cost_of(self, call: RecordedCall) -> None:
        """Adds the cost of a call recorded earlier, or counts the call if its cost is unknown."""
        reservation = self._reservation_for(call.request.content.data)
        if reservation is not None:
            self.budget.spent += reservation.cost_of(call)
        else:
            self.num_unpriced += 1

    async def reserve(self, body: bytes) -> "Reservation":
        """Waits until the budget covers a request's maximum cost, and reserves it.

        Raises RefusedError if the budget can never cover that cost, or it is unknown.
        """
        # Imported here, since it loads aiohttp, which the server does without.
        from stillroom.recording.admission import RefusedError

        reservation = self._reservation_for(body)
        if reservation is None:
            raise RefusedError(
                402, "no_price",
                "the cost of this call cannot be estimated, which the budget requires: the price "
                "of its model is unknown, or the request is not a JSON object with a model",
                "write the price into prices.yml, in dollars per million tokens (0 for a server of "
                "your own): \"my-model\": {input: 0.15, output: 0.60}; or run "
                "`stillroom prices --refresh`",
            )  # fmt: skip
        try:
            await self.budget.reserve(reservation.max_cost)
        except BudgetSpentError as error:
            raise RefusedError(
                402, "budget_spent",
                f"the budget of ${self.budget.usd:g} does not cover this call: "
                f"${self.budget.spent.usd:.4g} is spent, and it may cost "
                f"${reservation.max_cost.usd:.4g}",
                "restart `stillroom record` with a higher --budget-usd (prices.yml may limit it: "
                "workspace: budget_usd), lower the request's token limit, or write the price of a "
                "server of your own into prices.yml: 0",
            ) from error  # fmt: skip
        self.budget.record_sent(reservation.max_cost)
        return reservation

    def _reservation_for(self, body: bytes) -> "Reservation | None":
        """Returns a reservation of a request's maximum cost; None if that cost is unknown.

        A prompt has at most one token per byte of the request. The largest excess of an earlier
        call over its expected usage is added.
        """
        try:
            request = msgspec.json.decode(body, type=_Request)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        price = self._prices.get(request.model) or self.price_of(request.model)
        if price is None:
            return None
        self._prices[request.model] = price
        expected = Usage(prompt_tokens=len(body), completion_tokens=request.completion_limit)
        usage = expected + self._excess
        return Reservation(self, price, expected, Cost.of(usage, price.of(usage)))

    def record_excess(self, expected: Usage, usage: Usage) -> None:
        """Stores by how much a call exceeded its expected usage, if by more than earlier calls."""
        prompt = usage.prompt_tokens - expected.prompt_tokens
        completion = usage.completion_tokens - expected.completion_tokens
        self._excess = Usage(
            prompt_tokens=max(self._excess.prompt_tokens, prompt),
            completion_tokens=max(self._excess.completion_tokens, completion),
        )


class Reservation:
    """The part of a budget that is reserved for one call."""

    def __init__(self, budget: CallBudget, price: Price, expected: Usage, max_cost: Cost) -> None:
        self.max_cost = max_cost
        self._budget, self._price, self._expected = budget, price, expected

    def cost_of(self, call: RecordedCall) -> Cost:
        """Returns the cost of a call: 0 if the endpoint answered with an error.

        A missing or incomplete reply, or one without usage, costs the maximum.
        """
        usage = None
        if call.reply is not None:
            usage = Usage() if call.reply.status >= 400 else self._budget.usage_of(call)
        if usage is None:
            return self.max_cost
        self._budget.record_excess(self._expected, usage)
        return Cost.of(usage, self._price.of(usage))

    def settle(self, cost: Cost) -> None:
        """Replaces the reservation with the actual cost of the call; 0 if it was not sent."""
        self._budget.budget.settle(self.max_cost, cost)
