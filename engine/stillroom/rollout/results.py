"""The bookkeeping of a rollout run: its inputs, counts, progress, result and manifest."""

import math
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import anyio
import msgspec

from stillroom.errors import RunError
from stillroom.files import content_hash
from stillroom.lineage import AnsweringModel, FileRecord, ModelRecord, record_file, write_manifest
from stillroom.models.chat_template import TemplateSource
from stillroom.models.resolve import ModelLocation, identify
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import FailedRollout, Outcome
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.journal.finished import Answerers
from stillroom.rollout.journal.records import CallRecord, FinishedRow
from stillroom.rollout.plan import GenerationPlan, RolloutPlan
from stillroom.teachers.budget import Outstanding
from stillroom.types import Answerer, CallTotals, Usage, total_usd

FAILURES_FILE = "failures.jsonl"
_PHASE = "generate rollouts"
_REPORT_METRICS_EVERY_S = 1.0
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """The input files and the models of a rollout run, as its manifest records them."""

    inputs: Sequence[FileRecord]
    """The prompts file first, then the user's Python files and judge.yml."""
    models: Sequence[ModelRecord]
    """The policy first, then the judge if there is one."""
    chat_templates: Mapping[str, str] = field(default_factory=dict[str, str])
    """The hash of the text of each chat template that the request names, by option."""

    @property
    def weights(self) -> str | None:
        """The hash or commit of the policy's weights; None if it is not known."""
        return self.models[0].sha256 or self.models[0].revision


async def origin_of(plan: RolloutPlan) -> RolloutOrigin:
    """Returns the input files and models of a run, with their present hashes or commits."""
    return await anyio.to_thread.run_sync(_origin, plan)


def _origin(plan: RolloutPlan) -> RolloutOrigin:
    """Returns the inputs and models of a run; `origin_of` calls this in a thread."""
    refine, policy = plan.refine, plan.policy
    is_local = isinstance(policy, ModelLocation)
    models = [
        identify(plan.workspace, policy, role="policy")
        if is_local
        else plan.options.record("policy")
    ]
    if plan.judge is not None:
        models.append(plan.judge.file.record("judge"))
    if refine is not None and refine.student is not None:
        models.append(identify(plan.workspace, refine.student, role="student"))
    if refine is not None and refine.critic is not None:
        models.append(refine.critic.file.record("critic"))
    files = [record_file(file) for file in dict.fromkeys(plan.files)]
    student_template = refine.student_template if refine is not None else None
    templates = [each for each in (plan.template, student_template) if each is not None]
    return RolloutOrigin(files, models, _template_hashes(templates))


def _template_hashes(templates: Sequence[TemplateSource]) -> dict[str, str]:
    if not templates:
        return {}
    from stillroom.models.load import template_text

    return {each.option: content_hash(template_text(each)) for each in templates}


def with_answerers(models: Sequence[ModelRecord], rows: Iterable[FinishedRow]) -> list[ModelRecord]:
    """Returns the models of a run, each with the models that answered under its name."""
    num_rows = {"policy": Counter[Answerers](), "judge": Counter[Answerers]()}
    for row in rows:
        num_rows["policy"][row.answered_by] += 1
        num_rows["judge"][row.judged_by] += 1
    return [
        msgspec.structs.replace(model, answered_by=answering_models(num_rows[model.role]))
        if model.role in num_rows
        else model
        for model in models
    ]


def answering_models(rows_by_answerers: Mapping[Answerers, int]) -> list[AnsweringModel]:
    """Returns the models that answered, the one with the most rows first.

    `rows_by_answerers` holds, for each group of answerers, the number of rows that exactly this
    group answered. At most 20 models are returned, with at most 20 fingerprints each.
    """
    num_rows, fingerprints = Counter[str](), defaultdict[str, dict[str, None]](dict)
    for answerers, num in rows_by_answerers.items():
        num_rows.update(dict.fromkeys({answerer.model for answerer in answerers}, num))
        for answerer in answerers:
            if answerer.fingerprint is not None:
                fingerprints[answerer.model][answerer.fingerprint] = None
    return [
        AnsweringModel(model=model, rows=num, fingerprints=list(fingerprints[model])[:_MAX_SHOWN])
        for model, num in num_rows.most_common(_MAX_SHOWN)
    ]


class AnswererWatch:
    """Notices when a model other than the requested one answers, once for each such model.

    An endpoint may serve an alias, or change the model behind a name during a run. `before` are the
    models that answered earlier, and `recorded_in` tells users where to find `answered_by`.
    """

    def __init__(
        self, requested: str, before: Iterable[Answerers] = (), *, recorded_in: str = "each row"
    ) -> None:
        self._requested, self._recorded_in = requested, recorded_in
        self._seen = {answerer.model for answerers in before for answerer in answerers}

    def new_model_notes(self, answerers: Sequence[Answerer]) -> Iterator[str]:
        """Yields a note for each model that is new among those that answered a rollout."""
        for model in dict.fromkeys(answerer.model for answerer in answerers):
            if model in self._seen:
                continue
            if self._seen:
                before = ", ".join(sorted(self._seen)[:_MAX_SHOWN])
                yield (
                    f"the endpoint now answers requests for {self._requested!r} with {model!r} "
                    f"(before: {before}); see answered_by in {self._recorded_in}"
                )
            elif model != self._requested:
                yield f"the endpoint reports {model!r} for the requested model {self._requested!r}"
            self._seen.add(model)


class RolloutsResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a rollout run; requested = succeeded + failed + omitted always holds."""

    output: str
    requested: int
    succeeded: int
    """The number of requested rollouts with a row in the output, including earlier runs' rows."""
    failed: int
    failed_by_class: dict[str, int]
    omitted: int
    """The number of rollouts not done because the run was cancelled or reached a limit."""
    already_done: int
    """The number of succeeded rollouts that earlier runs finished; they are not paid for again."""
    rewarded: int
    """The number of succeeded rollouts with a reward."""
    mean_reward: float | None
    num_success: int
    truncated: int
    calls: int
    """The number of model and judge calls of this run, without replayed ones."""
    usage: Usage
    """The tokens of this run's calls."""
    cost_usd: float | None
    """The cost in USD of this run's calls; None if a price is unknown."""
    unconfirmed_usd: float
    """The maximum amount in US dollars that may have been billed in addition to cost_usd: for
    interrupted calls, and for replies without token counts. The budget counts it."""
    lost_calls: int
    """Upper bound on the calls in flight when a run was killed, which may be paid for twice; their
    worst-case cost is part of unconfirmed_usd."""
    answered_by: dict[str, int]
    """The number of succeeded rollouts by the model that answered, as the endpoint names it."""
    restarted: int
    """The number of rollouts restarted at their first turn, since tool state can't be replayed."""
    stopped_by: str | None
    """The limit that ended the run early (budget_usd, max_total_tokens or max_minutes), if any."""
    seconds: float
    """The seconds of the work; on another machine without installation and transfers."""
    taken_over: int | None = None
    """The number of this run's rollouts in which the teacher took over from a student; None if it
    refined none."""
    critic: CallTotals | None = None
    """The totals of this run's calls of a critic, which calls, usage and cost_usd count too; None
    without a critic."""
    last_failure: str | None = None
    """The message of the last rollout that failed, in its endpoint's or tool's own words."""


@dataclass(slots=True)
class RolloutTally:
    """The counts of a run in progress."""

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    """The number of failed rollouts by the class of their failure."""
    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    stopped_by: str | None = None
    restarted: int = 0
    taken_over: int | None = None
    critic: CallTotals | None = None
    last_failure: str | None = None

    def add(self, outcome: Outcome) -> None:
        """Counts a rollout that has ended."""
        if isinstance(outcome, FailedRollout):
            self.failed[outcome.failure.kind] += 1
            self.last_failure = outcome.failure.message
            return
        self.rows += 1
        if (refined := outcome.refined) is not None:
            self.taken_over = (self.taken_over or 0) + (refined.turn is not None)
            if refined.critic is not None:
                self.critic = (self.critic or CallTotals()) + refined.critic

    def count_call(self, record: CallRecord) -> None:
        """Counts a finished model call."""
        totals = CallTotals.of(record.turn)
        self.add_calls(totals.calls, totals.usage, totals.cost_usd)

    def add_calls(self, calls: int, usage: Usage, cost_usd: float | None) -> None:
        """Counts several finished model calls, with their summed tokens and cost."""
        self.calls += calls
        self.usage += usage
        self.cost_usd = total_usd((self.cost_usd, cost_usd))


class ProgressReport:
    """Reports a run's progress, and at most once a second its metrics."""

    def __init__(
        self, reporter: Reporter, tally: RolloutTally, *, already_done: int, total: int
    ) -> None:
        self._reporter, self._tally = reporter, tally
        self._already_done, self._total = already_done, total
        self._started = time.monotonic()
        self._reported_at = -math.inf

    @property
    def num_succeeded(self) -> int:
        """The number of requested rollouts that have a row, including those of earlier runs."""
        return self._already_done + self._tally.rows

    def report(self, live: Mapping[str, float]) -> None:
        """Reports the current progress and, if they are due, the metrics.

        `live` are metrics that are not in the tally: the allowed rate of calls, and the counts of
        running workers, which are added to the tally's.
        """
        failed = self._tally.failed.total() + int(live.get("failed", 0))
        done = self.num_succeeded + failed
        now_s = time.monotonic()
        if done == self._total or now_s - self._reported_at >= _REPORT_METRICS_EVERY_S:
            self._reported_at = now_s
            live_metrics = {name: value for name, value in live.items() if name != "cost_usd"}
            self._reporter.metrics(done, {**live_metrics, **self._metrics(live, failed, now_s)})
        self._reporter.progress(done, self._total, unit="rollouts", phase=_PHASE)

    def _metrics(self, live: Mapping[str, float], failed: int, now_s: float) -> dict[str, float]:
        """Returns the metrics of the tally, plus those of workers that are still running."""
        tally = self._tally
        calls = tally.calls + live.get("calls", 0)
        num_tokens = tally.usage.prompt_tokens + tally.usage.completion_tokens
        metrics: dict[str, float] = {
            "succeeded": self.num_succeeded,
            "failed": failed,
            "calls": calls,
            "calls_per_s": round(calls / max(now_s - self._started, 1e-3), 2),
            "tokens": num_tokens + live.get("tokens", 0),
        }
        # Left out before the first call: with an unknown price, a cost of 0 would stay on display.
        if tally.cost_usd is not None and calls:
            metrics["cost_usd"] = round(tally.cost_usd + live.get("cost_usd", 0.0), 6)
        return metrics


class FailureRow(msgspec.Struct, frozen=True):
    """A line of failures.jsonl in the run's folder, about one failed rollout."""

    task_id: str
    sample: int
    turns: int
    kind: str = msgspec.field(name="class")
    message: str


def failure_row(failed: FailedRollout) -> FailureRow:
    """Returns the line of failures.jsonl for a failed rollout."""
    task_id, sample = failed.key
    return FailureRow(task_id, sample, failed.turns, failed.failure.kind, failed.failure.message)


def rollouts_result(
    output: str,
    requested: int,
    rows: Iterable[FinishedRow],
    tally: RolloutTally,
    unconfirmed: Outstanding,
    seconds: float,
) -> RolloutsResult:
    """Returns the result of a run; `rows` are the requested rollouts' rows, of earlier runs too.

    `unconfirmed` is the most that may have been billed in addition to the tally, including the
    calls that were in flight when a run was killed.
    """
    failed = tally.failed.total()
    rewards, answered_by = array("d"), Counter[str]()
    num_rows = num_success = num_truncated = 0
    for row in rows:
        num_rows += 1
        num_success += row.success is True
        num_truncated += row.truncated
        if row.reward is not None:
            rewards.append(row.reward)
        answered_by.update({answerer.model for answerer in row.answered_by})
    return RolloutsResult(
        output=output,
        requested=requested,
        succeeded=num_rows,
        failed=failed,
        failed_by_class=dict(tally.failed),
        omitted=requested - num_rows - failed,
        already_done=num_rows - tally.rows,
        rewarded=len(rewards),
        mean_reward=fmean(rewards) if rewards else None,
        num_success=num_success,
        truncated=num_truncated,
        calls=tally.calls,
        usage=tally.usage,
        cost_usd=tally.cost_usd,
        unconfirmed_usd=round(unconfirmed.worst.usd, 6),
        lost_calls=unconfirmed.calls,
        answered_by=dict(answered_by),
        restarted=tally.restarted,
        stopped_by=tally.stopped_by,
        seconds=round(seconds, 3),
        taken_over=tally.taken_over,
        critic=tally.critic,
        last_failure=tally.last_failure,
    )


def no_success_error(result: RolloutsResult | Forecast) -> RunError | None:
    """Returns the error of a run in which no rollout succeeded; None if one did."""
    if isinstance(result, Forecast) or result.succeeded or not result.requested:
        return None
    reasons = [f"{num} failed with {kind}" for kind, num in result.failed_by_class.items()]
    if result.omitted:
        limit = f" because {result.stopped_by} was reached" if result.stopped_by else ""
        reasons.append(f"{result.omitted} were not started or not finished{limit}")
    last = f"; the last failure: {result.last_failure}" if result.last_failure else ""
    return RunError(
        f"none of {result.requested} rollouts succeeded: {', '.join(reasons)}{last}",
        f"read the run's {FAILURES_FILE}, fix what it reports, and start the run again with the "
        "same output",
    )


def record_run(
    result: RolloutsResult,
    plan: GenerationPlan,
    origin: RolloutOrigin,
    finished: Iterable[FinishedRow],
    *,
    run_id: str,
) -> None:
    """Writes the manifest of a run's output; `finished` are all rows of the output, old and new."""
    write_manifest(
        plan.output,
        operation="generate_rollouts",
        inputs=[*origin.inputs, *with_answerers(origin.models, finished)],
        request=plan.request.model_dump(mode="json"),
        counts={"requested": result.requested, "rows": result.succeeded, "failed": result.failed},
        run_id=run_id,
    )
