"""Samples the student's rollouts of one iteration, and returns their exact tokens."""

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
from stillroom.teachers.scores import TeacherScores
from stillroom.train.config.resume import CarriedRollout
from stillroom.train.config.schema import DistillConfig
from stillroom.train.loop.session import Session, epoch_order
from stillroom.train.loop.student_environment import StudentEnvironment, open_served_student
from stillroom.train.on_policy.student_policy import (
    Limits,
    StudentPolicy,
    StudentRollout,
    limits_at,
)
from stillroom.train.on_policy.teachers import Reading, Teachers, reading_of_teacher
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.collective import Collective
from stillroom.types import SamplingSettings, TeacherRecord, TokenTrace, Trajectory

MOST_FAILED = 0.5
"""An iteration of whose rollouts a larger share failed is not trained on."""
# The sampling seeds of iterations must not coincide with those of other training seeds.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """A finished rollout as its teacher reads it and, with a served teacher, its scores."""

    outcome: Outcome
    rollout: StudentRollout
    """The iteration, seed and limits that it was sampled with."""
    teacher: TeacherScores | None = None
    reading: TokenTrace | None = None
    """The tokens as the teacher reads them; None: those of the rollout."""
    is_left_out: bool = False
    """Whether it is not trained on, because it is longer than the teacher's context."""


def prompt_batches(tasks: Sequence[Task], config: DistillConfig) -> list[list[Task]]:
    """Returns the prompts of each iteration, whose batch may reach into the next epoch.

    Each batch has the datasets' prompts in proportion to their sizes, rounded to whole prompts.
    """
    size, seed = config.data.batch_size, config.trainer.seed
    stream = [
        task for epoch in range(config.trainer.num_epochs) for task in _mixed(tasks, epoch, seed)
    ]
    batches = [stream[start : start + size] for start in range(0, len(stream), size)]
    return batches[: config.trainer.max_steps]


def _mixed(tasks: Sequence[Task], epoch: int, seed: int) -> list[Task]:
    """Returns an epoch's tasks, with each dataset shuffled and spread evenly over the epoch."""
    places: list[tuple[float, int, Task]] = []
    for dataset in sorted({task.dataset for task in tasks}):
        members = [task for task in tasks if task.dataset == dataset]
        order = epoch_order(len(members), epoch, seed)
        places += [
            ((place + 0.5) / len(members), dataset, members[index])
            for place, index in enumerate(order)
        ]
    return [task for _, _, task in sorted(places, key=lambda place: place[:2])]


@dataclass(frozen=True, slots=True)
class IterationRollouts:
    """The rollouts of one iteration: those that ended, and those that continue in the next."""

    ended: list[SampledRollout]
    """The rollouts that have ended, in the order in which they were begun."""
    carried: list[CarriedRollout]
    """The rollouts that continue in the next iteration."""
    num_dropped: int
    """The number of rollouts that took longer than rollout.max_staleness allows."""

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of the rollouts that have ended."""
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

    A served teacher scores each rollout as it ends, while others are still being sampled. With
    rollout.max_staleness 0, and in the last iteration, every rollout is sampled to its end.
    """
    config = session.config
    num_new = len(batches[iteration]) * config.data.group_size
    new = [CarriedRollout(iteration=iteration, index=i, turns=[]) for i in range(num_new)]
    all_begun = dict(_begun(config, batches, each) for each in [*carried, *new])
    begun = _sampled_here(session.student.peers, all_begun)
    done: dict[RolloutKey, SampledRollout] = {}
    reading = reading_of_teacher(environment)

    async def keep(outcome: Outcome) -> None:
        key = key_of(outcome)
        done[key] = await _scored(outcome, begun[key], teachers, reading, environment.views)
        if session.is_cancelled:
            raise RunCancelledError

    sampling = SamplingSettings(
        temperature=config.rollout.temperature, max_tokens=config.rollout.max_tokens
    )
    record = TeacherRecord(provider="student", model=config.model.path, settings=sampling)
    may_continue = config.rollout.max_staleness and iteration + 1 < len(batches)
    num_left_over = int(num_new * config.rollout.stragglers) if may_continue else 0
    # While a server that is down is waited for, no outcome shows that the run was cancelled.
    scope = anyio.CancelScope()
    opening = _open_policy(session, environment, sampling, begun, teachers, num_left_over)
    try:
        with scope:
            async with background_tasks() as group, opening as policy:
                group.start_soon(cancel_when_asked, session.reporter, scope)
                await collect_rollouts(
                    [
                        RolloutSpec(environment.views.for_student(rollout.task), key.sample)
                        for key, rollout in begun.items()
                    ],
                    environment.rollout_context(
                        policy, record, max_turns=limits_of(config, iteration).max_turns
                    ),
                    # Rollouts that a server scores are under way while others are being sampled.
                    concurrency=config.rollout.concurrency + teachers.num_scored_at_once,
                    on_outcome=keep,
                    recorder_for=begun.__getitem__,
                )
    except* RunCancelledError:
        # `stop_before_update` below raises it again: all processes must get there before one stops.
        pass
    session.stop_before_update(session.step)
    for part in session.student.peers.gathered(done):
        done |= part
    oldest = iteration + 1 - config.rollout.max_staleness
    return _ended_and_carried(all_begun, done, oldest=oldest)


def _ended_and_carried(
    begun: Mapping[RolloutKey, StudentRollout],
    done: Mapping[RolloutKey, SampledRollout],
    *,
    oldest: int,
) -> IterationRollouts:
    """Returns the rollouts in the order in which they were begun, whenever each of them ended.

    oldest: the first iteration whose unfinished rollouts continue in the next one.
    """
    # Only the process that sampled a rollout knows its turns, so the entries of `done` from other
    # processes replace the copies that were made here before sampling.
    rollouts = {
        key: done[key].rollout if key in done else rollout for key, rollout in begun.items()
    }
    stopped = [rollout for rollout in rollouts.values() if rollout.is_stopped]
    carried = [rollout.carried() for rollout in stopped if rollout.iteration >= oldest]
    return IterationRollouts(
        ended=[done[key] for key, rollout in rollouts.items() if not rollout.is_stopped],
        carried=carried,
        num_dropped=len(stopped) - len(carried),
    )


async def _scored(
    outcome: Outcome,
    rollout: StudentRollout,
    teachers: Teachers,
    reading: Reading | None,
    views: PromptViews,
) -> SampledRollout:
    """Returns a finished rollout with what its teacher reads and, if it is served, its scores."""
    trace = outcome.tokens if isinstance(outcome, Trajectory) else None
    if not isinstance(outcome, Trajectory) or trace is None or not any(trace.sampled):
        return SampledRollout(outcome, rollout)
    dataset = rollout.task.dataset
    if (pair := teachers.pairs.get(dataset)) is not None:
        if dataset not in teachers.served:
            return SampledRollout(outcome, rollout)
        reread = _reread(pair, outcome, trace, rollout.task, views).tokens
        own = TokenTrace(ids=reread.ids, sampled=reread.trained, logprobs=[0.0] * len(reread.ids))
        scores = await teachers.score(outcome, own, dataset)
        if isinstance(scores, FailedRollout):
            return SampledRollout(scores, rollout)
        # The reading is made again for the update: with its tables it is too large to be sent
        # to other processes.
        return SampledRollout(outcome, rollout, scores)
    own = reading(rollout.task, trace, outcome.tools) if reading is not None else None
    if not teachers.can_read(own or trace, dataset):
        return SampledRollout(outcome, rollout, is_left_out=True)
    scores = await teachers.score(outcome, own or trace, dataset)
    if isinstance(scores, FailedRollout):
        return SampledRollout(scores, rollout)
    return SampledRollout(outcome, rollout, scores, own)


def _sampled_here(
    peers: Collective, begun: Mapping[RolloutKey, StudentRollout]
) -> dict[RolloutKey, StudentRollout]:
    """Returns the rollouts that this process samples; one prompt's rollouts stay together."""
    prompt_of = {key: (rollout.iteration, key.task_id) for key, rollout in begun.items()}
    prompts = list(dict.fromkeys(prompt_of.values()))
    mine = {prompts[index] for index in peers.share([1] * len(prompts))}
    return {key: rollout for key, rollout in begun.items() if prompt_of[key] in mine}


def limits_of(config: DistillConfig, iteration: int) -> Limits:
    """Returns the curriculum's limits for an iteration's rollouts."""
    return limits_at(config.curriculum, iteration, max_turns=config.rollout.max_turns)


def _begun(
    config: DistillConfig, batches: Sequence[Sequence[Task]], carried: CarriedRollout
) -> tuple[RolloutKey, StudentRollout]:
    """Returns a new or carried rollout, with the seed and limits of the iteration it began in."""
    iteration, index = carried.iteration, carried.index
    task = batches[iteration][index // config.data.group_size]
    seed = config.trainer.seed * _SEED_STRIDE + iteration
    limits = limits_of(config, iteration)
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
    begun: Mapping[RolloutKey, StudentRollout],
    teachers: Teachers,
    num_left_over: int,
) -> AsyncGenerator[StudentPolicy]:
    """Opens the policy that samples: the student, and the teacher if it writes some turns."""
    turns = anyio.Lock()
    is_helped = any(rollout.teacher_turns for rollout in begun.values())
    async with AsyncExitStack() as stack:
        helper = None
        if is_helped:
            teacher = teachers.local[0].loaded
            helper = await stack.enter_async_context(
                environment.policy(sampling, num_rollouts=len(begun), turns=turns, instead=teacher)
            )
        student = (
            environment.policy(sampling, num_rollouts=len(begun), turns=turns)
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
            {f"{key.task_id}:{key.sample}": rollout for key, rollout in begun.items()},
            max_tokens=sampling.max_tokens,
            views=environment.views,
            teacher=helper,
            num_left_over=num_left_over,
        )


def nothing_sampled(sampled: IterationRollouts, iteration: int) -> EngineError:
    """Returns the error of an iteration without any sampled token to learn from."""
    outcomes = sampled.outcomes
    if any(one.is_left_out for one in sampled.ended):
        return DataError(
            f"every rollout of iteration {iteration + 1} is longer than the teacher's context",
            "shorten teacher.context_file, lower rollout.max_context_window, or take a teacher "
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
        f"no rollout of iteration {iteration + 1} holds a sampled token: the prompts fill the "
        "context",
        "shorten the prompts, or raise rollout.max_context_window",
    )


def too_many_failed(sampled: IterationRollouts, iteration: int) -> EngineError | None:
    """Returns the error of an iteration that lost too many rollouts to train on the others."""
    outcomes = sampled.outcomes
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    if len(failed) <= MOST_FAILED * len(outcomes):
        return None
    return RunError(
        f"{len(failed)} of {len(outcomes)} rollouts of iteration {iteration + 1} failed, more than "
        f"half, so the others were not trained on; the first with: {failed[0].failure.message}",
        "start the server again, or correct tools.py or rewards.py, then resume the run",
    )


def sequences_of(
    sampled: Sequence[SampledRollout],
    pairs: Mapping[int, ReadingPair] = MappingProxyType({}),
    views: PromptViews = UNCHANGED,
) -> list[TrainingSequence]:
    """Returns the rollouts' exact tokens, without rollouts that failed or have no sampled token.

    pairs: by dataset, the student and a teacher that reads its rollouts in tokens of its own;
    `views` are the prompts that both read.
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
            reading = _reread(pair, rollout, trace, one.rollout.task, views)
        sequences.append(
            TrainingSequence(
                sampled_sequence(trace),
                trace.sampled_logprobs,
                one.teacher,
                reading,
                dataset,
                reward=rollout.reward,
                prompt=rollout.task_id,
                teacher_tokens=one.reading and sampled_sequence(one.reading),
            )
        )
    return sequences


def _reread(
    pair: ReadingPair, rollout: Trajectory, trace: TokenTrace, task: Task, views: PromptViews
) -> ByteReading:
    """Returns a finished rollout in its teacher's own tokens, after the prompt that it reads."""
    sampled_messages = rollout.messages[len(views.student.put_before(task.messages)) :]
    messages = [*views.teacher.put_before(task.messages), *sampled_messages]
    return pair.read(trace, messages, rollout.tools, num_turns=rollout.turns)
