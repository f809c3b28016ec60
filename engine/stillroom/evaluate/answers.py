"""Lets the evaluated model answer: its rollouts on a list of tasks, within a budget."""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

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
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.plan import RolloutPlan, sampling_settings
from stillroom.rollout.rewards.matchers import AnswerMatch
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.teachers.endpoint.client import Spending
from stillroom.types import Trajectory


@dataclass(frozen=True, slots=True)
class Answers:
    """The outcomes of rollouts, in the order of their tasks."""

    outcomes: Sequence[Outcome]
    stopped_by: str | None = None
    """The limit that ended the work before all of them were done."""
    seconds: float = 0.0
    """How long all of them took together, once the model was loaded and the tools were open."""
    num_unjudged: int = 0
    """The number of tasks that were not answered, as nothing could have judged the answer."""
    num_contained: int = 0
    """The number of tasks whose expected answer has to be contained in the text, and no more."""
    num_omitted: int = 0
    """The number of other rollouts that were not done, since a limit was reached."""

    @property
    def rollouts(self) -> list[Trajectory]:
        """The rollouts that no infrastructure failure ended."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Trajectory)]


@dataclass(frozen=True, slots=True)
class Answering:
    """The part of an evaluation that answers one list of tasks at one temperature."""

    plan: RolloutPlan
    specs: Sequence[RolloutSpec]
    temperature: float
    phase: str
    spending: Spending | None
    must_judge: bool = True
    """Whether a task without a reward function, judge or expected answer is left out."""

    async def run(
        self,
        reporter: Reporter,
        *,
        on_open: Callable[[Sequence[str]], None] = lambda _notes: None,
    ) -> Answers:
        """Does the rollouts.

        `on_open` is called with notes for the user when the tools and the model are open, before
        the first rollout. Raises InputError if no task can be judged.
        """
        plan, tasks = self.plan, [spec.task for spec in self.specs]
        sampling = sampling_settings(plan.options, temperature=self.temperature)
        done: dict[RolloutKey, Outcome] = {}
        async with open_rollout_context(plan, sampling, tasks, spending=self.spending) as context:
            specs, unjudged = list(self.specs), set[str]()
            if self.must_judge:
                specs, unjudged = judged_specs(specs, context.rewarder)
            contained = _contained(specs, context.rewarder)
            on_open([*context.notes, *_notes_on(unjudged, contained, tasks)])
            started = time.monotonic()

            async def keep(outcome: Outcome) -> None:
                done[key_of(outcome)] = outcome
                reporter.progress(len(done), len(specs), unit="rollouts", phase=self.phase)

            async with background_tasks() as watching:
                # Not only between rollouts: one of them may take minutes.
                watching.start_soon(cancel_when_asked, reporter, watching.cancel_scope)
                stopped_by = await collect_rollouts(
                    specs, context, concurrency=plan.options.concurrency, on_outcome=keep
                )
        stop_if_cancelled(reporter)
        return Answers(
            [done[spec.key] for spec in specs if spec.key in done],
            stopped_by,
            seconds=time.monotonic() - started,
            num_unjudged=len(unjudged),
            num_contained=len(contained),
            num_omitted=len(specs) - len(done),
        )


def judged_specs(
    specs: Sequence[RolloutSpec], rewarder: Rewarder
) -> tuple[list[RolloutSpec], set[str]]:
    """Returns the rollouts of the tasks that something judges, and the ids of the other tasks.

    Raises InputError if none of them has a reward function, judge or expected answer.
    """
    unjudged = {spec.task.task_id for spec in specs if not rewarder.has_reward(spec.task)}
    judged = [spec for spec in specs if spec.task.task_id not in unjudged]
    if specs and not judged:
        raise InputError(
            f"no reward function, judge or expected answer for any of the {len(unjudged)} tasks, "
            f"e.g. {specs[0].task.task_id}",
            "give rewards=rewards.py or judge=judge.yml, or put the answer in each row's "
            "metadata.expected_answer",
        )
    return judged, unjudged


def _contained(specs: Sequence[RolloutSpec], rewarder: Rewarder) -> set[str]:
    """Returns the ids of the tasks whose answers are right if they contain the expected one."""
    tasks = (spec.task for spec in specs)
    return {task.task_id for task in tasks if rewarder.match_of(task) is AnswerMatch.CONTAINED}


def _notes_on(
    unjudged: AbstractSet[str], contained: AbstractSet[str], tasks: Sequence[Task]
) -> list[str]:
    total, notes = len({task.task_id for task in tasks}), list[str]()
    if unjudged:
        some = f"{len(unjudged)} of {total} tasks are left out"
        notes.append(f"{some}: no reward function, judge or expected answer, e.g. {min(unjudged)}")
    if contained:
        notes.append(
            f"{len(contained)} of {total} tasks are right if the text contains the expected answer,"
            " whatever else it says (answer_match: contained); exact, normalised, numeric and "
            "choice are stricter, and an answer of several parts is an object in expected_answer"
        )
    return notes
