"""Evaluates the student during training on the prompt files under `evals` in config.yml.

Every evaluation uses the same sampling seed, so that two steps differ only by the weights.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from stillroom.data.formats import Task, load_tasks
from stillroom.errors import ConfigError, InputError
from stillroom.evaluate.intervals import pass_at_k_estimate
from stillroom.policy.check import check_decoding
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    RolloutSpec,
    collect_rollouts,
    specs_for,
)
from stillroom.settings import Workspace
from stillroom.train.config.request import TrainingPlan
from stillroom.train.config.sections import EvalSection
from stillroom.train.loop.student_environment import StudentEnvironment, open_student_environment
from stillroom.train.student.model import Student
from stillroom.types import SamplingSettings, TeacherRecord

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TrainingEvaluations:
    """The evaluations of one training run, with the tools and models that they use."""

    workspace: Workspace
    plan: TrainingPlan
    student: Student
    reporter: Reporter
    prompts: Mapping[str, Sequence[Task]]
    """The prompts of each evaluation, by name."""
    judged: dict[str, Sequence[Task]] = field(default_factory=dict[str, Sequence[Task]])
    """The prompts with a reward function, judge or expected answer; set by `check`."""

    def check(self) -> None:
        """Opens the evaluations' tools and rewards before training, to fail early.

        Raises:
            ConfigError: the student's weights are sharded over several processes.
            InputError: no task of an evaluation has a reward or an expected answer.
            ModelError: the student cannot be sampled.
        """
        if self.plan.config.evals and self.student.peers.is_sharded:
            raise ConfigError(
                "evals need all of the student's weights in each process, but fsdp2 shards them",
                "set launcher.strategy: ddp, or leave evals out and evaluate checkpoints "
                "(evaluate_model)",
            )
        if self.plan.config.evals:
            for note in check_decoding(self.student.loaded):
                self.reporter.note(note)
        for section in self.plan.config.evals:
            _run_in_own_loop(self._check_one, section)

    def measure(self, step: int, total: int) -> dict[str, float]:
        """Returns the metrics of the evaluations that are due and not cancelled."""
        started, metrics = time.monotonic(), dict[str, float]()
        was_training = self.student.module.training
        for section in self.plan.config.evals:
            if section.is_due(step, total):
                metrics |= self._measure_one(section, step)
        self.student.module.train(was_training)
        return {**metrics, "eval_s": time.monotonic() - started} if metrics else {}

    async def _check_one(self, section: EvalSection) -> None:
        """Keeps the prompts that can be judged. Raises InputError if there are none."""
        tasks = self.prompts[section.name]
        async with self._environment(tasks) as environment:
            judged = [task for task in tasks if environment.rewarder.has_reward(task)]
        if not judged:
            raise InputError(
                f"no reward function, judge or expected answer for any of the {len(tasks)} prompts "
                f"of the evaluation {section.name!r}, e.g. {tasks[0].task_id}",
                "write rewards.py next to config.yml, or put the answer in each row's "
                "metadata.expected_answer",
            )
        if len(judged) < len(tasks):
            self.reporter.note(
                f"the evaluation {section.name!r} skips {len(tasks) - len(judged)} of {len(tasks)} "
                "prompts, which have no reward function, judge or expected answer"
            )
        self.judged[section.name] = judged

    def _measure_one(self, section: EvalSection, step: int) -> dict[str, float]:
        """Returns the metrics of one evaluation; {} if the run is cancelled."""
        metrics = dict[str, float]()
        for temperature in sorted(set(section.temperature_of_k.values())):
            ks = [k for k, value in section.temperature_of_k.items() if value == temperature]
            answers = self._answers(section, max(ks), temperature)
            if answers is None:
                return {}
            metrics |= self._pass_metrics(section.name, step, ks, answers)
        return metrics

    def _answers(
        self, section: EvalSection, num: int, temperature: float
    ) -> "list[_Answer] | None":
        """Returns the outcomes of `num` rollouts of each prompt; None if the run is cancelled.

        Each process samples its share of them.
        """
        peers = self.student.peers
        config, tasks = self.plan.config, self.judged[section.name]
        specs = specs_for(tasks, num)
        share = [specs[index] for index in peers.share([1] * len(specs))]
        sampling = SamplingSettings(
            temperature=temperature, max_tokens=config.rollout.max_tokens, seed=config.trainer.seed
        )
        outcomes = _run_in_own_loop(self._sample, tasks, share, sampling) if share else []
        if peers.is_any(self.reporter.is_cancelled()):
            return None
        return [answer for part in peers.gathered(outcomes) for answer in part]

    def _environment(
        self, tasks: Sequence[Task]
    ) -> AbstractAsyncContextManager[StudentEnvironment]:
        return open_student_environment(
            self.workspace, self.plan, self.student, tasks, is_judge_optional=False
        )

    async def _sample(
        self, tasks: Sequence[Task], specs: Sequence[RolloutSpec], sampling: SamplingSettings
    ) -> "list[_Answer]":
        """Returns the outcomes of the rollouts, or of some of them if the run is cancelled."""
        config, answers = self.plan.config, list[_Answer]()
        teacher = TeacherRecord(provider="student", model=config.model.path, settings=sampling)
        async with (
            self._environment(tasks) as environment,
            environment.policy(sampling, num_rollouts=len(specs)) as policy,
        ):
            with anyio.CancelScope() as scope:

                async def add_answer(outcome: Outcome) -> None:
                    answers.append(_to_answer(outcome))
                    if self.reporter.is_cancelled():
                        scope.cancel()

                await collect_rollouts(
                    specs,
                    environment.rollout_context(policy, teacher),
                    concurrency=config.rollout.concurrency,
                    on_outcome=add_answer,
                )
        return answers

    def _pass_metrics(
        self, name: str, step: int, ks: Sequence[int], answers: "Sequence[_Answer]"
    ) -> dict[str, float]:
        """Returns pass@k for each k, and notes it with its confidence interval."""
        failures = [answer.failure for answer in answers if answer.failure is not None]
        judged = [(answer.task_id, answer.is_right) for answer in answers if not answer.failure]
        metrics = dict[str, float]()
        for k in ks:
            estimate = pass_at_k_estimate(judged, k)
            if estimate is None:
                self.reporter.note(
                    f"{name} at step {step}: pass@{k} was not measured, because rollouts failed, "
                    f"the first with: {failures[0]}"
                )
                continue
            metrics[f"eval/{name}/pass{k}"] = estimate.value
            low, high = estimate.low or 0.0, estimate.high or 0.0
            interval = f" [{low:.3f}, {high:.3f}]" if estimate.low is not None else ""
            self.reporter.note(
                f"{name} at step {step}: pass@{k} {estimate.value:.3f}{interval} on "
                f"{estimate.n} prompts"
            )
        if failures:
            metrics[f"eval/{name}/failed"] = len(failures) / len(answers)
        return metrics


@dataclass(frozen=True, slots=True)
class _Answer:
    """The outcome of one rollout."""

    task_id: str
    is_right: bool
    failure: str | None
    """The error that ended the rollout; it then counts as neither right nor wrong."""


def _to_answer(outcome: Outcome) -> _Answer:
    if isinstance(outcome, FailedRollout):
        return _Answer(outcome.key.task_id, is_right=False, failure=outcome.failure.message)
    return _Answer(outcome.task_id, is_right=outcome.success is True, failure=None)


def _run_in_own_loop(work: Callable[..., Awaitable[_T]], *arguments: object) -> _T:
    """Runs `work` in a thread with an event loop, since on-policy training runs in one itself."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(anyio.run, work, *arguments).result()


def read_prompts(plan: TrainingPlan) -> dict[str, Sequence[Task]]:
    """Returns the prompts of each evaluation. Raises DataError for an invalid row."""
    return {
        section.name: [
            plan.views.for_student(task)
            for task in load_tasks(plan.eval_files[section.name])[: section.n]
        ]
        for section in plan.config.evals
    }
