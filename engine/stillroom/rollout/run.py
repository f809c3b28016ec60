"""A rollout run: tasks in, rows out, every failure counted, resumable after a kill."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx

from stillroom.errors import RunCancelledError, TeacherError
from stillroom.files import AppendLog
from stillroom.reporting import Reporter
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.dry_run import dry_run
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    RolloutContext,
    RolloutSpec,
    collect_rollouts,
    specs_for,
)
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.rollout.journal.shards import RunPart, adopt_shards
from stillroom.rollout.request import (
    GenerateRollouts,
    RolloutPlan,
    output_settings,
    plan_generation,
    sampling_settings,
)
from stillroom.rollout.results import (
    AnswererWatch,
    RolloutOrigin,
    RolloutsResult,
    RolloutTally,
    origin_of,
    put_on_record,
    rollouts_result,
)
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget, Outstanding
from stillroom.teachers.endpoint.client import Spending
from stillroom.types import Trajectory

PHASE = "generate rollouts"
_CANCEL_POLL_S = 0.2
_MEASURE_EVERY_S = 1.0
_HOPELESS = 20
"""So many failures without a success, and the rest is not tried."""


async def generate_rollouts(
    workspace: Workspace,
    request: GenerateRollouts,
    *,
    folder: Path,
    reporter: Reporter,
    transport: httpx.AsyncBaseTransport | None = None,
    part: RunPart | None = None,
) -> RolloutsResult | Forecast:
    """Does the requested rollouts and returns the counts; `folder` is the run's own folder.

    A dry run returns what it would take. A `part` is the part that is done here.

    Rows that the output already has are not done again, and the finished calls of rollouts that an
    earlier run left unfinished are replayed, not paid for again.
    Raises RunCancelledError, with the counts so far, after what was in flight is on record.
    """
    started = time.monotonic()
    # Before any file is opened: what the request names may be refused.
    plan = plan_generation(workspace, request)
    output, tasks = plan.output, plan.load_tasks()
    specs = specs_for(tasks, request.samples_per_prompt)
    if part is not None:
        specs = [spec for spec in specs if spec.key in part.keys]
    tally, origin = RolloutTally(), await origin_of(plan.rollouts)
    settings = output_settings(plan, origin.weights)
    if request.dry_run:
        return await dry_run(plan, specs, settings)
    await anyio.to_thread.run_sync(adopt_shards, output, settings)
    store = RolloutStore(output, settings, on_turn=tally.count_call)
    todo = [spec for spec in specs if spec.key not in store.finished]
    spending = Spending(plan.price, _budget(request, store, part))
    try:
        sampling = sampling_settings(request, temperature=request.temperature)
        async with open_rollout_context(
            plan.rollouts, sampling, tasks, spending=spending, transport=transport
        ) as context:
            for note in [*context.notes, *_terms(origin), *_loss(store.orphaned)]:
                reporter.note(note)
            run = _Run(store, tally, reporter, len(specs) - len(todo), len(specs), plan.rollouts)
            await run.collect(todo, context, request.concurrency, folder)
    finally:
        # The journal of a part goes into that of the whole.
        store.close(is_complete=part is None and tally.rows == len(todo))
    rows = [store.finished[spec.key] for spec in specs if spec.key in store.finished]
    tally.restarted = store.num_restarted
    lost = Outstanding(worst=spending.budget.unconfirmed)
    if part is None:
        lost += store.orphaned
    seconds = time.monotonic() - started
    result = rollouts_result(workspace.shown(output), len(specs), rows, tally, lost, seconds)
    put_on_record(result, plan, origin, store.finished.values(), run_id=folder.name)
    if reporter.is_cancelled() and result.omitted:
        raise RunCancelledError(result)
    return result


class _Run:
    """The part of a rollout run between opening the files and closing them."""

    def __init__(
        self,
        store: RolloutStore,
        tally: RolloutTally,
        reporter: Reporter,
        already_done: int,
        total: int,
        plan: RolloutPlan,
    ) -> None:
        rows, judge = store.finished.values(), plan.judge
        self._watch = AnswererWatch(plan.options.model, (row.answered_by for row in rows))
        self._judge_watch = AnswererWatch(
            judge.file.model if judge else "",
            (row.judged_by for row in rows),
            whose="a row's judge",
        )
        self._store, self._tally, self._reporter = store, tally, reporter
        self._already_done, self._total = already_done, total
        self._started = time.monotonic()
        self._measured_at = -math.inf

    async def collect(
        self, todo: list[RolloutSpec], context: RolloutContext, concurrency: int, folder: Path
    ) -> None:
        with AppendLog(folder / "failures.jsonl") as failures:

            async def on_outcome(outcome: Outcome) -> None:
                if isinstance(outcome, Trajectory):
                    self._store.finish(outcome)
                    self._tell_who_answered(outcome)
                else:
                    failures.append(_failure_row(outcome))
                self._tally.add(outcome)
                self._stop_if_hopeless(outcome)
                self._report(context)

            self._report(context)
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch_for_cancel, group.cancel_scope)
                self._tally.stopped_by = await collect_rollouts(
                    todo,
                    context,
                    concurrency=concurrency,
                    on_outcome=on_outcome,
                    recorder_for=self._store.recorder,
                )
                group.cancel_scope.cancel()

    def _tell_who_answered(self, rollout: Trajectory) -> None:
        judged_by = rollout.judge.answered_by if rollout.judge is not None else ()
        for text in (*self._watch.news(rollout.answered_by), *self._judge_watch.news(judged_by)):
            self._reporter.note(text)

    def _stop_if_hopeless(self, outcome: Outcome) -> None:
        """Raises TeacherError once many rollouts have failed and none has ever succeeded."""
        tally = self._tally
        num_failed = tally.failed.total()
        has_succeeded = tally.rows or self._already_done
        if isinstance(outcome, FailedRollout) and not has_succeeded and num_failed >= _HOPELESS:
            raise TeacherError(
                f"the first {num_failed} rollouts all failed, the last with: "
                f"{outcome.failure.message}",
                "check the endpoint and the model's name; the same command goes on from here",
            )

    def _report(self, context: RolloutContext) -> None:
        tally = self._tally
        done = self._already_done + tally.rows + tally.failed.total()
        clock = time.monotonic()
        if done == self._total or clock - self._measured_at >= _MEASURE_EVERY_S:
            self._measured_at = clock
            self._reporter.metrics(done, {**self._figures(clock), **context.figures()})
        self._reporter.progress(done, self._total, unit="rollouts", phase=PHASE)

    def _figures(self, clock: float) -> dict[str, float]:
        tally = self._tally
        figures: dict[str, float] = {
            "succeeded": self._already_done + tally.rows,
            "failed": tally.failed.total(),
            "calls": tally.calls,
            "calls_per_s": round(tally.calls / max(clock - self._started, 1e-3), 2),
            "tokens": tally.usage.prompt_tokens + tally.usage.completion_tokens,
        }
        if tally.cost_usd is not None:
            figures["cost_usd"] = round(tally.cost_usd, 6)
        return figures

    async def _watch_for_cancel(self, scope: anyio.CancelScope) -> None:
        # A signal handler sets the flag, so there is no event to wait for.
        while not self._reporter.is_cancelled():  # noqa: ASYNC110
            await anyio.sleep(_CANCEL_POLL_S)
        scope.cancel()


def _budget(request: GenerateRollouts, store: RolloutStore, part: RunPart | None) -> Budget:
    """Returns what may be spent; what this output has cost before counts, but not in a part."""
    if part is not None:
        part.budget.on_unconfirmed = store.record_unconfirmed
        part.budget.on_outstanding = store.record_outstanding
        return part.budget
    return Budget(
        usd=request.budget_usd or math.inf,
        tokens=request.max_total_tokens or math.inf,
        minutes=request.max_minutes or math.inf,
        spent=store.spent(),
        on_unconfirmed=store.record_unconfirmed,
        on_outstanding=store.record_outstanding,
    )


def _terms(origin: RolloutOrigin) -> Iterator[str]:
    """Yields what is to be told before the first paid call."""
    for model in origin.models:
        if model.terms is not None:
            yield (
                f"{model.location}'s terms may restrict training other models on what it answers: "
                f"see {model.terms}"
            )


def _loss(orphaned: Outstanding) -> Iterator[str]:
    """Yields what is to be told of a run before this one, or a worker of it, that was killed."""
    calls, worst = orphaned.calls, orphaned.worst
    if calls:
        usd = f" and ${worst.usd:.4g}" if worst.usd else ""
        yield (
            f"the run before this one was killed with at most {calls} calls out, which may be paid "
            f"for twice: up to {worst.tokens} tokens{usd} count as spent for them"
        )


def _failure_row(failed: FailedRollout) -> dict[str, object]:
    return {
        "task_id": failed.key.task_id,
        "sample": failed.key.sample,
        "turns": failed.turns,
        "class": failed.failure.kind,
        "message": failed.failure.message,
    }
