"""What runs may cost: the budget of the workspace, calls without a limit, and prices.

The budget is set in prices.yml, as `workspace: {budget_usd: 20}`, and applies to all runs together:
a run that may cost money gets at most what the other runs leave of it.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel

from stillroom.errors import DataError, InputError, RunError
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.files import FileLock
from stillroom.jobs import supervise
from stillroom.models.resolve import ModelLocation
from stillroom.remote.machine import Machine
from stillroom.rollout.plan import RolloutPlan, plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts, ScoringPlan, plan_scoring
from stillroom.run_folder import RunFolder, all_runs, read_remote_state
from stillroom.secrecy.keys import is_loopback
from stillroom.settings import Workspace
from stillroom.teachers.pricing import (
    PRICES_FILE,
    Price,
    price_for,
    price_list,
    refresh_prices,
    workspace_budget_usd,
)
from stillroom.teachers.providers import Endpoint
from stillroom.types import RunKind

_PaidRequest = TypeVar("_PaidRequest", GenerateRollouts, EvaluateModel, ScoreRollouts)
_LOCK_FILE = ".stillroom/starts.lock"
_LOCK_TIMEOUT_S = 300.0


@contextmanager
def one_start_at_a_time(workspace: Workspace, machine: Machine | None) -> Generator[None]:
    """Holds a lock while a run is started, if the workspace or the machine has a shared budget.

    Without the lock, two runs that start in the same moment could each get the whole remaining
    budget. Raises RunError if another process holds the lock for five minutes.
    """
    if workspace_budget_usd(workspace) is None and (machine is None or machine.budget_usd is None):
        yield
        return
    lock = FileLock(workspace.root / _LOCK_FILE)
    if not lock.acquire_within(_LOCK_TIMEOUT_S):
        raise RunError(
            "could not get the lock on starting runs with a shared budget within "
            f"{_LOCK_TIMEOUT_S:.0f} seconds: another process holds it",
            f"repeat the call; if that does not help, end the process that holds {lock.path}",
        )
    try:
        yield
    finally:
        lock.release()


def within_workspace_budget(
    workspace: Workspace, request: _PaidRequest, plan: RolloutPlan | ScoringPlan
) -> tuple[_PaidRequest, list[str]]:
    """Returns the request, limited to what the workspace's budget leaves, and a note if lowered.

    Raises InputError if nothing is left for a run that may cost money, or if a price is unknown.
    """
    if workspace_budget_usd(workspace) is None or getattr(request, "dry_run", False):
        return request, []
    is_charged = False
    for model, location in plan.models_called:
        price = model.price(workspace)
        is_charged |= is_paid(location) or (price is not None and price.is_charged)
    if not is_charged:
        return request, []
    for model, _ in plan.models_called:
        model.price(workspace, is_needed=True)
    budget_usd, notes = limit_budget(workspace, request.budget_usd)
    return request.model_copy(update={"budget_usd": budget_usd}), notes


def limit_budget(
    workspace: Workspace, budget_usd: float | None, *, num_runs: int = 1
) -> tuple[float | None, list[str]]:
    """Returns a run's budget, limited by the workspace's budget, and a note if that lowered it.

    num_runs: the number of runs that share the rest. Raises InputError if nothing is left.
    """
    limit = workspace_budget_usd(workspace)
    if limit is None:
        return budget_usd, []
    spent = 0.0
    for folder in all_runs(workspace):
        recorded = folder.try_read_request()
        try:
            supervise.read_run(folder)
            spent += cost_of(folder)
        except (DataError, OSError):
            # The cost of a run with a damaged run.json is unknown, so its whole budget counts.
            if recorded is not None and recorded.kind is not RunKind.RECIPE:
                spent += recorded.request.get("budget_usd") or 0.0
    if spent >= limit:
        raise InputError(
            f"this workspace's runs have used or reserved ${spent:.2f} of the ${limit:g} that "
            f"{PRICES_FILE} allows (workspace: budget_usd)",
            "ask the user to wait until a run has ended, or to raise budget_usd in that file",
        )
    remaining_usd = (limit - spent) / num_runs
    if budget_usd is not None and budget_usd <= remaining_usd:
        return budget_usd, []
    note = (
        f"this run may cost up to ${remaining_usd:.4g}: ${spent:.4g} of the ${limit:g} that the "
        f"workspace's runs may cost together ({PRICES_FILE}) are used or reserved"
    )
    return remaining_usd, [note]


def cost_of(folder: RunFolder) -> float:
    """Returns what a run has cost in US dollars or, while it is active, may cost.

    Raises DataError or OSError if its files cannot be read.
    """
    state, view = folder.read(), read_remote_state(folder.path)
    # The stages of a recipe are runs of their own, whose costs are counted there.
    if state.kind is RunKind.RECIPE:
        return 0.0
    if view is not None:
        cost, reserved = state.calls_usd + (view.spent_usd or 0.0), view.budget_usd
        has_ended = view.phase == "over"
    else:
        cost, reserved = state.calls_usd, folder.read_request().request.get("budget_usd")
        has_ended = state.status.is_final
    return cost if has_ended else max(cost, reserved or 0.0)


class UnlimitedSpending(msgspec.Struct, frozen=True):
    """The endpoint of a run that may cost money and has no budget."""

    model: str
    host: str


def unlimited_spending(workspace: Workspace, request: BaseModel) -> UnlimitedSpending | None:
    """Returns the paid endpoint that a request would call without a budget; None if there is none.

    A budget of the workspace counts as one.
    Raises EngineError for an invalid request, so that users do not confirm a request that cannot
    run.
    """
    if not isinstance(request, GenerateRollouts | EvaluateModel | ScoreRollouts):
        return None
    if request.budget_usd is not None or getattr(request, "dry_run", False):
        return None
    if workspace_budget_usd(workspace) is not None:
        return None
    if isinstance(request, ScoreRollouts):
        plan = plan_scoring(workspace, request)
    elif isinstance(request, GenerateRollouts):
        plan = plan_generation(workspace, request).rollouts
    else:
        plan = plan_evaluation(workspace, request).rollouts
    for model, location in plan.models_called:
        if isinstance(location, Endpoint) and is_paid(location):
            return UnlimitedSpending(model.model, urlsplit(location.base_url).hostname or "")
    return None


def is_paid(location: ModelLocation | Endpoint) -> bool:
    """Returns whether calls of a model may cost money."""
    if not isinstance(location, Endpoint) or location.provider.is_local:
        return False
    return not is_loopback(urlsplit(location.base_url).hostname or "")


@dataclass(frozen=True, slots=True)
class ShownPrice:
    """The price of a model, in US dollars per million tokens; None if it is unknown."""

    model: str
    price: Price | None


@dataclass(frozen=True, slots=True)
class ShownPrices:
    """The requested prices, with the date and the length of the price list."""

    as_of: str
    num_models: int
    prices: list[ShownPrice]
    written: str | None = None
    """The file of the downloaded price list; None if no list was downloaded."""


def show_prices(
    workspace: Workspace, models: Sequence[str] = (), *, refresh: bool = False
) -> ShownPrices:
    """Returns the prices of models; with `refresh`, downloads the current list first.

    Raises EngineError if the list cannot be downloaded, or prices.yml cannot be read.
    """
    written = workspace.shown(refresh_prices(workspace).path) if refresh else None
    current_list = price_list(workspace)
    prices = [ShownPrice(model, price_for(workspace, model)) for model in models]
    return ShownPrices(current_list.as_of, len(current_list.models), prices, written)
