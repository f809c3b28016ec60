"""What runs may spend: whether one has a limit, and the prices that limits count by."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel

from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.secrecy.keys import is_loopback
from stillroom.settings import Workspace
from stillroom.teachers.pricing import Price, price_for, price_list
from stillroom.teachers.providers import Endpoint
from stillroom.teachers.refreshed_prices import refresh_prices


class UnlimitedSpending(msgspec.Struct, frozen=True):
    """A run that calls an endpoint beyond this machine, and has no budget."""

    model: str
    host: str


def unlimited_spending(workspace: Workspace, request: BaseModel) -> UnlimitedSpending | None:
    """Returns what a request would spend on without a limit; None if it has one or spends nothing.

    Raises an EngineError if the request is faulty, so that nobody is asked in vain.
    """
    if not isinstance(request, GenerateRollouts | EvaluateModel):
        return None
    if request.dry_run or request.budget_usd is not None:
        return None
    if isinstance(request, GenerateRollouts):
        policy = plan_generation(workspace, request).rollouts.policy
    else:
        policy = plan_evaluation(workspace, request).rollouts.policy
    if not isinstance(policy, Endpoint) or policy.provider.is_local:
        return None
    host = urlsplit(policy.base_url).hostname or ""
    return None if is_loopback(host) else UnlimitedSpending(str(request.model), host)


@dataclass(frozen=True, slots=True)
class ShownPrice:
    """The price of a model, in US dollars per million tokens; None if it is unknown."""

    model: str
    price: Price | None


@dataclass(frozen=True, slots=True)
class ShownPrices:
    """The date of the list of prices that counts here, its length, and the prices asked for."""

    as_of: str
    num_models: int
    prices: list[ShownPrice]
    written: str | None = None
    """The file of a list that was fetched; None if none was."""


def show_prices(
    workspace: Workspace, models: Sequence[str] = (), *, refresh: bool = False
) -> ShownPrices:
    """Returns the prices of models, after fetching the current list if it is to be refreshed.

    Raises an EngineError if the list cannot be fetched, or prices.yml cannot be read.
    """
    written = workspace.shown(refresh_prices(workspace).path) if refresh else None
    listed = price_list(workspace)
    prices = [ShownPrice(model, price_for(workspace, model)) for model in models]
    return ShownPrices(listed.as_of, len(listed.models), prices, written)
