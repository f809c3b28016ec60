"""Samples the student's rollouts of one iteration and returns their exact tokens."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType

import anyio

from stillroom.data.formats import Task
from stillroom.data.instruction import UNCHANGED, PromptViews
from stillroom.errors import DataError, EngineError, RunCancelledError, RunError
from stillroom.models.batches import sampled_sequence
from stillroom.models.reread.rereading import ByteReading, ReadingPair
from stillroom.reporting import background_tasks, cancel_when_asked
from stillroom.rollout.episode.collect import (
    FailedRollout,
    Outcome,
    RolloutSpec,
    collect_rollouts,
    key_of,
)
from stillroom.rollout.journal.records import RolloutKey
from stillroom.serving.scoring import TeacherScores
from stillroom.train.config.resume import CarriedRollout
from stillroom.train.config.schema import DistillConfig
from stillroom.train.loop.rows import epoch_order
from stillroom.train.loop.session import Session
from stillroom.train.loop.student_environment import StudentEnvironment, open_served_student
from stillroom.train.on_policy.student_policy import (
    StudentPolicy,
    StudentRollout,
    limits_at,
)
from stillroom.train.on_policy.teachers import PromptReplacer, Teachers, teacher_prompt_replacer
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.collective import Collective
from stillroom.types import SamplingSettings, TeacherRecord, TokenTrace, Trajectory

MAX_FAILED = 0.5
"""The share of failed rollouts above which an iteration is not trained on."""
# The sampling seeds of iterations must not coincide with those of other training seeds.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """A finished rollout in the teacher's tokens, with a served teacher's scores."""

    outcome: Outcome
    rollout: StudentRollout
    """The rollout's iteration, seed and limits."""
    teacher: TeacherScores | None = None
    teacher_trace: TokenTrace | None = None
    """The rollout in the teacher's tokens; None: the student's tokens."""
    is_left_out: bool = False
    """Whether it is skipped, because it is longer than the teacher's context."""


def prompt_batches(tasks: Sequence[Task], config: DistillConfig) -> list[list[Task]]:
    """Returns the prompts of each iteration; a batch may span two epochs.

    Each batch has prompts of the datasets in proportion to their sizes, rounded.
    """
    size, seed = config.data.batch_size, config.trainer.seed
    stream = [
        task
        for epoch in range(config.trainer.num_epochs)
        for task in _mix_datasets(tasks, epoch, seed)
    ]
    batches = [stream[start : start + size] for start in range(0, len(stream), size)]
    return batches[: config.trainer.max_steps]


def _mix_datasets(tasks: Sequence[Task], epoch: int, seed: int) -> list[Task]:
    """Returns an epoch's tasks, each dataset shuffled and spread evenly over the epoch."""
    positions: list[tuple[float, int, Task]] = []
    for dataset in sorted({task.dataset for task in tasks}):
        members = [task for task in tasks if task.dataset == dataset]
        order = epoch_order(len(members), epoch, seed)
        positions += [
            ((n + 0.5) / len(members), dataset, members[index]) for n, index in enumerate(order)
        ]
    return [task for _, _, task in sorted(positions, key=lambda position: position[:2])]


@dataclass(frozen=True, slots=True)
class IterationRollouts:
    """The rollouts of one iteration: finished ones, and those that continue in the next."""

    ended: list[SampledRollout]
    """The finished rollouts, in the order in which they were started."""
    carried: list[CarriedRollout]
    """The unfinished rollouts that continue in the next iteration."""
    num_dropped: int
    """The number of rollouts dropped because of rollout.max_staleness."""

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of the finished rollouts."""
        return [one.outcome for one in self.ended]


async def sample_rollouts(
    session: Session[DistillConfig],
    environment: StudentEnvironment,
    teachers: Teachers,
    batches: Sequence[Sequence[Task]],
    iteration: int,
    *,
    carried: Sequence[CarriedRollout],
) -> IterationRollouts:
    """Samples the new rollouts of an iteration and continues the `carried` ones.

    A served teacher scores each rollout when it ends, while others are still being sampled. With
    rollout.max_staleness 0, and in the last iteration, every rollout is sampled to its end.
    """
    config = session.config
    num_new = len(batches[iteration]) * config.data.group_size
    new = [CarriedRollout(iteration=iteration, index=i, turns=[]) for i in range(num_new)]
    all_started = dict(_start_rollout(config, batches, each) for each in [*carried, *new])
    started = _own_share(session.student.peers, all_started)
    done: dict[RolloutKey, SampledRollout] = {}
    replace = teacher_prompt_replacer(environment)

    async def score_and_keep(outcome: Outcome) -> None:
        key = key_of(outcome)
        done[key] = await _score_rollout(
            outcome, started[key], teachers, replace, environment.views
        )
        if session.is_cancelled:
            raise RunCancelledError

    sampling = SamplingSettings(
        temperature=config.rollout.temperature, max_tokens=config.rollout.max_tokens
    )
    record = TeacherRecord(provider="student", model=config.model.path, settings=sampling)
    may_continue = config.rollout.max_staleness and iteration + 1 < len(batches)
    num_stragglers = int(num_new * config.rollout.stragglers) if may_continue else 0
    # While waiting for a server that is down, no outcome would reveal a cancellation.
    scope = anyio.CancelScope()
    opening = _open_policy(session, environment, sampling, started, teachers, num_stragglers)
    try:
        with scope:
            async with background_tasks() as group, opening as policy:
                group.start_soon(cancel_when_asked, session.reporter, scope)
                await collect_rollouts(
                    [
                        RolloutSpec(environment.views.for_student(rollout.task), key.sample)
                        for key, rollout in started.items()
                    ],
                    environment.rollout_context(
                        policy, record, max_turns=limits_at(config, iteration).max_turns
                    ),
                    # Rollouts being scored by a server overlap with others being sampled.
                    concurrency=config.rollout.concurrency + teachers.num_scored_at_once,
                    on_outcome=score_and_keep,
                    recorder_for=started.__getitem__,
                )
    except* RunCancelledError:
        # Raised again by `stop_before_update` below, which all processes must reach first.
        pass
    session.stop_before_update(session.step)
    for part in session.student.peers.gathered(done):
        done |= part
    oldest = iteration + 1 - config.rollout.max_staleness
    return _iteration_rollouts(all_started, done, oldest=oldest)


def _iteration_rollouts(
    started: Mapping[RolloutKey, StudentRollout],
    done: Mapping[RolloutKey, SampledRollout],
    *,
    oldest: int,
) -> IterationRollouts:
    """Returns the rollouts in the order in which they were started, not in which they ended.

    oldest: the first iteration whose unfinished rollouts continue in the next one.
    """
    # Only the process that sampled a rollout knows its turns, so entries of `done` from other
    # processes replace the copies made here before sampling.
    rollouts = {
        key: done[key].rollout if key in done else rollout for key, rollout in started.items()
    }
    stopped = [rollout for rollout in rollouts.values() if rollout.is_stopped]
    carried = [rollout.to_carried() for rollout in stopped if rollout.iteration >= oldest]
    return IterationRollouts(
        ended=[done[key] for key, rollout in rollouts.items() if not rollout.is_stopped],
        carried=carried,
        num_dropped=len(stopped) - len(carried),
    )


async def _score_rollout(
    outcome: Outcome,
    rollout: StudentRollout,
    teachers: Teachers,
    replace: PromptReplacer | None,
    views: PromptViews,
) -> SampledRollout:
    """Returns a finished rollout in the teacher's tokens, with a served teacher's scores."""
    trace = outcome.tokens if isinstance(outcome, Trajectory) else None
    if not isinstance(outcome, Trajectory) or trace is None or not any(trace.sampled):
        return SampledRollout(outcome, rollout)
    dataset = rollout.task.dataset
    if (pair := teachers.pairs.get(dataset)) is not None:
        if dataset not in teachers.served:
            return SampledRollout(outcome, rollout)
        reread = _tokenize_for_teacher(pair, outcome, trace, rollout.task, views).tokens
        teacher_trace = TokenTrace(
            ids=reread.ids, sampled=reread.trained, logprobs=[0.0] * len(reread.ids)
        )
        scores = await teachers.score(outcome, teacher_trace, dataset)
        if isinstance(scores, FailedRollout):
            return SampledRollout(scores, rollout)
        # Tokenized again in the update: a ByteReading is too large to send to other processes.
        return SampledRollout(outcome, rollout, scores)
    teacher_trace = replace and replace(rollout.task, trace, outcome.tools)
    if not teachers.fits_teacher_context(teacher_trace or trace, dataset):
        return SampledRollout(outcome, rollout, is_left_out=True)
    scores = await teachers.score(outcome, teacher_trace or trace, dataset)
    if isinstance(scores, FailedRollout):
        return SampledRollout(scores, rollout)
    return SampledRollout(outcome, rollout, scores, teacher_trace)


def _own_share(
    peers: Collective, rollouts: Mapping[RolloutKey, StudentRollout]
) -> dict[RolloutKey, StudentRollout]:
    """Returns the rollouts that this process samples; those of one prompt stay together."""
    prompt_of = {key: (rollout.iteration, key.task_id) for key, rollout in rollouts.items()}
    prompts = list(dict.fromkeys(prompt_of.values()))
    own_prompts = {prompts[index] for index in peers.share([1] * len(prompts))}
    return {key: rollout for key, rollout in rollouts.items() if prompt_of[key] in own_prompts}


def _start_rollout(
    config: DistillConfig, batches: Sequence[Sequence[Task]], carried: CarriedRollout
) -> tuple[RolloutKey, StudentRollout]:
    """Returns a new or carried rollout, with the seed and limits of its first iteration."""
    iteration, index = carried.iteration, carried.index
    task = batches[iteration][index // config.data.group_size]
    seed = config.trainer.seed * _SEED_STRIDE + iteration
    limits = limits_at(config, iteration)
    rollout = StudentRollout(
        task,
        iteration,
        index,
        seed,
        limits,
        teacher_turns=limits.teacher_turns(f"{task.task_id}:{index}", seed=seed),
        turns=list(carried.turns),
        begun=carried.begun,
    )
    # The key differs from those of other iterations, in which the same task may occur.
    largest = config.data.batch_size * config.data.group_size
    return RolloutKey(task.task_id, iteration * largest + index), rollout


@asynccontextmanager
async def _open_policy(
    session: Session[DistillConfig],
    environment: StudentEnvironment,
    sampling: SamplingSettings,
    rollouts: Mapping[RolloutKey, StudentRollout],
    teachers: Teachers,
    num_stragglers: int,
) -> AsyncGenerator[StudentPolicy]:
    """Opens the policy that samples: the student, and the teacher if it writes some turns."""
    pass_lock = anyio.Lock()
    has_teacher_turns = any(rollout.teacher_turns for rollout in rollouts.values())
    async with AsyncExitStack() as stack:
        teacher_policy = None
        if has_teacher_turns:
            teacher = teachers.local[0].loaded
            teacher_policy = await stack.enter_async_context(
                environment.policy(
                    sampling, num_rollouts=len(rollouts), pass_lock=pass_lock, model=teacher
                )
            )
        student = (
            environment.policy(sampling, num_rollouts=len(rollouts), pass_lock=pass_lock)
            if environment.server is None
            else open_served_student(
                environment.server,
                session.student,
                session.config,
                sampling,
                run=session.run,
                variables=environment.variables,
            )
        )
        yield StudentPolicy(
            await stack.enter_async_context(student),
            {f"{key.task_id}:{key.sample}": rollout for key, rollout in rollouts.items()},
            max_tokens=sampling.max_tokens,
            views=environment.views,
            teacher=teacher_policy,
            num_stragglers=num_stragglers,
        )


def no_samples_error(sampled: IterationRollouts, iteration: int) -> EngineError:
    """Returns the error for an iteration without any sampled token to train on."""
    outcomes = sampled.outcomes
    if any(one.is_left_out for one in sampled.ended):
        return DataError(
            f"every rollout of iteration {iteration + 1} is longer than the teacher's context",
            "shorten teacher.context_file, lower rollout.max_context_window, or use a teacher "
            "with a longer context",
        )
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    if failed:
        return RunError(
            f"every rollout of iteration {iteration + 1} failed, the first with: "
            f"{failed[0].failure.message}",
            "correct tools.py, rewards.py or the teacher's server, then start again",
        )
    return DataError(
        f"no rollout of iteration {iteration + 1} has a sampled token: the prompts fill the "
        "context",
        "shorten the prompts, or raise rollout.max_context_window",
    )


def failed_iteration_error(sampled: IterationRollouts, iteration: int) -> EngineError | None:
    """Returns the error for an iteration in which too many rollouts failed, or None."""
    outcomes = sampled.outcomes
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    if len(failed) <= MAX_FAILED * len(outcomes):
        return None
    return RunError(
        f"{len(failed)} of {len(outcomes)} rollouts of iteration {iteration + 1} failed, more than "
        f"half, so the others were not trained on; the first with: {failed[0].failure.message}",
        "restart the server, or correct tools.py or rewards.py, then resume the run",
    )


def training_sequences_of(
    sampled: Sequence[SampledRollout],
    pairs: Mapping[int, ReadingPair] = MappingProxyType({}),
    views: PromptViews = UNCHANGED,
) -> list[TrainingSequence]:
    """Returns the rollouts' exact tokens, without rollouts that failed or have no sampled token.

    pairs: the student paired with each teacher of another tokenizer, by dataset. views: the
    student's and the teacher's views of a prompt.
    """
    sequences: list[TrainingSequence] = []
    for one in sampled:
        rollout = one.outcome
        trace = rollout.tokens if isinstance(rollout, Trajectory) else None
        if isinstance(rollout, FailedRollout) or trace is None or not any(trace.sampled):
            continue
        if one.is_left_out:
            continue
        dataset = one.rollout.task.dataset
        reading = None
        if (pair := pairs.get(dataset)) is not None:
            reading = _tokenize_for_teacher(pair, rollout, trace, one.rollout.task, views)
        sequences.append(
            TrainingSequence(
                sampled_sequence(trace, one.teacher_trace),
                trace.sampled_logprobs,
                one.teacher,
                reading,
                dataset,
                reward=rollout.reward,
                prompt=rollout.task_id,
            )
        )
    return sequences


def _tokenize_for_teacher(
    pair: ReadingPair, rollout: Trajectory, trace: TokenTrace, task: Task, views: PromptViews
) -> ByteReading:
    """Returns a finished rollout in the tokens of a teacher with another tokenizer."""
    sampled_messages = rollout.messages[len(views.student.apply_to(task.messages)) :]
    messages = [*views.teacher.apply_to(task.messages), *sampled_messages]
    return pair.read(trace, messages, rollout.tools, num_turns=rollout.turns)
