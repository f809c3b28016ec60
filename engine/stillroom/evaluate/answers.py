"""Runs the evaluated model's rollouts on a list of tasks, within a budget."""

import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.data.formats import Task
from stillroom.errors import InputError
from stillroom.reporting import Reporter, background_tasks, cancel_when_asked, stop_if_cancelled
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.episode.collect import (
    Outcome,
    RolloutSpec,
    collect_rollouts,
    key_of,
)
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.rollout.journal.records import (
    CallRecord,
    JudgeRecord,
    RolloutKey,
    decoded_lines,
)
from stillroom.rollout.plan import RolloutPlan, sampling_settings
from stillroom.rollout.rewards.matchers import AnswerMatch
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.teachers.endpoint.client import Spending
from stillroom.teachers.providers import Endpoint
from stillroom.types import Trajectory, total_usd

_REPORT_COST_EVERY_S = 1.0
_TRAJECTORY = msgspec.json.Decoder(Trajectory)


@dataclass(frozen=True, slots=True)
class Answers:
    """The outcomes of rollouts, in the order of their tasks."""

    outcomes: Sequence[Outcome]
    stopped_by: str | None = None
    """The limit that ended the rollouts early; None if all of them were run."""
    seconds: float = 0.0
    """The wall time of all rollouts in seconds, without loading the model and opening the tools.

    It is estimated if an earlier run finished some of them."""
    num_reused: int = 0
    """The number of rollouts that an earlier run finished."""
    num_unjudged: int = 0
    """The number of tasks that were left out, because nothing could judge their answers."""
    contained: AbstractSet[str] = frozenset()
    """The ids of the tasks with `answer_match: contained`: text around the expected answer is
    ignored."""
    num_omitted: int = 0
    """The number of rollouts that were not run, because a limit was reached."""
    cost_usd: float | None = 0.0
    """The cost of this run's calls in US dollars, of failed rollouts too; None if a price is
    unknown."""

    @property
    def rollouts(self) -> list[Trajectory]:
        """The finished rollouts, without those that failed because of infrastructure."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Trajectory)]


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """The part of an evaluation that runs the rollouts of one list of tasks at one temperature."""

    plan: RolloutPlan
    specs: Sequence[RolloutSpec]
    temperature: float
    phase: str
    spending: Spending | None
    skips_unjudged: bool = True
    """Whether a task without a reward function, judge or expected answer is left out."""

    async def run(
        self,
        reporter: Reporter,
        file: Path,
        *,
        on_open: Callable[[Sequence[str]], None] = lambda _notes: None,
    ) -> Answers:
        """Runs the rollouts and returns their outcomes.

        The rollouts that `file` already has are not repeated, and the finished calls of unfinished
        ones are replayed from its journal. `on_open` is called with notes for the user when the
        tools and the model are open, before the first rollout. Raises InputError if no task can be
        judged.
        """
        plan, tasks = self.plan, [spec.task for spec in self.specs]
        sampling = sampling_settings(plan.options, temperature=self.temperature)
        costs = _Costs(self, reporter)
        async with (
            open_rollout_context(plan, sampling, tasks, spending=self.spending) as context,
            _open_store(file, costs) as store,
        ):
            specs, unjudged = list(self.specs), set[str]()
            if self.skips_unjudged:
                specs, unjudged = judged_specs(specs, context.rewarder)
            contained = _contained_match_ids(specs, context.rewarder)
            on_open([*context.notes, *_task_notes(unjudged, contained, tasks)])
            wanted = {spec.key for spec in specs}
            reused = {
                key_of(rollout): rollout for rollout in _read(file) if key_of(rollout) in wanted
            }
            done: dict[RolloutKey, Outcome] = {**reused}
            costs.num_done, started = len(done), time.monotonic()

            async def on_outcome(outcome: Outcome) -> None:
                if isinstance(outcome, Trajectory):
                    store.finish(outcome)
                done[key_of(outcome)] = outcome
                costs.num_done = len(done)
                costs.report(is_last=len(done) == len(specs))
                reporter.progress(len(done), len(specs), unit="rollouts", phase=self.phase)

            async with background_tasks() as watching:
                # Checked during rollouts too, since one may take minutes.
                watching.start_soon(cancel_when_asked, reporter, watching.cancel_scope)
                stopped_by = await collect_rollouts(
                    [spec for spec in specs if spec.key not in done],
                    context,
                    concurrency=plan.options.concurrency,
                    on_outcome=on_outcome,
                    recorder_for=store.recorder,
                )
        stop_if_cancelled(reporter)
        seconds = time.monotonic() - started
        outcomes = [done[spec.key] for spec in specs if spec.key in done]
        return Answers(
            outcomes,
            stopped_by,
            seconds=seconds + _seconds_of(reused, min(plan.options.concurrency, len(specs))),
            num_reused=len(reused),
            num_unjudged=len(unjudged),
            contained=contained,
            num_omitted=len(specs) - len(done),
            cost_usd=costs.usd,
        )


class _Costs:
    """Sums and reports the cost of the calls of all rollouts, including those that fail later."""

    def __init__(self, part: EvaluationPart, reporter: Reporter) -> None:
        # The turns of in-process models have no cost.
        self._has_paid_turns = isinstance(part.plan.policy, Endpoint)
        self._spending, self._reporter, self._reported_at = part.spending, reporter, -math.inf
        self.usd: float | None = 0.0
        self.num_done = 0
        """The number of finished rollouts, which is the step of the reports."""

    def add(self, call: CallRecord) -> None:
        """Adds the cost of a call."""
        if self._has_paid_turns or isinstance(call, JudgeRecord):
            self.usd = total_usd((self.usd, call.turn.cost_usd))
            # Not only when a rollout ends: a run that is killed before has cost something, too.
            self.report()

    def report(self, *, is_last: bool = False) -> None:
        """Reports the cost so far, with the worst case of the calls in flight, once a second."""
        is_due = is_last or time.monotonic() - self._reported_at >= _REPORT_COST_EVERY_S
        if not is_due or self._spending is None or self._spending.price is None:
            return
        self._reported_at = time.monotonic()
        budget = self._spending.budget
        usd = budget.spent.usd + budget.reserved.usd
        self._reporter.metrics(self.num_done, {"cost_usd": round(usd, 6)})


@asynccontextmanager
async def _open_store(file: Path, costs: _Costs) -> AsyncGenerator[RolloutStore]:
    """Opens a file of rollouts with its journal; the cost of each new call is added to `costs`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The folder's name stands for the settings.
    store = RolloutStore(file, {}, on_call=costs.add)
    try:
        yield store
    finally:
        store.close(is_complete=False)


def _read(file: Path) -> Iterator[Trajectory]:
    """Yields the rollouts of a file. Raises DataError if it is damaged."""
    return decoded_lines(file, _TRAJECTORY, "a rollout")


def _seconds_of(reused: Mapping[RolloutKey, Trajectory], concurrency: int) -> float:
    """Returns about how long an earlier run took for rollouts, so many of them at once."""
    return sum(rollout.duration_s for rollout in reused.values()) / max(1, concurrency)


def judged_specs(
    specs: Sequence[RolloutSpec], rewarder: Rewarder
) -> tuple[list[RolloutSpec], set[str]]:
    """Returns the rollouts whose task can be judged, and the ids of the tasks that cannot.

    Raises InputError if no task has a reward function, judge or expected answer.
    """
    unjudged = {spec.task.task_id for spec in specs if not rewarder.has_reward(spec.task)}
    judged = [spec for spec in specs if spec.task.task_id not in unjudged]
    if specs and not judged:
        raise InputError(
            "no reward function, judge or expected answer for any task, e.g. "
            f"{specs[0].task.task_id}",
            "give rewards=rewards.py or judge=judge.yml, or put the answer in each row's "
            "metadata.expected_answer",
        )
    return judged, unjudged


def _contained_match_ids(specs: Sequence[RolloutSpec], rewarder: Rewarder) -> set[str]:
    """Returns the ids of the tasks whose `answer_match` is `contained`."""
    tasks = (spec.task for spec in specs)
    return {task.task_id for task in tasks if rewarder.match_of(task) is AnswerMatch.CONTAINED}


def _task_notes(
    unjudged: AbstractSet[str], contained: AbstractSet[str], tasks: Sequence[Task]
) -> list[str]:
    """Returns notes on tasks that are left out, and on tasks whose answers are judged leniently."""
    total, notes = len({task.task_id for task in tasks}), list[str]()
    if unjudged:
        notes.append(
            f"left out: {len(unjudged)} of {total} tasks (e.g. {min(unjudged)}), which have no "
            "reward function, judge or expected answer"
        )
    if contained:
        notes.append(
            f"for {len(contained)} of {total} tasks an answer counts as right if it contains the "
            "expected answer, whatever else it says (answer_match: contained); exact, normalised, "
            "numeric and choice are stricter"
        )
    return notes
