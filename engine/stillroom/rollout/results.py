"""What a rollout run was made from and what it came to: its counts, its result, its manifest."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import msgspec

from stillroom.lineage import AnsweringModel, FileRecord, ModelRecord, record_file, write_manifest
from stillroom.models.identity import identify
from stillroom.models.resolve import ModelLocation
from stillroom.rollout.episode.collect import FailedRollout, Outcome
from stillroom.rollout.journal.records import FinishedRow
from stillroom.rollout.request import GenerationPlan, RolloutPlan
from stillroom.teachers.budget import Outstanding
from stillroom.teachers.providers import terms_of
from stillroom.types import Answerer, SampledTurn, Usage, total_usd

_MOST_SHOWN = 20

Answerers = tuple[Answerer, ...]
"""Who answered one row's calls."""


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """The files and the models of a rollout run: the policy first, then the judge."""

    inputs: Sequence[FileRecord]
    """The prompts first, then the user's Python files and the judge."""
    models: Sequence[ModelRecord]

    @property
    def weights(self) -> str | None:
        """Which weights a model in this process has; None where that is not known."""
        return self.models[0].sha256 or self.models[0].revision


async def origin_of(plan: RolloutPlan) -> RolloutOrigin:
    """Returns the files and the models of a run as they are now."""
    return await anyio.to_thread.run_sync(_origin, plan)


def _origin(plan: RolloutPlan) -> RolloutOrigin:
    judge_file = plan.judge.path if plan.judge is not None else None
    files = (plan.prompts_file, plan.tools_file, plan.rewards_file, judge_file)
    distinct = dict.fromkeys(file for file in files if file is not None)
    models = [_policy_record(plan)]
    if plan.judge is not None:
        models.append(plan.judge.record)
    return RolloutOrigin([record_file(file) for file in distinct], models)


def _policy_record(plan: RolloutPlan) -> ModelRecord:
    if isinstance(plan.policy, ModelLocation):
        return identify(plan.policy, role="policy")
    options = plan.options
    return ModelRecord(
        role="policy",
        name=options.model,
        location=options.base_url or options.provider,
        terms=terms_of(options.provider, options.base_url),
    )


def with_answerers(models: Sequence[ModelRecord], rows: Iterable[FinishedRow]) -> list[ModelRecord]:
    """Returns the models of a run, those that were asked with those that answered in their name."""
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


def answering_models(rows_of: Mapping[Answerers, int]) -> list[AnsweringModel]:
    """Returns the models that answered, by how many rows those have that answered together."""
    num_rows, fingerprints = Counter[str](), defaultdict[str, dict[str, None]](dict)
    for answerers, num in rows_of.items():
        num_rows.update(dict.fromkeys({one.model for one in answerers}, num))
        for one in answerers:
            if one.fingerprint is not None:
                fingerprints[one.model][one.fingerprint] = None
    return [
        AnsweringModel(model=model, rows=num, fingerprints=list(fingerprints[model])[:_MOST_SHOWN])
        for model, num in num_rows.most_common(_MOST_SHOWN)
    ]


class AnswererWatch:
    """Tells once of each model that an endpoint says answers for the one that was asked."""

    def __init__(
        self, asked: str, before: Iterable[Answerers] = (), *, whose: str = "each row"
    ) -> None:
        self._asked, self._whose = asked, whose
        self._seen = {one.model for answerers in before for one in answerers}

    def news(self, answerers: Sequence[Answerer]) -> Iterator[str]:
        """Yields what is to be told of who answered a rollout."""
        for model in dict.fromkeys(one.model for one in answerers):
            if model in self._seen:
                continue
            if self._seen:
                before = ", ".join(sorted(self._seen)[:_MOST_SHOWN])
                yield (
                    f"another model answers for {self._asked!r} now: {model!r}, before: {before}; "
                    f"{self._whose} says who answered it (answered_by)"
                )
            elif model != self._asked:
                yield f"{model!r} answers for {self._asked!r}, as the endpoint says"
            self._seen.add(model)


class RolloutsResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout run came to. requested = succeeded + failed + omitted, always."""

    output: str
    requested: int
    succeeded: int
    """Rows of the requested rollouts that are in the output, earlier runs' included."""
    failed: int
    failed_by_class: dict[str, int]
    omitted: int
    """Not done because the run was cancelled or came to a limit."""
    already_done: int
    """Of the succeeded: finished by an earlier run, not paid for again."""
    rewarded: int
    """Of the succeeded: those with a reward."""
    mean_reward: float | None
    num_success: int
    truncated: int
    calls: int
    """Model and judge calls of this run, replayed ones not counted."""
    usage: Usage
    """Tokens of this run's calls."""
    cost_usd: float | None
    """Of this run's calls; None where a price is unknown."""
    unconfirmed_usd: float
    """At worst: of calls that broke off and may have been billed, and of answers that did not say
    what they took; the budget counts it."""
    lost_calls: int
    """At most: calls that were out when a run was killed, and may be paid for twice; what they cost
    at worst is part of unconfirmed_usd."""
    answered_by: dict[str, int]
    """Of the succeeded: how many each model has a turn in, as the endpoint names it."""
    restarted: int
    """Rollouts begun again from the first turn: the state of their tools could not be replayed."""
    stopped_by: str | None
    """The limit that ended the run early: budget_usd, max_total_tokens or max_minutes."""
    seconds: float


@dataclass(slots=True)
class RolloutTally:
    """Counts of a run as it goes on."""

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    stopped_by: str | None = None
    restarted: int = 0

    def add(self, outcome: Outcome) -> None:
        """Counts a rollout that has ended."""
        if isinstance(outcome, FailedRollout):
            self.failed[outcome.failure.kind] += 1
        else:
            self.rows += 1

    def count_call(self, turn: SampledTurn) -> None:
        """Counts a finished model call."""
        self.calls += 1
        self.usage += turn.usage
        self.cost_usd = total_usd((self.cost_usd, turn.cost_usd))


def rollouts_result(
    output: str,
    requested: int,
    rows: list[FinishedRow],
    tally: RolloutTally,
    lost: Outstanding,
    seconds: float,
) -> RolloutsResult:
    """Returns what a run came to; `rows` are those of the requested rollouts, whoever did them.

    `lost` is what may have been billed beside that, with the calls that were out at a kill.
    """
    failed = tally.failed.total()
    rewards = [row.reward for row in rows if row.reward is not None]
    return RolloutsResult(
        output=output,
        requested=requested,
        succeeded=len(rows),
        failed=failed,
        failed_by_class=dict(tally.failed),
        omitted=requested - len(rows) - failed,
        already_done=len(rows) - tally.rows,
        rewarded=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        num_success=sum(row.success is True for row in rows),
        truncated=sum(row.truncated for row in rows),
        calls=tally.calls,
        usage=tally.usage,
        cost_usd=tally.cost_usd,
        unconfirmed_usd=round(lost.worst.usd, 6),
        lost_calls=lost.calls,
        answered_by=dict(Counter(m for row in rows for m in {a.model for a in row.answered_by})),
        restarted=tally.restarted,
        stopped_by=tally.stopped_by,
        seconds=round(seconds, 3),
    )


def put_on_record(
    result: RolloutsResult,
    plan: GenerationPlan,
    origin: RolloutOrigin,
    finished: Iterable[FinishedRow],
    *,
    run_id: str,
) -> None:
    """Writes the manifest of a run's output; `finished` are all of its rows, older ones too."""
    write_manifest(
        plan.output,
        operation="generate_rollouts",
        inputs=[*origin.inputs, *with_answerers(origin.models, finished)],
        request=plan.request.model_dump(mode="json"),
        counts={"requested": result.requested, "rows": result.succeeded, "failed": result.failed},
        run_id=run_id,
    )
