"""Lets the evaluated model answer: its rollouts on a list of tasks, within a budget."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stillroom.concurrency import background_tasks
from stillroom.errors import InputError
from stillroom.reporting import Reporter, cancel_when_asked, stop_if_cancelled
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.episode.collect import (
    Outcome,
    RolloutSpec,
    collect_rollouts,
    key_of,
)
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.request import RolloutPlan, sampling_settings
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
    """Whether a task without a reward is an error."""

    async def run(
        self,
        reporter: Reporter,
        *,
        on_open: Callable[[Sequence[str]], None] = lambda _notes: None,
    ) -> Answers:
        """Does the rollouts.

        `on_open` is called with notes for the user when the tools and the model are open, before
        the first rollout. Raises InputError if nothing judges a task.
        """
        plan, tasks = self.plan, [spec.task for spec in self.specs]
        sampling = sampling_settings(plan.options, temperature=self.temperature)
        done: dict[RolloutKey, Outcome] = {}
        async with open_rollout_context(plan, sampling, tasks, spending=self.spending) as context:
            on_open(context.notes)
            started = time.monotonic()
            unjudged = [task for task in tasks if not context.rewarder.can_judge(task)]
            if unjudged and self.must_judge:
                raise InputError(
                    f"nothing judges {len(unjudged)} of {len(tasks)} tasks, e.g. "
                    f"{unjudged[0].task_id}",
                    "give rewards=rewards.py, or put the answer in each row's "
                    "metadata.expected_answer",
                )

            async def keep(outcome: Outcome) -> None:
                done[key_of(outcome)] = outcome
                reporter.progress(len(done), len(tasks), unit="rollouts", phase=self.phase)

            async with background_tasks() as watching:
                # Not only between rollouts: one of them may take minutes.
                watching.start_soon(cancel_when_asked, reporter, watching.cancel_scope)
                stopped_by = await collect_rollouts(
                    self.specs, context, concurrency=plan.options.concurrency, on_outcome=keep
                )
        stop_if_cancelled(reporter)
        keys = [spec.key for spec in self.specs]
        seconds = time.monotonic() - started
        return Answers([done[key] for key in keys if key in done], stopped_by, seconds)
