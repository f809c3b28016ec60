"""Drives the shards of a rollout run on Ray: their workers, their rows and their costs."""

import functools
import math
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec

from stillroom import __version__
from stillroom.errors import EngineError, FailureClass, RunCancelledError, RunError, leaf_of
from stillroom.files import AppendLog
from stillroom.lines import NewLines, read_lines
from stillroom.reporting import Reporter
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.journal.shards import (
    RecordedCosts,
    RemainingBudget,
    RunPart,
    Shard,
    copy_new_rows,
    recorded_costs,
    shard_output,
    shard_run_folder,
)
from stillroom.rollout.plan import GenerationPlan
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import FailureRow, ProgressReport, RolloutsResult, RolloutTally
from stillroom.rollout.run import generate_rollouts
from stillroom.secrecy.commands import secrets_of_commands
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget, Cost, Outstanding
from stillroom.teachers.providers import IN_PROCESS

_ATTEMPTS = 2
"""The number of attempts at a shard; a new worker takes over when one dies."""
_POLL_S = 0.2
_STOP_WAIT_S = 30.0
"""The timeout in seconds for a worker to stop and to record its calls in flight."""
_FAILURE = msgspec.json.Decoder(FailureRow)


@dataclass(frozen=True, slots=True)
class ShardJob:
    """The job of one worker: a request, and its share of the rollouts and of the budget."""

    workspace: str
    """The path of the driver's workspace, which the worker's node must have too."""
    request: dict[str, Any]
    """The JSON form of a `GenerateRollouts` with the shard's own output and concurrency."""
    folder: str
    """The path of the shard's run folder."""
    keys: tuple[RolloutKey, ...]
    usd: float
    tokens: float
    minutes: float
    version: str
    """The driver's version of stillroom, which the worker must have too."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The secrets of MCP servers' command lines; keys of endpoints are not sent."""


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """The outcome of a worker's job: a result, or the error that stops the run."""

    result: RolloutsResult | None
    spent: Cost
    """The amount that counts against the budget, including interrupted calls."""
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The latest metrics of a worker, and its notes so far."""

    metrics: Mapping[str, float]
    notes: tuple[str, ...]


class ShardWorker:
    """The Ray actor of a shard; its other methods run on other threads while `run` works."""

    def __init__(self) -> None:
        self._reporter = _LatestReports()

    def run(self, job: ShardJob) -> ShardOutcome:
        """Runs the shard and returns its outcome."""
        budget = Budget(usd=job.usd, tokens=job.tokens, minutes=job.minutes)
        try:
            _check_node(job)
            work = functools.partial(
                generate_rollouts,
                folder=Path(job.folder),
                reporter=self._reporter,
                part=RunPart(frozenset(job.keys), budget),
            )
            request = GenerateRollouts.model_validate(job.request)
            result: Any = anyio.run(work, Workspace(Path(job.workspace), job.secrets), request)
        except RunCancelledError as cancelled:
            result = cancelled.result
        except EngineError as error:
            return ShardOutcome(None, budget.spent, error)
        except BaseExceptionGroup as group:
            # An error raised inside a task group arrives wrapped in exception groups.
            error = leaf_of(group.subgroup(EngineError))
            if not isinstance(error, EngineError):
                raise
            return ShardOutcome(None, budget.spent, error)
        return ShardOutcome(result, budget.spent)

    def progress(self) -> WorkerProgress:
        """Returns the latest metrics and all notes."""
        return WorkerProgress(dict(self._reporter.latest_metrics), tuple(self._reporter.notes))

    def cancel(self) -> None:
        """Asks `run` to stop; it then records the calls in flight and returns."""
        self._reporter.stop()


class _LatestReports:
    """A reporter that keeps a run's metrics and notes until the driver fetches them."""

    def __init__(self) -> None:
        self.latest_metrics: dict[str, float] = {}
        self.notes: list[str] = []
        self._is_stopped = False

    def progress(
        self, done: int, total: int, *, unit: str, phase: str, eta_s: float | None = None
    ) -> None:
        """Does nothing: the driver counts rows and failures itself."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the latest values."""
        self.latest_metrics = dict(values)

    def note(self, text: str) -> None:
        """Keeps a note."""
        self.notes.append(text)

    def alarms(self, current: Sequence[str]) -> None:
        """Does nothing: only training has alarms."""

    def stop(self) -> None:
        """Makes `is_cancelled` return True from now on."""
        self._is_stopped = True

    def is_cancelled(self) -> bool:
        """Returns whether the run has been asked to stop."""
        return self._is_stopped


def _check_node(job: ShardJob) -> None:
    """Raises RunError if the node lacks the driver's workspace or has a different version."""
    if not Path(job.folder).parent.is_dir():
        raise RunError(
            f"the driver's workspace {job.workspace!r} does not exist on the Ray node "
            f"{platform.node()!r}",
            "keep the workspace on a file system that all nodes have under the same path",
        )
    if job.version != __version__:
        raise RunError(
            f"the Ray node {platform.node()!r} has stillroom {__version__}, the driver "
            f"{job.version}",
            "install the same version on all nodes",
        )


class RayRunState:
    """The state of a run that its shards share: its counts, and whether it has to stop."""

    def __init__(
        self, plan: GenerationPlan, settings: dict[str, object], folder: Path, reporter: Reporter
    ) -> None:
        self.plan, self.settings = plan, settings
        self.folder, self.reporter = folder, reporter
        self.started = time.monotonic()
        self.tally = RolloutTally()
        self.unconfirmed = Outstanding()
        """The most that may have been billed in addition to the tally, and the calls lost by a
        kill."""
        self.failed: dict[RolloutKey, str] = {}
        """The class of the failure of each failed rollout."""
        self.error: EngineError | None = None
        """The error that ended the run, if one did."""
        self._notes: set[str] = set()

    def note(self, text: str) -> None:
        """Forwards a note to the user, once even if several workers send it."""
        if text not in self._notes:
            self._notes.add(text)
            self.reporter.note(text)

    def stop(self, error: EngineError) -> None:
        """Makes all workers record their calls and stop; the run raises the first such error."""
        self.error = self.error or error

    def is_stopping(self) -> bool:
        """Returns whether the run has to stop, because of an error or because it was cancelled."""
        return self.error is not None or self.reporter.is_cancelled()


@dataclass(slots=True)
class Round:
    """The state of one round, which runs the shards of one split."""

    store: RolloutStore
    num_shards: int
    report: ProgressReport
    progress: dict[int, WorkerProgress] = field(default_factory=dict[int, WorkerProgress])
    """The latest progress of the workers that are running, by the number of their shard."""
    stopped_by: set[str] = field(default_factory=set[str])
    """The names of the limits that ended shards early."""
    spent: list[Cost] = field(default_factory=list[Cost])
    """The cost of each attempt at a shard, as it counts against the budget."""
    num_lost: int = 0
    """The number of shards whose workers all died."""


class _WorkerLostError(Exception):
    """Raised when a worker does not stop in time after its cancellation."""


class ShardDriver:
    """Runs the shards of a round on workers of the cluster."""

    def __init__(self, ray: Any, state: RayRunState, round_: Round) -> None:
        self._ray, self._state, self._round = ray, state, round_
        self._output, self._request = state.plan.output, state.plan.request

    async def run_shard(self, shard: Shard) -> None:
        """Runs one shard on up to two workers; the second continues it if the first dies.

        If both die, the rest of the shard counts as failed.
        """
        state, remaining = self._state, shard.remaining
        death: str | None = None
        tail = NewLines(shard_output(self._output, shard.number))
        for attempt in range(_ATTEMPTS):
            if attempt:
                state.note(
                    f"the worker of shard {shard.number} died, and another worker continues the "
                    f"shard: {death}"
                )
            death, spent = await self._attempt(shard, remaining, tail)
            self._round.spent.append(spent)
            if death is None or state.is_stopping():
                break
            remaining = remaining.minus([spent])
        if state.is_stopping():
            death = None
        self._round.num_lost += death is not None
        self._count_failures(shard, death)
        self._report()

    async def _attempt(
        self, shard: Shard, remaining: RemainingBudget, tail: NewLines
    ) -> tuple[str | None, Cost]:
        """Runs the shard on one worker; returns why the worker died, or None, and the cost."""
        path, settings = shard_output(self._output, shard.number), self._state.settings
        before = await anyio.to_thread.run_sync(recorded_costs, path, settings)
        worker = self._start_worker()
        outcome, death = None, None
        try:
            outcome = await self._wait_for_outcome(
                worker, self._job(shard, remaining), shard.number, tail
            )
        except self._ray.exceptions.RayTaskError as error:
            self._state.stop(
                RunError(
                    f"a Ray worker failed: {str(error.cause)[:500]}",
                    "the traceback is in the worker's log; the same command resumes from here",
                )
            )
        except (self._ray.exceptions.RayError, _WorkerLostError) as error:
            death = f"{type(error).__name__}: {str(error).strip()[:500]}"
        finally:
            self._ray.kill(worker)
            self._round.progress.pop(shard.number, None)
        after = await anyio.to_thread.run_sync(recorded_costs, path, settings)
        self._state.tally.rows += copy_new_rows(tail, self._round.store)
        return death, self._count_calls(outcome, after.since(before))

    async def _wait_for_outcome(
        self, worker: Any, job: ShardJob, number: int, tail: NewLines
    ) -> ShardOutcome:
        """Returns the outcome of a worker's shard, and reports progress until it arrives."""
        state, progress = self._state, self._round.progress
        outcome, next_progress = worker.run.remote(job), worker.progress.remote()
        stopped_at: float | None = None
        while not self._is_ready(outcome):
            now = time.monotonic()
            if state.is_stopping():
                if stopped_at is None:
                    worker.cancel.remote()
                    stopped_at = now
                # A worker that has not answered yet is still waiting for a free CPU.
                if number not in progress or now - stopped_at > _STOP_WAIT_S:
                    raise _WorkerLostError("the worker had not started, or did not stop")
            if self._is_ready(next_progress):
                progress[number] = self._ray.get(next_progress)
                next_progress = worker.progress.remote()
                for text in progress[number].notes:
                    state.note(text)
            state.tally.rows += copy_new_rows(tail, self._round.store)
            self._report()
            await anyio.sleep(_POLL_S)
        return await anyio.to_thread.run_sync(self._ray.get, outcome)

    def _is_ready(self, reference: Any) -> bool:
        ready, _waiting = self._ray.wait([reference], timeout=0)
        return bool(ready)

    def _start_worker(self) -> Any:
        """Starts the actor of a shard; Ray places it once a CPU is free."""
        gpus = 0.0
        if self._request.provider in IN_PROCESS:
            gpus = self._ray.cluster_resources().get("GPU", 0.0)
        actor = self._ray.remote(ShardWorker)
        options = actor.options(
            num_cpus=1,
            # With fewer GPUs than workers, several workers share each GPU.
            num_gpus=1 / math.ceil(self._request.ray_workers / gpus) if gpus else 0,
            max_restarts=0,
            # Three threads, so that `progress` and `cancel` are answered while `run` works.
            max_concurrency=3,
            scheduling_strategy="SPREAD",
        )
        return options.remote()

    def _job(self, shard: Shard, remaining: RemainingBudget) -> ShardJob:
        """Returns the job of a shard's worker."""
        changes: dict[str, Any] = {
            "output": str(shard_output(self._output, shard.number)),
            "concurrency": shard.concurrency,
            "max_concurrency": shard.max_concurrency,
            "ray_address": None,
        }
        minutes = math.inf
        if self._request.max_minutes is not None:
            minutes = self._request.max_minutes - (time.monotonic() - self._state.started) / 60
        workspace = self._state.plan.rollouts.workspace
        return ShardJob(
            workspace=str(workspace.root),
            secrets=secrets_of_commands(workspace.secrets),
            request={**self._request.model_dump(mode="json"), **changes},
            folder=str(shard_run_folder(self._output, shard.number)),
            keys=shard.keys,
            usd=remaining.usd,
            tokens=remaining.tokens,
            minutes=minutes,
            version=__version__,
        )

    def _count_calls(self, outcome: ShardOutcome | None, recorded: RecordedCosts) -> Cost:
        """Counts an attempt's calls as its worker reports them, or as recorded if the worker died.

        Returns the larger of the reported and the recorded cost.
        """
        state = self._state
        calls, usage, cost_usd = recorded.calls, recorded.usage, recorded.cost_usd
        reported = Cost()
        state.unconfirmed += recorded.lost
        if outcome is not None:
            reported = outcome.spent
            if outcome.error is not None:
                state.stop(outcome.error)
        if outcome is not None and outcome.result is not None:
            result = outcome.result
            calls, usage, cost_usd = result.calls, result.usage, result.cost_usd
            state.tally.restarted += result.restarted
            state.unconfirmed += Outstanding(worst=Cost(usd=result.unconfirmed_usd))
            if result.stopped_by is not None:
                self._round.stopped_by.add(result.stopped_by)
        state.tally.add_calls(calls, usage, cost_usd)
        return Cost(
            max(reported.tokens, recorded.spent.tokens), max(reported.usd, recorded.spent.usd)
        )

    def _count_failures(self, shard: Shard, death: str | None) -> None:
        """Counts and logs a shard's failed rollouts; after a `death` all unfinished ones failed."""
        path = shard_run_folder(self._output, shard.number) / "failures.jsonl"
        rows = [_FAILURE.decode(line.data) for line in read_lines(path)] if path.exists() else []
        latest = {RolloutKey(row.task_id, row.sample): row for row in rows}
        if death is not None:
            message = f"the Ray worker died {_ATTEMPTS} times: {death}"
            for task_id, sample in shard.keys:
                row = FailureRow(task_id, sample, 0, FailureClass.INTERNAL, message)
                latest.setdefault(RolloutKey(task_id, sample), row)
        state = self._state
        with AppendLog(state.folder / "failures.jsonl") as failures:
            for key, row in latest.items():
                if key not in self._round.store.finished:
                    failures.append(row)
                    state.failed[key] = row.kind
                    state.tally.last_failure = row.message
        state.tally.failed = Counter(state.failed.values())

    def _report(self) -> None:
        """Reports the run's progress, summed over the running workers and those that have ended."""
        live: Counter[str] = Counter()
        for progress in self._round.progress.values():
            live.update(progress.metrics)
        self._round.report.report({**live, "workers": len(self._round.progress)})
