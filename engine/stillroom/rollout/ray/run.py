"""A rollout run on a Ray cluster: each worker does a shard, the driver owns the output.

A worker runs `generate_rollouts` on files of its own, so each of its model calls is on record
before it is used, whoever is killed when. The driver deals out, takes the rows in as they come and
brings the rest in at the end. Driver and workers see the workspace under the same path.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec

from stillroom import __version__
from stillroom.errors import EngineError, FailureClass, RunCancelledError, RunError
from stillroom.files import AppendLog
from stillroom.lines import read_lines
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import specs_for
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.rollout.journal.records import FinishedRow, RolloutKey
from stillroom.rollout.journal.shards import (
    RecordedCosts,
    RemainingBudget,
    Shard,
    ShardTail,
    merge_shards,
    prepare_shards,
    recorded,
    shard_output,
    shard_run_folder,
    shards_locked,
    split,
)
from stillroom.rollout.ray.cluster import ray_cluster
from stillroom.rollout.ray.worker import ShardEnd, ShardJob, ShardWorker, WorkerProgress
from stillroom.rollout.request import GenerateRollouts, output_settings, plan_generation
from stillroom.rollout.results import (
    RolloutsResult,
    RolloutTally,
    origin_of,
    put_on_record,
    rollouts_result,
)
from stillroom.rollout.run import PHASE, generate_rollouts
from stillroom.settings import Workspace
from stillroom.teachers.budget import Cost, Outstanding
from stillroom.teachers.providers import IN_PROCESS
from stillroom.types import Usage, total_usd

_ATTEMPTS = 2
"""Of a shard whose worker dies."""
_POLL_S = 0.2
_MEASURE_EVERY_S = 1.0
_STOP_WAIT_S = 30.0
"""How long a worker that was told to stop may take to put on record what it has."""
_SLICED_LIMITS = {"budget_usd", "max_total_tokens"}


async def generate_on_ray(
    workspace: Workspace, request: GenerateRollouts, *, folder: Path, reporter: Reporter
) -> RolloutsResult | Forecast:
    """Does what `generate_rollouts` does, split over `ray_workers` workers of a Ray cluster.

    Each has its slice of the rollouts, of what is done at once and of the budget; what a slice of
    the budget leaves is dealt out again. A shard whose worker dies goes on once with another one,
    then what is left of it counts as failed.
    Raises MissingExtraError without Ray, RunError where no cluster answers, and what
    `generate_rollouts` raises.
    """
    if request.dry_run:
        return await generate_rollouts(workspace, request, folder=folder, reporter=reporter)
    started = time.monotonic()
    plan = plan_generation(workspace, request)
    output = plan.output
    keys = [spec.key for spec in specs_for(plan.load_tasks(), request.samples_per_prompt)]
    origin = await origin_of(plan.rollouts)
    settings = output_settings(plan, origin.weights)
    # Workers wait for the endpoint most of the time, so they need no core each.
    cluster = ray_cluster(request.ray_address, num_cpus=request.ray_workers)
    with cluster as ray, shards_locked(output):
        run = _RayRun(ray, workspace, request, output, settings, folder, reporter)
        finished = await run.do(keys)
    if run.error is not None:
        raise run.error
    rows = [finished[key] for key in keys if key in finished]
    result = rollouts_result(
        workspace.shown(output),
        len(keys),
        rows,
        run.tally,
        run.lost,
        time.monotonic() - started,
    )
    put_on_record(result, plan, origin, finished.values(), run_id=folder.name)
    if reporter.is_cancelled() and result.omitted:
        raise RunCancelledError(result)
    return result


@dataclass(slots=True)
class _Round:
    """What is open while the shards of one deal are done."""

    store: RolloutStore
    num_shards: int
    progress: dict[int, WorkerProgress] = field(default_factory=dict[int, WorkerProgress])
    """Of the workers that work now."""
    stopped_by: set[str] = field(default_factory=set[str])
    spent: list[Cost] = field(default_factory=list[Cost])
    num_lost: int = 0


class _WorkerLostError(Exception):
    """A worker did not stop when it was told to."""


class _RayRun:
    """The driver's part of a run."""

    def __init__(
        self,
        ray: Any,
        workspace: Workspace,
        request: GenerateRollouts,
        output: Path,
        settings: dict[str, object],
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self._ray, self._workspace, self._request = ray, workspace, request
        self._output, self._settings = output, settings
        self._folder, self._reporter = folder, reporter
        self.tally = RolloutTally()
        self.lost = Outstanding()
        """What may have been billed beside what is on record, and the calls that were out."""
        self.error: EngineError | None = None
        self._failed: dict[RolloutKey, str] = {}
        self._remaining: RemainingBudget | None = None
        """What may still be spent; None until what is on record is known."""
        self._already_done = self._total = 0
        self._notes: set[str] = set()
        self._started = time.monotonic()
        self._measured_at = -math.inf

    async def do(self, keys: list[RolloutKey]) -> dict[RolloutKey, FinishedRow]:
        """Does the rollouts and returns all finished rows of the output."""
        finished = await self._merged(keys)
        self._total = len(keys)
        self._already_done = sum(key in finished for key in keys)
        self._report()
        workers = self._request.ray_workers
        while workers and not self._is_stopping():
            self.tally.stopped_by = None
            todo = [key for key in keys if key not in finished and key not in self._failed]
            if not todo:
                break
            now = await self._one_round(todo, workers)
            finished = await self._merged(keys)
            self.tally.stopped_by = min(now.stopped_by, default=None)
            # Slices are never used up to the last call: fewer of them use more of the whole.
            workers = now.num_shards // 2 if now.stopped_by & _SLICED_LIMITS else 0
        self.tally.rows = sum(key in finished for key in keys) - self._already_done
        self.tally.failed = Counter(self._failed.values())
        return finished

    async def _merged(self, keys: list[RolloutKey]) -> dict[RolloutKey, FinishedRow]:
        merge = functools.partial(merge_shards, requested=keys)
        return await anyio.to_thread.run_sync(merge, self._output, self._settings)

    async def _one_round(self, todo: list[RolloutKey], workers: int) -> _Round:
        """Deals what is to do out and waits until all shards have ended."""
        store = RolloutStore(self._output, self._settings)
        try:
            if self._remaining is None:
                self._remaining = _left(self._request, store.spent())
                self.lost += store.orphaned
            shards = split(
                todo,
                workers=workers,
                concurrency=self._request.concurrency,
                max_concurrency=self._request.most_at_once,
                remaining=self._remaining,
            )
            await anyio.to_thread.run_sync(
                prepare_shards, self._output, self._settings, shards, store.known
            )
            self._check_room(len(shards))
            now = _Round(store, len(shards))
            async with anyio.create_task_group() as group:
                for shard in shards:
                    group.start_soon(self._do_shard, shard, now)
        finally:
            store.close(is_complete=False)
        if now.num_lost == now.num_shards and not self.tally.rows:
            self._stop(
                RunError(
                    "every Ray worker died before it finished a rollout",
                    f"read {self._folder / 'failures.jsonl'} and the workers' logs "
                    "(`ray list actors`); the same command goes on from here",
                )
            )
        self._remaining = self._remaining.less(now.spent)
        return now

    async def _do_shard(self, shard: Shard, now: _Round) -> None:
        """Does a shard, with another worker where the first one dies; what is left has failed."""
        lost: str | None = None
        remaining = shard.remaining
        tail = ShardTail(shard_output(self._output, shard.number), now.store)
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._note(f"the worker of shard {shard.number} died, another goes on: {lost}")
            lost, spent = await self._attempt(shard, remaining, tail, now)
            now.spent.append(spent)
            if lost is None or self._is_stopping():
                break
            remaining = remaining.less([spent])
        if self._is_stopping():
            lost = None
        now.num_lost += lost is not None
        self._count_failures(shard, now.store, lost)
        self._report(now)

    async def _attempt(
        self, shard: Shard, remaining: RemainingBudget, tail: ShardTail, now: _Round
    ) -> tuple[str | None, Cost]:
        """Has one worker do the shard; returns what it died of, if it did, and what it spent."""
        path = shard_output(self._output, shard.number)
        before = await anyio.to_thread.run_sync(recorded, path, self._settings)
        job = self._job(shard, remaining)
        worker = self._start_worker()
        end, lost = None, None
        try:
            end = await self._ended(worker, job, shard.number, tail, now)
        except self._ray.exceptions.RayTaskError as error:
            self._stop(
                RunError(
                    f"a Ray worker broke off: {str(error.cause)[:500]}",
                    "the traceback is in the worker's log; the same command goes on from here",
                )
            )
        except (self._ray.exceptions.RayError, _WorkerLostError) as error:
            lost = f"{type(error).__name__}: {str(error).strip()[:500]}"
        finally:
            self._ray.kill(worker)
            now.progress.pop(shard.number, None)
        after = await anyio.to_thread.run_sync(recorded, path, self._settings)
        self.tally.rows += tail.take()
        return lost, self._count(end, after.since(before), now)

    async def _ended(
        self, worker: Any, job: ShardJob, number: int, tail: ShardTail, now: _Round
    ) -> ShardEnd:
        """Waits for the end of a worker's work and tells how far it is meanwhile."""
        ended, asked = worker.run.remote(job), worker.progress.remote()
        stopped_at: float | None = None
        while not self._is_ready(ended):
            clock = time.monotonic()
            if self._is_stopping():
                if stopped_at is None:
                    worker.cancel.remote()
                    stopped_at = clock
                # One that never answered waits for a place in the cluster.
                if number not in now.progress or clock - stopped_at > _STOP_WAIT_S:
                    raise _WorkerLostError("it did not stop when it was told to")
            if self._is_ready(asked):
                now.progress[number] = progress = self._ray.get(asked)
                asked = worker.progress.remote()
                for text in progress.notes:
                    self._note(text)
            self.tally.rows += tail.take()
            self._report(now)
            await anyio.sleep(_POLL_S)
        return await anyio.to_thread.run_sync(self._ray.get, ended)

    def _is_ready(self, reference: Any) -> bool:
        ready, _waiting = self._ray.wait([reference], timeout=0)
        return bool(ready)

    def _check_room(self, num_shards: int) -> None:
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < num_shards:
            self._note(
                f"the Ray cluster has {cpus} CPUs for {num_shards} workers of one CPU each; "
                "the others begin when there is room"
            )

    def _start_worker(self) -> Any:
        gpus = 0.0
        if self._request.provider in IN_PROCESS:
            gpus = self._ray.cluster_resources().get("GPU", 0.0)
        actor = self._ray.remote(ShardWorker)
        # Threads: `run` has one, and the others answer beside it.
        options = actor.options(
            num_cpus=1,
            num_gpus=1 / math.ceil(self._request.ray_workers / gpus) if gpus else 0,
            max_restarts=0,
            max_concurrency=3,
            scheduling_strategy="SPREAD",
        )
        return options.remote()

    def _job(self, shard: Shard, remaining: RemainingBudget) -> ShardJob:
        changes: dict[str, Any] = {
            "output": str(shard_output(self._output, shard.number)),
            "concurrency": shard.concurrency,
            "max_concurrency": shard.max_concurrency,
            "ray_address": None,
        }
        minutes = math.inf
        if self._request.max_minutes is not None:
            minutes = self._request.max_minutes - (time.monotonic() - self._started) / 60
        return ShardJob(
            workspace=str(self._workspace.root),
            request={**self._request.model_dump(mode="json"), **changes},
            folder=str(shard_run_folder(self._output, shard.number)),
            keys=shard.keys,
            usd=remaining.usd,
            tokens=remaining.tokens,
            minutes=minutes,
            version=__version__,
        )

    def _count(self, end: ShardEnd | None, since: RecordedCosts, now: _Round) -> Cost:
        """Counts what an attempt did; of a worker that died, what it has on record."""
        calls, usage, cost_usd = since.calls, since.usage, since.cost_usd
        reported = Cost()
        self.lost += since.lost
        if end is not None:
            reported = end.spent
            if end.error is not None:
                self._stop(end.error)
        if end is not None and end.result is not None:
            result = end.result
            calls, usage, cost_usd = result.calls, result.usage, result.cost_usd
            self.tally.restarted += result.restarted
            self.lost += Outstanding(worst=Cost(usd=result.unconfirmed_usd))
            if result.stopped_by is not None:
                now.stopped_by.add(result.stopped_by)
        tally = self.tally
        tally.calls += calls
        tally.usage += usage
        tally.cost_usd = total_usd((tally.cost_usd, cost_usd))
        return Cost(max(reported.tokens, since.spent.tokens), max(reported.usd, since.spent.usd))

    def _count_failures(self, shard: Shard, store: RolloutStore, lost: str | None) -> None:
        """Takes over the failures of a shard's rollouts, and those of a shard that was lost."""
        told = shard_run_folder(self._output, shard.number) / "failures.jsonl"
        rows = [_FAILURE.decode(line.data) for line in read_lines(told)] if told.exists() else []
        latest = {RolloutKey(row.task_id, row.sample): row for row in rows}
        if lost is not None:
            message = f"the Ray worker died {_ATTEMPTS} times: {lost}"
            for task_id, sample in shard.keys:
                row = _FailureRow(task_id, sample, 0, FailureClass.INTERNAL, message)
                latest.setdefault(RolloutKey(task_id, sample), row)
        with AppendLog(self._folder / "failures.jsonl") as failures:
            for key, row in latest.items():
                if key not in store.finished:
                    failures.append(row)
                    self._failed[key] = row.kind

    def _report(self, now: _Round | None = None) -> None:
        clock = time.monotonic()
        figures = self._figures(now.progress if now else {}, clock)
        done = self._already_done + self.tally.rows + int(figures["failed"])
        if done == self._total or clock - self._measured_at >= _MEASURE_EVERY_S:
            self._measured_at = clock
            self._reporter.metrics(done, figures)
        self._reporter.progress(done, self._total, unit="rollouts", phase=PHASE)

    def _figures(self, progress: Mapping[int, WorkerProgress], clock: float) -> dict[str, float]:
        """Returns the sums over the workers that work and those that have ended."""
        live: Counter[str] = Counter()
        for worker in progress.values():
            live.update(worker.figures)
        tally = self.tally
        calls = tally.calls + live.pop("calls", 0)
        seconds = max(clock - self._started, 1e-3)
        figures: dict[str, float] = {
            **live,
            "succeeded": self._already_done + tally.rows,
            "failed": len(self._failed) + live["failed"],
            "calls": calls,
            "calls_per_s": round(calls / seconds, 2),
            "tokens": _tokens(tally.usage) + live["tokens"],
            "workers": len(progress),
        }
        if tally.cost_usd is not None:
            figures["cost_usd"] = round(tally.cost_usd + live["cost_usd"], 6)
        return figures

    def _note(self, text: str) -> None:
        """Tells what several workers say only once."""
        if text not in self._notes:
            self._notes.add(text)
            self._reporter.note(text)

    def _stop(self, error: EngineError) -> None:
        """Has all workers put on record what they have and end; the first error is the run's."""
        self.error = self.error or error

    def _is_stopping(self) -> bool:
        return self.error is not None or self._reporter.is_cancelled()


class _FailureRow(msgspec.Struct, frozen=True):
    """A line of failures.jsonl."""

    task_id: str
    sample: int
    turns: int
    kind: str = msgspec.field(name="class")
    message: str


_FAILURE = msgspec.json.Decoder(_FailureRow)


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens


def _left(request: GenerateRollouts, spent: Cost) -> RemainingBudget:
    """Returns what the request's budget leaves beside what its output has cost before."""
    whole = RemainingBudget(request.budget_usd or math.inf, request.max_total_tokens or math.inf)
    return whole.less([spent])
