"""Runs rollouts: tasks in, rows out, every failure counted, resumable after a kill."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import anyio

from stillroom.data.chat.tool_calls import is_from_text
from stillroom.errors import RunCancelledError, TeacherError
from stillroom.files import AppendLog
from stillroom.reporting import Reporter, cancel_when_asked
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.dry_run import dry_run
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    RolloutContext,
    RolloutSpecs,
    collect_rollouts,
)
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.journal.journal import RolloutStore, copy_rewards
from stillroom.rollout.journal.shards import RunPart, merge_leftover_shards
from stillroom.rollout.plan import (
    GenerationPlan,
    output_settings,
    plan_generation,
    sampling_settings,
)
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import (
    AnswererWatch,
    ProgressReport,
    RolloutOrigin,
    RolloutsResult,
    RolloutTally,
    failure_row,
    origin_of,
    record_run,
    rollouts_result,
)
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget, Outstanding
from stillroom.teachers.endpoint.client import Spending
from stillroom.teachers.run_limits import machine_usd_of
from stillroom.types import Trajectory

_MAX_FAILURES_WITHOUT_SUCCESS = 20
"""The run ends after this many failures without a success: its setup is probably broken."""


async def generate_rollouts(
    workspace: Workspace,
    request: GenerateRollouts,
    *,
    folder: Path,
    reporter: Reporter,
    part: RunPart | None = None,
) -> RolloutsResult | Forecast:
    """Runs the requested rollouts and returns the counts; `folder` is the run's own folder.

    A dry run returns a forecast instead. With a `part`, runs only that part's rollouts. Rollouts
    that the output already has are not repeated. If an earlier run left a rollout unfinished, its
    finished calls are replayed rather than paid for again. Raises RunCancelledError, with the
    counts so far, if the run is cancelled before it is done; the calls that were in flight have
    been recorded by then.
    """
    started = time.monotonic()
    # Planned before any file is opened, since the request may be invalid.
    plan = plan_generation(workspace, request)
    failed = plan.open_failed()
    with nullcontext() if failed is None else failed, plan.open_tasks(failed) as tasks:
        specs = RolloutSpecs(tasks, request.samples_per_prompt)
        if failed is not None and request.replays_student:
            specs = RolloutSpecs(tasks, failed.num_samples).where(failed.__contains__)
        if part is not None:
            specs = specs.where(part.keys.__contains__)
        origin = await origin_of(plan.rollouts)
        settings = output_settings(plan.rollouts, origin.weights, origin.chat_templates)
        if request.dry_run:
            return await dry_run(plan, tasks, specs, settings, failed)
        await anyio.to_thread.run_sync(merge_leftover_shards, plan.output, settings)
        tally = RolloutTally()
        store = RolloutStore(plan.output, settings, on_call=tally.count_call)
        todo = specs.where(lambda key: key not in store.finished)
        spending = Spending(plan.price, _budget(request, store, part, folder))
        try:
            if part is None:
                copy_rewards(plan.output, plan.rollouts.rewards_file)
            sampling = sampling_settings(request, temperature=request.temperature)
            async with open_rollout_context(
                plan.rollouts, sampling, tasks, spending=spending, failed=failed
            ) as context:
                RunFolder(folder).check_inputs()
                for note in [*context.notes, *_terms_notes(origin), *_lost_call_notes(store)]:
                    reporter.note(note)
                already_done = len(specs) - len(todo)
                progress = ProgressReport(
                    reporter, tally, already_done=already_done, total=len(specs)
                )
                run = _Run(store, tally, reporter, progress, plan)
                await run.collect(todo, context, folder)
        finally:
            # The journal of a part is kept, since it is merged into the journal of the whole run.
            store.close(is_complete=part is None and tally.rows == len(todo))
        rows = (store.finished[key] for key in specs.keys if key in store.finished)
        tally.restarted = store.num_restarted
        unconfirmed = Outstanding(worst=spending.budget.unconfirmed)
        if part is None:
            unconfirmed += store.lost_by_last_run
        seconds = time.monotonic() - started
        output = workspace.shown(plan.output)
        result = rollouts_result(output, len(specs), rows, tally, unconfirmed, seconds)
        record_run(result, plan, origin, store.finished.rows(), run_id=folder.name)
        if reporter.is_cancelled() and result.omitted:
            raise RunCancelledError(result)
        return result


class _Run:
    """Runs the rollouts of a run, and writes, counts and reports each outcome."""

    def __init__(
        self,
        store: RolloutStore,
        tally: RolloutTally,
        reporter: Reporter,
        progress: ProgressReport,
        plan: GenerationPlan,
    ) -> None:
        finished, judge = store.finished, plan.rollouts.judge
        self._watch = AnswererWatch(
            plan.request.model, (row.answered_by for row in finished.rows())
        )
        self._judge_watch = AnswererWatch(
            judge.file.model if judge else "",
            (row.judged_by for row in finished.rows()),
            recorded_in="the judge field of each row",
        )
        self._store, self._tally, self._reporter = store, tally, reporter
        self._has_calls_in_text = False
        self._progress, self._concurrency = progress, plan.request.concurrency

    async def collect(self, todo: RolloutSpecs, context: RolloutContext, folder: Path) -> None:
        """Runs the rollouts; each outcome is written to a file before it is counted."""
        with AppendLog(folder / "failures.jsonl") as failures:

            async def on_outcome(outcome: Outcome) -> None:
                """Writes an outcome to its file, then counts and reports it."""
                if isinstance(outcome, Trajectory):
                    self._store.finish(outcome)
                    self._note_answerers(outcome)
                    self._note_calls_in_text(outcome)
                else:
                    failures.append(failure_row(outcome))
                self._tally.add(outcome)
                self._stop_if_none_succeeds(outcome)
                self._progress.report(context.metrics())

            self._progress.report(context.metrics())
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_when_asked, self._reporter, group.cancel_scope)
                self._tally.stopped_by = await collect_rollouts(
                    todo,
                    context,
                    concurrency=self._concurrency,
                    on_outcome=on_outcome,
                    recorder_for=self._store.recorder,
                )
                group.cancel_scope.cancel()

    def _note_answerers(self, rollout: Trajectory) -> None:
        judged_by = rollout.judge.answered_by if rollout.judge is not None else ()
        for text in (
            *self._watch.new_model_notes(rollout.answered_by),
            *self._judge_watch.new_model_notes(judged_by),
        ):
            self._reporter.note(text)

    def _note_calls_in_text(self, rollout: Trajectory) -> None:
        """Notes once that an endpoint leaves tool calls in the text of its turns."""
        calls = (call for message in rollout.messages for call in message.get("tool_calls") or ())
        if not self._has_calls_in_text and any(map(is_from_text, calls)):
            self._has_calls_in_text = True
            self._reporter.note(
                f"the server of {rollout.teacher.model!r} left tool calls in the text, and "
                "Stillroom parsed them; to avoid this, start the server with a parser (vLLM: "
                "--enable-auto-tool-choice --tool-call-parser NAME; SGLang: --tool-call-parser "
                "NAME; llama.cpp: --jinja)"
            )

    def _stop_if_none_succeeds(self, outcome: Outcome) -> None:
        """Raises TeacherError once many rollouts have failed and none has ever succeeded."""
        num_failed = self._tally.failed.total()
        # A success of an earlier run counts too, since it shows that the setup can work.
        has_succeeded = self._progress.num_succeeded > 0
        is_hopeless = not has_succeeded and num_failed >= _MAX_FAILURES_WITHOUT_SUCCESS
        if isinstance(outcome, FailedRollout) and is_hopeless:
            raise TeacherError(
                f"the first {num_failed} rollouts all failed, the last with: "
                f"{outcome.failure.message}",
                "check the endpoint and the model's name; the same command resumes from here",
            )


def _budget(
    request: GenerateRollouts,
    store: RolloutStore,
    part: RunPart | None,
    folder: Path,
) -> Budget:
    """Returns the part's budget, or the run's, which counts the output's earlier costs."""
    if part is not None:
        part.budget.on_unconfirmed = store.record_unconfirmed
        part.budget.on_outstanding = store.record_outstanding
        return part.budget
    spent = store.spent()
    return Budget(
        usd=RunFolder(folder).limit_usd(request.budget_usd, spent.usd),
        tokens=request.max_total_tokens or math.inf,
        minutes=request.max_minutes or math.inf,
        spent=spent,
        other_usd=machine_usd_of(folder),
        on_unconfirmed=store.record_unconfirmed,
        on_outstanding=store.record_outstanding,
    )


def _terms_notes(origin: RolloutOrigin) -> Iterator[str]:
    """Yields notes on the providers' terms, for the user to read before the first paid call."""
    for model in origin.models:
        if model.terms is not None:
            yield (
                f"{model.location}'s terms may restrict training other models on its outputs: "
                f"see {model.terms}"
            )


def _lost_call_notes(store: RolloutStore) -> Iterator[str]:
    """Yields a note on the calls in flight when the last run, or one of its workers, was killed."""
    calls, worst = store.lost_by_last_run.calls, store.lost_by_last_run.worst
    if calls:
        usd = f" and ${worst.usd:.4g}" if worst.usd else ""
        yield (
            f"the previous run was killed with at most {calls} calls in flight, which may be paid "
            f"for twice: the budget counts up to {worst.tokens} tokens{usd} for these calls"
        )
