"""Runs rollouts on a Ray cluster: each worker does a shard, and the driver owns the output.

A worker runs `generate_rollouts` on its own files, so each model call is recorded before it is
used, whichever process is killed. The driver splits the rollouts into shards, copies finished rows
into the output as they come, and merges the rest when the shards have ended. The driver and the
workers must see the workspace under the same path.
"""

import functools
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio

from stillroom.errors import RunCancelledError, RunError
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import RolloutSpecs
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.journal.finished import FinishedRows
from stillroom.rollout.journal.journal import RolloutStore, copy_rewards
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.journal.shards import (
    RemainingBudget,
    merge_shards,
    prepare_shards,
    shards_locked,
    split_into_shards,
)
from stillroom.rollout.plan import output_settings, plan_generation
from stillroom.rollout.ray.cluster import ray_cluster
from stillroom.rollout.ray.shards import RayRunState, Round, ShardDriver
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import (
    ProgressReport,
    RolloutsResult,
    origin_of,
    record_run,
    rollouts_result,
)
from stillroom.rollout.run import generate_rollouts
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.teachers.budget import Cost

_SPLIT_LIMITS = {"budget_usd", "max_total_tokens"}
"""The limits that are split among the shards; max_minutes is not, since they run concurrently."""


async def generate_on_ray(
    workspace: Workspace, request: GenerateRollouts, *, folder: Path, reporter: Reporter
) -> RolloutsResult | Forecast:
    """Runs `generate_rollouts` split over `ray_workers` workers of a Ray cluster.

    Each worker gets a share of the rollouts, of the concurrency and of the budget; the unspent
    budget is split again in another round. If the worker of a shard dies, one other worker
    continues it; if that dies too, the rest of the shard counts as failed. Raises MissingExtraError
    without Ray, RunError if no cluster answers, and whatever `generate_rollouts` raises.
    """
    if request.dry_run:
        return await generate_rollouts(workspace, request, folder=folder, reporter=reporter)
    started = time.monotonic()
    plan = plan_generation(workspace, request)
    with plan.open_tasks() as tasks:
        keys = list(RolloutSpecs(tasks, request.samples_per_prompt).keys)
    origin = await origin_of(plan.rollouts)
    settings = output_settings(plan.rollouts, origin.weights, origin.chat_templates)
    state = RayRunState(plan, settings, folder, reporter)
    # Workers wait for the endpoint most of the time, so they do not need a core each.
    cluster = ray_cluster(request.ray_address, num_cpus=request.ray_workers)
    with cluster as ray, shards_locked(plan.output):
        finished = await _RayRun(ray, state, keys).run()
    if state.error is not None:
        raise state.error
    rows = (finished[key] for key in keys if key in finished)
    output, seconds = workspace.shown(plan.output), time.monotonic() - started
    result = rollouts_result(output, len(keys), rows, state.tally, state.unconfirmed, seconds)
    record_run(result, plan, origin, finished.rows(), run_id=folder.name)
    if reporter.is_cancelled() and result.omitted:
        raise RunCancelledError(result)
    return result


class _RayRun:
    """The driver's rounds: each splits the remaining rollouts into shards and merges their rows."""

    def __init__(self, ray: Any, state: RayRunState, keys: list[RolloutKey]) -> None:
        self._ray, self._state, self._keys = ray, state, keys
        self._output, self._request = state.plan.output, state.plan.request
        self._remaining: RemainingBudget | None = None
        """The budget that is left; None until the costs on record have been read."""

    async def run(self) -> FinishedRows:
        """Does the rollouts and returns all finished rows of the output."""
        state, keys = self._state, self._keys
        finished = await self._merge_shards()
        copy_rewards(self._output, state.plan.rollouts.rewards_file)
        already_done = sum(key in finished for key in keys)
        progress = ProgressReport(
            state.reporter, state.tally, already_done=already_done, total=len(keys)
        )
        progress.report({"workers": 0})
        num_workers = self._request.ray_workers
        while num_workers and not state.is_stopping():
            state.tally.stopped_by = None
            todo = [key for key in keys if key not in finished and key not in state.failed]
            if not todo:
                break
            round_ = await self._run_round(todo, num_workers, progress)
            finished = await self._merge_shards()
            state.tally.stopped_by = min(round_.stopped_by, default=None)
            # Each shard leaves part of its share unused, so fewer shards use more of the budget.
            is_split_again = bool(round_.stopped_by & _SPLIT_LIMITS)
            num_workers = round_.num_shards // 2 if is_split_again else 0
        state.tally.rows = sum(key in finished for key in keys) - already_done
        state.tally.failed = Counter(state.failed.values())
        return finished

    async def _merge_shards(self) -> FinishedRows:
        """Merges the shards into the output and returns all finished rows."""
        merge = functools.partial(merge_shards, requested=self._keys)
        return await anyio.to_thread.run_sync(merge, self._output, self._state.settings)

    async def _run_round(
        self, todo: list[RolloutKey], num_workers: int, progress: ProgressReport
    ) -> Round:
        """Splits the rollouts into shards and waits until all shards have ended."""
        state, settings = self._state, self._state.settings
        store = RolloutStore(self._output, settings)
        try:
            if self._remaining is None:
                self._remaining = self._remaining_budget(store.spent())
                state.unconfirmed += store.lost_by_last_run
            shards = split_into_shards(
                todo,
                workers=num_workers,
                concurrency=self._request.concurrency,
                max_concurrency=self._request.highest_concurrency,
                remaining=self._remaining,
            )
            await anyio.to_thread.run_sync(
                prepare_shards, self._output, settings, shards, store.recorded_steps
            )
            self._note_missing_cpus(len(shards))
            round_ = Round(store, len(shards), progress)
            driver = ShardDriver(self._ray, state, round_)
            async with anyio.create_task_group() as group:
                for shard in shards:
                    group.start_soon(driver.run_shard, shard)
        finally:
            store.close(is_complete=False)
        if round_.num_lost == round_.num_shards and not state.tally.rows:
            state.stop(
                RunError(
                    "every Ray worker died before it finished a rollout",
                    f"read {state.folder / 'failures.jsonl'} and the workers' logs "
                    "(`ray list actors`); the same command resumes from here",
                )
            )
        self._remaining = self._remaining.minus(round_.spent)
        return round_

    def _remaining_budget(self, spent: Cost) -> RemainingBudget:
        """Returns the request's budget minus the output's recorded costs."""
        limit_usd = RunFolder(self._state.folder).limit_usd(self._request.budget_usd, spent.usd)
        budget = RemainingBudget(limit_usd, self._request.max_total_tokens or math.inf)
        return budget.minus([spent])

    def _note_missing_cpus(self, num_shards: int) -> None:
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < num_shards:
            self._state.note(
                f"the Ray cluster has {cpus} CPUs for {num_shards} workers of one CPU each; "
                "the remaining workers wait for a free CPU"
            )
