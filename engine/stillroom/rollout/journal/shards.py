"""Splits a run into shards, one for each worker, and merges the shards into one output.

Each shard is an output file with its own journal, in the folder of the whole run's journal. A shard
begins with the recorded steps of its rollouts, so that any worker can do any rollout: a rerun
merges the shards of a killed run and splits the remaining rollouts again.
"""

import math
import shutil
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from stillroom.data.formats import decode_trajectory
from stillroom.errors import InputError
from stillroom.files import FileLock, write_json
from stillroom.lines import NewLines, read_lines
from stillroom.outputs import OutputHeldError
from stillroom.rollout.journal.finished import FinishedRows, finished_rows
from stillroom.rollout.journal.journal import (
    RolloutStore,
    journal_folder,
    journal_path,
    spent_on_record,
)
from stillroom.rollout.journal.records import (
    RECORD,
    FinishedRow,
    JournalContent,
    OutstandingRecord,
    Record,
    RecordedSteps,
    RolloutKey,
    UnconfirmedRecord,
    decoded_lines,
    read_journal,
)
from stillroom.teachers.budget import Budget, Cost, Outstanding
from stillroom.types import Trajectory, Usage

_WRITER_WAIT_S = 30.0
"""The maximum wait in seconds for a worker that is still alive after its driver was killed."""
_WRITER_POLL_S = 0.1
_Settings = dict[str, object]


@dataclass(frozen=True, slots=True)
class RunPart:
    """The part of a run that one process executes."""

    keys: frozenset[RolloutKey]
    budget: Budget
    """The budget of this part, which replaces the request's and counts only this part's costs."""


@dataclass(frozen=True, slots=True)
class RemainingBudget:
    """The dollars and tokens that are left of a budget; infinite where there is no limit."""

    usd: float = math.inf
    tokens: float = math.inf

    def minus(self, spent: Iterable[Cost]) -> "RemainingBudget":
        """Returns the budget that is left after these costs."""
        costs = list(spent)
        return RemainingBudget(
            self.usd - sum(cost.usd for cost in costs),
            self.tokens - sum(cost.tokens for cost in costs),
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's share of a run: its rollouts, its concurrency and its part of the budget."""

    number: int
    keys: tuple[RolloutKey, ...]
    concurrency: int
    max_concurrency: int
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """The calls, tokens and costs that an output file and its journal have on record."""

    calls: int
    usage: Usage
    cost_usd: float | None
    spent: Cost
    """The amount that counts against a budget, including interrupted calls."""
    lost: Outstanding
    """The part of `spent` for calls that killed workers had in flight."""

    def since(self, before: "RecordedCosts") -> "RecordedCosts":
        """Returns the costs that have been added since `before`."""
        usage = Usage(
            prompt_tokens=self.usage.prompt_tokens - before.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens - before.usage.completion_tokens,
        )
        has_cost = self.cost_usd is not None and before.cost_usd is not None
        cost_usd = (self.cost_usd or 0.0) - (before.cost_usd or 0.0) if has_cost else None
        spent = Cost(self.spent.tokens - before.spent.tokens, self.spent.usd - before.spent.usd)
        lost = Outstanding(
            self.lost.calls - before.lost.calls,
            Cost(usd=self.lost.worst.usd - before.lost.worst.usd),
        )
        return RecordedCosts(self.calls - before.calls, usage, cost_usd, spent, lost)


def split_into_shards(
    keys: Sequence[RolloutKey],
    *,
    workers: int,
    concurrency: int,
    max_concurrency: int,
    remaining: RemainingBudget,
) -> list[Shard]:
    """Splits the rollouts, the concurrency and the budget into shards whose shares add up.

    There are never more shards than rollouts, nor more than `concurrency`.
    """
    count = min(workers, concurrency, len(keys))
    shards: list[Shard] = []
    end = 0
    for number in range(count):
        shard_keys = tuple(keys[number::count])
        begin, end = end, end + len(shard_keys)
        shards.append(
            Shard(
                number,
                shard_keys,
                _integer_share(concurrency, number, count),
                _integer_share(max_concurrency, number, count),
                _budget_share(remaining, begin, end, len(keys)),
            )
        )
    return shards


def _integer_share(total: int, number: int, count: int) -> int:
    """Returns the integer share of shard `number` in a total that `count` shards split."""
    return total // count + (number < total % count)


def _budget_share(remaining: RemainingBudget, begin: int, end: int, total: int) -> RemainingBudget:
    """Returns the budget for the rollouts from `begin` to `end`, of `total` rollouts."""
    tokens = remaining.tokens
    if tokens < math.inf:
        # Differences of running totals that are rounded down, so that the shares add up.
        budget = int(tokens)
        tokens = budget * end // total - budget * begin // total
    return RemainingBudget(remaining.usd * (end - begin) / total, tokens)


def shard_output(output: Path, number: int) -> Path:
    """Returns the path of the file for a shard's rows."""
    return _folder(output) / f"{number:03}.jsonl"


def shard_run_folder(output: Path, number: int) -> Path:
    """Returns the path of a shard's run folder."""
    return _folder(output) / f"{number:03}.run"


def _folder(output: Path) -> Path:
    return journal_folder(output) / "shards"


@contextmanager
def shards_locked(output: Path) -> Generator[None]:
    """Locks the shards of an output. Raises InputError if another process has locked them."""
    lock = FileLock(_folder(output).with_name("shards.lock"))
    if not lock.try_acquire():
        raise InputError(
            f"another process is writing {output}",
            "wait for that run (`stillroom list-runs`), or choose another output",
        )
    try:
        yield
    finally:
        lock.release()


def prepare_shards(
    output: Path,
    settings: _Settings,
    shards: Sequence[Shard],
    recorded_steps: Mapping[RolloutKey, RecordedSteps],
) -> None:
    """Writes each shard's initial files, with the recorded steps of its rollouts.

    The folder is renamed into place when complete, so a kill leaves all of the steps or none.
    """
    unfinished = _folder(output).with_name("shards.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    for shard in shards:
        path = unfinished / shard_output(output, shard.number).name
        store = RolloutStore(path, settings)
        num_records = 0
        for key in shard.keys:
            for record in recorded_steps.get(key, RecordedSteps()).records(key):
                store.append(record)
                num_records += 1
        store.close(is_complete=False)
        write_json(_record_count_path(path), num_records)
    unfinished.rename(_folder(output))


def _record_count_path(path: Path) -> Path:
    """Returns the path of the file with the number of records that a shard's journal began with."""
    return path.with_suffix(".seed")


def merge_leftover_shards(output: Path, settings: _Settings) -> None:
    """Merges the shards that a killed run left behind, if there are any."""
    if _folder(output).is_dir():
        with shards_locked(output):
            merge_shards(output, settings)


def merge_shards(
    output: Path, settings: _Settings, *, requested: Collection[RolloutKey] | None = None
) -> FinishedRows:
    """Merges the shards into the output and its journal, and returns all finished rows.

    The journal is deleted if all `requested` rollouts are finished. A kill midway does no harm: no
    row is merged twice, and a step that is merged twice only counts twice against the budget.
    """
    folder = _folder(output)
    store = RolloutStore(output, settings)
    try:
        paths = sorted(folder.glob("[0-9]*.jsonl"))
        lost = sum((_merge_shard(path, settings, store) for path in paths), start=Outstanding())
        if lost.calls:
            store.record_lost(lost)
        for key in [key for key in store.recorded_steps if key in store.finished]:
            del store.recorded_steps[key]
    finally:
        is_complete = requested is not None and all(key in store.finished for key in requested)
        store.close(is_complete=is_complete)
    # Renamed before it is deleted, so that a kill in between leaves no half-deleted shards.
    merged = folder.with_name("shards.merged")
    shutil.rmtree(merged, ignore_errors=True)
    if folder.is_dir():
        folder.rename(merged)
        shutil.rmtree(merged, ignore_errors=True)
    return store.finished


def _merge_shard(path: Path, settings: _Settings, into: RolloutStore) -> Outstanding:
    """Merges a shard's rows, and the records that were added to its journal.

    Returns an upper bound on the calls that killed workers had in flight.
    """
    shard = _open_when_free(path, settings)
    try:
        for line in read_lines(path):
            _append_if_new(decode_trajectory(line.data), into)
        for record in _added_records(path):
            if isinstance(record, OutstandingRecord):
                continue
            into.append(record)
            if not isinstance(record, UnconfirmedRecord):
                # An entry in `recorded_steps` keeps the journal until this rollout is finished.
                key = RolloutKey(record.task_id, record.sample)
                into.recorded_steps.setdefault(key, RecordedSteps())
        return shard.lost
    finally:
        shard.close(is_complete=False)


def _added_records(path: Path) -> Iterator[Record]:
    """Yields the records of a shard's journal, without those of the output that it began with."""
    num_copied = msgspec.json.decode(_record_count_path(path).read_bytes(), type=int)
    records = decoded_lines(journal_path(path), RECORD, "a valid journal record")
    return islice(records, num_copied, None)


def _append_if_new(trajectory: Trajectory, into: RolloutStore) -> bool:
    """Appends a row unless the output already has this rollout; returns whether it was new."""
    is_new = RolloutKey(trajectory.task_id, trajectory.sample) not in into.finished
    if is_new:
        into.finish(trajectory)
    return is_new


def recorded_cost(output: Path, *, with_lost: bool) -> Cost:
    """Returns what the calls of an output's runs have cost, as rows, journals and shards record it.

    with_lost: includes the worst case of the calls in flight when the last run was killed, which
    the run that resumes it counts as its own. Raises DataError if a file is damaged.
    """
    finished, paths = finished_rows(output), sorted(_folder(output).glob("[0-9]*.jsonl"))
    for path in paths:
        for row in finished_rows(path).rows():
            finished.add(row)
    journal = read_journal(journal_path(output), finished)
    in_flight, lost = journal.outstanding, Outstanding()
    for path in paths:
        of_worker = JournalContent()
        for record in _added_records(path):
            (of_worker if isinstance(record, OutstandingRecord) else journal).add(record, finished)
        in_flight, lost = in_flight + of_worker.outstanding, lost + of_worker.lost
    spent = spent_on_record(finished, journal) + lost.worst
    return spent + in_flight.worst if with_lost else spent


def recorded_costs(path: Path, settings: _Settings) -> RecordedCosts:
    """Returns the costs that a shard has on record, once no process is writing to it."""
    store = _open_when_free(path, settings)
    store.close(is_complete=False)
    paid = store.paid()
    return RecordedCosts(paid.calls, paid.usage, paid.cost_usd, store.spent(), store.lost)


def _open_when_free(path: Path, settings: _Settings) -> RolloutStore:
    """Opens a shard's files once no process is writing to them.

    Ray stops the workers of a killed driver with a delay, so this waits for them.
    Raises InputError if a process is still writing to the files after that time.
    """
    deadline = time.monotonic() + _WRITER_WAIT_S
    while True:
        try:
            return RolloutStore(path, settings)
        except OutputHeldError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"a worker of an earlier run is still writing {path}",
                    "stop that run (`stillroom list-runs`, `ray list actors`), then start again",
                ) from error
        time.sleep(_WRITER_POLL_S)


def read_unmerged_shards(
    output: Path, finished: Mapping[RolloutKey, FinishedRow]
) -> tuple[dict[RolloutKey, FinishedRow], dict[RolloutKey, RecordedSteps]]:
    """Returns the rows of unmerged shards that are not `finished`, and the shards' recorded steps.

    Unmerged shards belong to a run that was killed or is still running. Nothing is written.
    """
    rows, steps = dict[RolloutKey, FinishedRow](), dict[RolloutKey, RecordedSteps]()
    for path in sorted(_folder(output).glob("[0-9]*.jsonl")):
        rows |= finished_rows(path)
        steps |= read_journal(journal_path(path), finished.keys() | rows.keys()).recorded_steps
    return {key: row for key, row in rows.items() if key not in finished}, steps


def copy_new_rows(tail: NewLines, into: RolloutStore) -> int:
    """Copies the rows that a worker has added to its shard since the last call.

    Returns how many of them were new.
    """
    return sum(_append_if_new(decode_trajectory(line), into) for line in tail.read())
