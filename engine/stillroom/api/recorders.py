"""What `stillroom record` has cost in a workspace or, while it is running, may cost.

Each folder of recorded calls has a document in `.stillroom/recorders`, which outlives the folder.
"""

import functools
import math
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from stillroom.errors import InputError
from stillroom.files import FileLock, content_hash, read_json, write_json
from stillroom.importing.formats.api_logs.recorded import recorded_calls, usage_of_call
from stillroom.recording.journal import LOCK_NAME, journals_in
from stillroom.recording.spending import CallBudget
from stillroom.settings import Workspace
from stillroom.teachers.pricing import Price, price_for

_DOCUMENTS = ".stillroom/recorders"


class RecorderCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the calls recorded in one folder, in US dollars."""

    folder: str
    spent_usd: float | None = None
    """The cost of the calls in the folder's journals; None if a recorder runs or was killed."""
    budget_usd: float | None = None
    """The most that those calls may cost once the recorder has ended; None without a limit."""
    in_flight_usd: float = 0.0
    """The most that calls may have cost which were in flight when a recorder was killed, or are:
    they are in no journal. 0 without a limit."""
    deleted_usd: float = 0.0
    """The cost of calls that are in no journal, such as those whose journals were deleted."""

    @property
    def most_usd(self) -> float:
        """The most that the calls may have cost, as far as this document says."""
        spent_usd = self.budget_usd if self.spent_usd is None else self.spent_usd
        return self.deleted_usd + (spent_usd or 0.0)

    def recounted(self, spent_usd: float) -> Self:
        """Returns the cost when the calls so far have cost `spent_usd`.

        These are the calls in the folder's journals, and those that were in flight when the
        recorder was killed. If that is less than before, journals were deleted, or calls could not
        be written.
        """
        deleted_usd = self.deleted_usd + max(0.0, (self.spent_usd or 0.0) - spent_usd)
        return msgspec.structs.replace(self, spent_usd=spent_usd, deleted_usd=deleted_usd)


def recorders_usd(workspace: Workspace) -> float:
    """Returns what all recorders of a workspace have cost or, while they are running, may cost.

    Raises DataError if a document is damaged.
    """
    documents = sorted((workspace.root / _DOCUMENTS).glob("*.json"))
    return sum(_cost_usd(workspace, read_json(path, RecorderCost)) for path in documents)


def _cost_usd(workspace: Workspace, cost: RecorderCost) -> float:
    folder = workspace.path(cost.folder)
    if cost.spent_usd is not None or not folder.is_dir():
        return cost.most_usd
    lock = FileLock(folder / LOCK_NAME)
    is_running = True
    # A folder that was replaced by a link, or is read-only, cannot be locked.
    with suppress(InputError, OSError):
        is_running = not lock.try_acquire()
    try:
        if is_running and cost.budget_usd is not None:
            return cost.most_usd
        spent = budget_of_calls(workspace, folder).budget.spent
        counted = cost.recounted(spent.usd + cost.in_flight_usd)
        if not is_running:
            write_cost(workspace, counted)
        return counted.most_usd
    finally:
        lock.release()


def cost_at_start(workspace: Workspace, folder: Path) -> RecorderCost:
    """Returns the document for a recorder that is about to start, without its budget.

    Called before the recorder creates a journal.
    """
    cost = RecorderCost(folder=workspace.shown(folder))
    path = _document(workspace, cost)
    if path.exists():
        cost = read_json(path, RecorderCost)
    if not folder.is_dir() or not journals_in(folder):
        return RecorderCost(folder=cost.folder, deleted_usd=cost.most_usd)
    return msgspec.structs.replace(cost, budget_usd=None)


def write_cost(workspace: Workspace, cost: RecorderCost) -> None:
    """Writes the document of a folder, whose lock the caller holds."""
    write_json(_document(workspace, cost), cost)


def _document(workspace: Workspace, cost: RecorderCost) -> Path:
    return workspace.root / _DOCUMENTS / f"{content_hash(cost.folder)[:16]}.json"


def budget_of_calls(
    workspace: Workspace, folder: Path, *, unlisted: Price | None = None
) -> CallBudget:
    """Returns a budget without a limit, which counts the calls recorded in a folder so far.

    unlisted: the price of a model that no list has; None if its calls have no known cost.
    """

    def price_of(model: str) -> Price | None:
        return price_for(workspace, model) or unlisted

    budget = CallBudget(math.inf, price_of=functools.cache(price_of), usage_of=usage_of_call)
    for call in recorded_calls(journals_in(folder) if folder.is_dir() else ()):
        budget.add_cost_of(call)
    # A price that is missing may be added while the recorder is running.
    budget.price_of = price_of
    return budget
