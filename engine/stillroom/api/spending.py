"""What runs may cost: the budget of the workspace, calls without a limit, and prices.

The budget is set in prices.yml, as `workspace: {budget_usd: 20}`, and applies to all runs and
recorders together: a run that may cost money gets at most what the others leave of it. Several runs
may write the same output one after another, and their `budget_usd` covers all of them. So the costs
of such runs are added up by output, in order; if the output's journal records more, that counts.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel

from stillroom.api.recorders import recorders_usd
from stillroom.errors import DataError, EngineError, InputError, RunError
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.files import FileLock
from stillroom.jobs import supervise
from stillroom.models.resolve import ModelLocation
from stillroom.remote.machine import Machine
from stillroom.rollout.journal.shards import recorded_cost
from stillroom.rollout.plan import RolloutPlan, plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts, ScoringPlan, plan_scoring
from stillroom.rollout.rescore.rows import recorded_usd, scores_path
from stillroom.run_folder import (
    RunFolder,
    RunRequest,
    WorkspaceShare,
    all_runs,
    read_remote_state,
)
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

    Without the lock, two runs that start at the same moment could each get the whole remaining
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


@dataclass(frozen=True, slots=True)
class LimitedRequest(Generic[_PaidRequest]):
    """A request whose budget is within the workspace's budget."""

    request: _PaidRequest
    share: WorkspaceShare | None = None
    """None if the workspace has no budget, or the run costs nothing."""
    notes: Sequence[str] = ()
    """A note if the workspace's budget lowered the request's."""

    @property
    def added_usd(self) -> float | None:
        """The most that the run may add to the cost of earlier runs; None without a budget."""
        budget_usd = self.request.budget_usd
        if budget_usd is None or self.share is None:
            return budget_usd
        return max(0.0, budget_usd - self.share.earlier_usd)


def within_workspace_budget(
    workspace: Workspace, request: _PaidRequest, plan: RolloutPlan | ScoringPlan
) -> LimitedRequest[_PaidRequest]:
    """Returns the request, limited to what the workspace's budget leaves.

    Raises InputError if nothing is left for a run that may cost money, or if a price is unknown.
    """
    limit_usd = workspace_budget_usd(workspace)
    if limit_usd is None or getattr(request, "dry_run", False):
        return LimitedRequest(request)
    is_charged = False
    for model, location in plan.models_called:
        price = model.price(workspace)
        is_charged |= is_paid(location) or (price is not None and price.is_charged)
    if not is_charged:
        return LimitedRequest(request)
    for model, _ in plan.models_called:
        model.price(workspace, is_needed=True)
    kind = RunKind.SCORE if isinstance(request, ScoreRollouts) else RunKind.ROLLOUTS
    spending = _spending(workspace, output_of(workspace, kind, getattr(request, "output", None)))
    budget_usd, notes = _limit(limit_usd, request.budget_usd, spending)
    share = WorkspaceShare(
        earlier_usd=spending.earlier_usd, lowered_by_usd=limit_usd if notes else None
    )
    return LimitedRequest(request.model_copy(update={"budget_usd": budget_usd}), share, notes)


def limit_budget(
    workspace: Workspace,
    budget_usd: float | None,
    *,
    num_runs: int = 1,
    earlier_usd: float = 0.0,
) -> tuple[float | None, list[str]]:
    """Returns a run's budget, limited by the workspace's budget, and a note if that lowered it.

    num_runs: the number of runs that share the rest. earlier_usd: a cost that is on record, and
    that the budget covers too. Raises InputError if nothing is left.
    """
    limit_usd = workspace_budget_usd(workspace)
    if limit_usd is None:
        return budget_usd, []
    spending = _Spending(_spending(workspace).usd, earlier_usd)
    return _limit(limit_usd, budget_usd, spending, num_runs=num_runs)


def has_budget_risen(workspace: Workspace, run: RunFolder) -> bool:
    """Returns whether more is left for a run whose budget the workspace's budget lowered.

    True if the workspace's budget was removed, or raised beyond what is used or reserved.
    """
    recorded, limit_usd = run.try_read_request(), workspace_budget_usd(workspace)
    if recorded is None or recorded.share is None or recorded.share.lowered_by_usd is None:
        return False
    if limit_usd is None:
        return True
    return limit_usd > recorded.share.lowered_by_usd and limit_usd > _spending(workspace).usd


Output = tuple[RunKind, Path]
"""An output that several runs of a kind may write one after another."""


@dataclass(frozen=True, slots=True)
class _Spending:
    """What the runs and recorders of a workspace have cost or, while they are active, may cost."""

    usd: float
    earlier_usd: float = 0.0
    """The part of `usd` that the budget of the new run covers too."""


def _limit(
    limit_usd: float, budget_usd: float | None, spending: _Spending, *, num_runs: int = 1
) -> tuple[float | None, list[str]]:
    """Returns a run's budget, limited to what is left of `limit_usd`, and a note if lowered.

    Raises InputError if nothing is left.
    """
    spent = spending.usd
    if spent >= limit_usd:
        raise InputError(
            f"this workspace's runs have used or reserved ${spent:.2f} of the ${limit_usd:g} that "
            f"{PRICES_FILE} allows (workspace: budget_usd)",
            "ask the user to wait until a run or `stillroom record` has ended, or to raise "
            "budget_usd in that file",
        )
    added_usd = (limit_usd - spent) / num_runs
    remaining_usd = spending.earlier_usd + added_usd
    if budget_usd is not None and budget_usd <= remaining_usd:
        return budget_usd, []
    note = (
        f"this may cost up to ${added_usd:.4g}: ${spent:.4g} of the ${limit_usd:g} that the "
        f"workspace's runs may cost together ({PRICES_FILE}) are used or reserved"
    )
    return remaining_usd, [note]


@dataclass(slots=True)
class _OutputCost:
    """The cost of the runs that wrote an output, or of one run that wrote none."""

    usd: float = 0.0
    is_cut_off: bool = False
    """Whether a part of the cost may be on record in the output's journal only."""


def _spending(workspace: Workspace, output: Output | None = None) -> _Spending:
    """Returns what runs and recorders have cost; `output` is the output of the new run."""
    costs: dict[Output | str, _OutputCost] = defaultdict(_OutputCost)
    for folder in sorted(all_runs(workspace), key=_created_at):
        recorded = folder.try_read_request()
        key = None
        if recorded is not None:
            key = output_of(workspace, recorded.kind, recorded.request.get("output"))
        _add_run(costs[key or folder.run_id], folder, recorded)
    earlier_usd = 0.0
    if output is not None:
        cost, earlier_usd = costs[output], journal_usd(output, with_lost=False)
        cost.usd, cost.is_cut_off = max(cost.usd, earlier_usd), False
    for key, cost in costs.items():
        if cost.is_cut_off and not isinstance(key, str):
            cost.usd = max(cost.usd, journal_usd(key, with_lost=True))
    usd = sum(cost.usd for cost in costs.values())
    return _Spending(usd + recorders_usd(workspace), earlier_usd)


def _add_run(cost: _OutputCost, folder: RunFolder, recorded: RunRequest | None) -> None:
    """Adds a run to the cost of its output; earlier runs have been added before."""
    try:
        state = supervise.read_run(folder)
        usd, is_cut_off = cost_of(folder), state.status.is_final and state.result is None
    except (DataError, OSError):
        # The cost of a run with a damaged run.json is unknown, so its full budget counts as spent.
        reported = (values.get("cost_usd") or 0.0 for _, values in folder.read_metrics())
        usd, is_cut_off = max([_reserved_usd(folder, recorded), *reported]), True
    share = recorded.share if recorded is not None else None
    # This run may have found in the journal that earlier runs cost more than they reported.
    cost.usd = max(cost.usd, share.earlier_usd if share is not None else 0.0) + usd
    cost.is_cut_off = is_cut_off or (cost.is_cut_off and share is None)


def _created_at(folder: RunFolder) -> float:
    with suppress(DataError, OSError, ValueError):
        return datetime.fromisoformat(folder.read().created_at).timestamp()
    with suppress(OSError):
        return folder.request_file.stat().st_mtime
    return 0.0


def output_of(workspace: Workspace, kind: RunKind, name: object) -> Output | None:
    """Returns the output of a run whose calls are journaled next to it; None if it has none."""
    if kind not in (RunKind.ROLLOUTS, RunKind.SCORE) or not isinstance(name, str):
        return None
    path = recorded_path(workspace, name)
    with suppress(OSError, RuntimeError):
        path = path.resolve()
    return kind, path


def recorded_path(workspace: Workspace, name: str) -> Path:
    """Returns the path of a file of a recorded run, even if it can no longer be used."""
    # It may have become a link to itself since, for example.
    with suppress(InputError):
        return workspace.path(name)
    return workspace.root / name


def journal_usd(output: Output, *, with_lost: bool) -> float:
    """Returns the cost that an output's journal records; 0 if its files are damaged.

    with_lost: see `recorded_cost`.
    """
    kind, path = output
    with suppress(EngineError, OSError):
        if kind is RunKind.SCORE:
            return recorded_usd(scores_path(path))
        return recorded_cost(path, with_lost=with_lost).usd
    return 0.0


def cost_of(folder: RunFolder) -> float:
    """Returns what a run has cost in US dollars or, while it is active, may cost.

    Raises DataError or OSError if its run.json cannot be read.
    """
    state, view = folder.read(), read_remote_state(folder.path)
    # The stages of a recipe are runs of their own, whose costs are counted there.
    if state.kind is RunKind.RECIPE:
        return 0.0
    machine_usd = view.spent_usd if view is not None else None
    has_ended = state.status.is_final if view is None else view.phase == "over"
    cost = state.calls_usd + (machine_usd or 0.0)
    return cost if has_ended else max(cost, _reserved_usd(folder, folder.try_read_request()))


def _reserved_usd(folder: RunFolder, recorded: RunRequest | None) -> float:
    """Returns the most that an active run may cost; 0 if it has no budget."""
    view = read_remote_state(folder.path)
    budget_usd = view.budget_usd if view is not None else None
    spent_usd = view.spent_usd if view is not None else None
    # The budget of a recipe is that of its stages.
    if budget_usd is None and recorded is not None and recorded.kind is not RunKind.RECIPE:
        budget_usd = (recorded.request.get("budget_usd") or 0.0) - recorded.earlier_usd
    return max(budget_usd or 0.0, spent_usd or 0.0)


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
    return isinstance(location, Endpoint) and not location.is_on_this_machine


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

    Prices are in US dollars per million tokens; prices.yml takes precedence over the list.
    Raises EngineError if the list cannot be downloaded, or prices.yml cannot be read.
    """
    written = workspace.shown(refresh_prices(workspace).path) if refresh else None
    current_list = price_list(workspace)
    prices = [ShownPrice(model, price_for(workspace, model)) for model in models]
    return ShownPrices(current_list.as_of, len(current_list.models), prices, written)
