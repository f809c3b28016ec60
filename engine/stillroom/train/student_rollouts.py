"""The student answers: the rollouts of one iteration, and their exact tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.data.formats import Task
from stillroom.errors import DataError, EngineError, RunError
from stillroom.models.batches import TokenSequence, sampled_sequence
from stillroom.rollout.collect import (
    FailedRollout,
    Outcome,
    RolloutSpec,
    collect_rollouts,
    key_of,
)
from stillroom.rollout.records import RolloutKey
from stillroom.teachers.scores import TeacherScores
from stillroom.train.config import TrainConfig
from stillroom.train.session import Session, epoch_order
from stillroom.train.student_stage import StudentStage
from stillroom.train.teachers import Teachers
from stillroom.types import SamplingSettings, TeacherRecord, Trajectory

# Iterations' sampling seeds must not meet those of other training seeds.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One rollout of the student as tokens, with the log-probabilities it was sampled with."""

    tokens: TokenSequence
    sampler_logprobs: list[float]
    """Of the sampled tokens only, in order (nats)."""
    teacher: TeacherScores | None = None
    """What a served teacher said of them; None: one in this process is asked in the update."""
    dataset: int = 0
    """Which of `data.train_file` its prompt is from, and so which teacher is its own."""
    reward: float | None = None
    prompt: str = ""
    """Its task's id: rollouts of one prompt are a group."""


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """What became of a rollout, and what a served teacher says of it."""

    outcome: Outcome
    teacher: TeacherScores | None = None


def prompt_batches(tasks: Sequence[Task], config: TrainConfig) -> list[list[Task]]:
    """Returns the prompts of each iteration; a batch may reach into the next epoch."""
    size, seed = config.data.batch_size, config.trainer.seed
    stream = [
        tasks[index]
        for epoch in range(config.trainer.num_epochs)
        for index in epoch_order(len(tasks), epoch, seed)
    ]
    batches = [stream[start : start + size] for start in range(0, len(stream), size)]
    return batches[: config.trainer.max_steps]


async def sample_rollouts(
    session: Session,
    stage: StudentStage,
    teachers: Teachers,
    tasks: Sequence[Task],
    iteration: int,
) -> list[SampledRollout]:
    """Returns what became of the student's rollouts of the tasks, in the order of the tasks.

    A served teacher scores each as it ends, while others are still being sampled.
    """
    config = session.config
    sampling = SamplingSettings(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=config.trainer.seed * _SEED_STRIDE + iteration,
    )
    group = config.data.group_size
    specs = [RolloutSpec(t, i * group + g) for i, t in enumerate(tasks) for g in range(group)]
    done: dict[RolloutKey, SampledRollout] = {}

    async def keep(outcome: Outcome) -> None:
        told = await teachers.score(outcome)
        is_failed = isinstance(told, FailedRollout)
        done[key_of(outcome)] = SampledRollout(told) if is_failed else SampledRollout(outcome, told)
        session.stop_before_update(iteration)

    teacher = TeacherRecord(provider="student", model=config.model.path, settings=sampling)
    async with stage.policy(sampling, num_rollouts=len(specs)) as policy:
        arena = stage.arena(policy, teacher)
        # Beside those that are sampled there are those that a server scores.
        at_once = config.rollout.concurrency + teachers.num_scored_at_once
        await collect_rollouts(specs, arena, concurrency=at_once, on_outcome=keep)
    return [done[spec.key] for spec in specs]


def nothing_sampled(outcomes: Sequence[Outcome], iteration: int) -> EngineError:
    """Returns the error of an iteration that has nothing to learn from."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    if failed:
        return RunError(
            f"every rollout of iteration {iteration + 1} failed, the first with: "
            f"{failed[0].failure.message}",
            "mend tools.py or rewards.py, then start again",
        )
    return DataError(
        f"no rollout of iteration {iteration + 1} holds a sampled token: the prompts fill the "
        "context",
        "shorten the prompts, or raise rollout.max_context_window",
    )


def sequences_of(sampled: Sequence[SampledRollout]) -> list[SampledSequence]:
    """Returns the rollouts' exact tokens; one in which nothing was sampled teaches nothing."""
    sequences: list[SampledSequence] = []
    for one in sampled:
        rollout = one.outcome
        trace = rollout.tokens if isinstance(rollout, Trajectory) else None
        if isinstance(rollout, FailedRollout) or trace is None or not any(trace.sampled):
            continue
        marked = zip(trace.sampled, trace.logprobs, strict=True)
        logprobs = [logprob for is_sampled, logprob in marked if is_sampled]
        sequences.append(
            SampledSequence(
                sampled_sequence(trace),
                logprobs,
                one.teacher,
                reward=rollout.reward,
                prompt=rollout.task_id,
            )
        )
    return sequences
