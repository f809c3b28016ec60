"""What a rollout run comes to, counted as it goes on."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stillroom.lineage import write_manifest
from stillroom.rollout.episode.collect import FailedRollout, Outcome
from stillroom.rollout.journal.records import FinishedRow
from stillroom.rollout.origin import RolloutOrigin, with_answerers
from stillroom.rollout.request import GenerateRollouts
from stillroom.teachers.budget import Outstanding
from stillroom.types import SampledTurn, Usage, total_usd


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
    output: Path,
    request: GenerateRollouts,
    origin: RolloutOrigin,
    finished: Iterable[FinishedRow],
    *,
    run_id: str,
) -> None:
    """Writes the manifest of a run's output, whose rows, earlier runs' included, are given."""
    write_manifest(
        output,
        operation="generate_rollouts",
        inputs=[*origin.inputs, *with_answerers(origin.models, finished)],
        request=request.model_dump(mode="json"),
        counts={"requested": result.requested, "rows": result.succeeded, "failed": result.failed},
        run_id=run_id,
    )
