"""Runs many rollouts at once: each sample of each task, with shared policy, tools and rewards."""

import copy
import gc
import time
import traceback
from array import array
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from stillroom.data.formats import Task
from stillroom.data.row_names import HashSet
from stillroom.data.task_file import TaskFile
from stillroom.errors import CallFailedError, EngineError, FailureClass
from stillroom.lineage import now
from stillroom.rollout.episode.loop import (
    CutText,
    Episode,
    OfferedTools,
    Policy,
    PolicyConversation,
    TurnRules,
    needs_lost_state,
    offered_tools,
    play_episode,
    tool_task,
)
from stillroom.rollout.journal.records import EpisodeRecorder, RolloutKey
from stillroom.rollout.rewards.rewards import Judgement, Rewarder
from stillroom.teachers.budget import BudgetSpentError
from stillroom.tools.source import ToolSource
from stillroom.types import (
    Author,
    CallTotals,
    Failure,
    Message,
    Refinement,
    TeacherRecord,
    TokenTrace,
    Trajectory,
    total_usd,
)


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One rollout to run: a task and a sample number."""

    task: Task
    sample: int

    @property
    def key(self) -> RolloutKey:
        """The rollout's identity, equal in every process."""
        return RolloutKey(self.task.task_id, self.sample)


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout that an infrastructure failure ended: it gets no row, and a rerun repeats it."""

    key: RolloutKey
    failure: Failure
    turns: int


class Refiner(Protocol):
    """What a run needs in addition to its policy to refine a student's rollouts."""

    async def ask_critic(
        self, conversation: PolicyConversation, task: Task, recorder: EpisodeRecorder
    ) -> CallTotals | None:
        """Asks the critic, if any, where the teacher takes over; returns its calls' totals."""
        ...

    def refinement(
        self, conversation: PolicyConversation, episode: Episode, critic: CallTotals | None
    ) -> Refinement:
        """Returns how the rollout was refined."""
        ...

    def with_loss_weights(
        self, messages: Sequence[Message], authors: Sequence[Author]
    ) -> list[Message]:
        """Returns the messages with their loss weights."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Everything that the rollouts of a run share."""

    policy: Policy
    teacher: TeacherRecord
    tools: ToolSource | None
    rewarder: Rewarder
    rules: TurnRules
    cut_reply: CutText | None = None
    """The function that shortens tool replies; None if the model reads them in full."""
    timeout_s: float | None = None
    """The timeout in seconds for a rollout and its rewards, counted from when its tools are open;
    None for no limit."""
    metrics: Callable[[], dict[str, float]] = dict[str, float]
    """A function that returns the policy's current metrics, e.g. the allowed calls per second."""
    notes: Sequence[str] = ()
    """Notes on the tools for the user, e.g. that container images must be pulled."""
    concurrency_limit: Callable[[], int] = lambda: 0
    """A function that returns the policy's current concurrency limit. A limit above `concurrency`
    replaces it."""
    refiner: Refiner | None = None
    """The policy, if it refines a student's rollouts; else None."""


Outcome = Trajectory | FailedRollout


def key_of(outcome: Outcome) -> RolloutKey:
    """Returns the key of an outcome's rollout."""
    if isinstance(outcome, FailedRollout):
        return outcome.key
    return RolloutKey(outcome.task_id, outcome.sample)


_CHECK_LIMIT_EVERY_S = 0.05
"""Seconds between checks whether more rollouts may run at once."""
_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000

_RecorderFor = Callable[[RolloutKey], EpisodeRecorder]


def specs_for(tasks: Sequence[Task], samples_per_task: int) -> list[RolloutSpec]:
    """Returns the rollouts to run; a task that is listed twice gets twice as many samples."""
    num_samples: dict[str, int] = {}
    specs: list[RolloutSpec] = []
    for task in tasks:
        begin = num_samples.get(task.task_id, 0)
        num_samples[task.task_id] = begin + samples_per_task
        specs += [RolloutSpec(task, begin + i) for i in range(samples_per_task)]
    return specs


class RolloutSpecs:
    """The rollouts of the tasks in a file; each task is read lazily."""

    def __init__(self, tasks: TaskFile, samples_per_task: int) -> None:
        self._tasks, self._samples = tasks, samples_per_task
        # The first sample number of each task in the file.
        self._first_samples = array("I")
        seen, repeats = HashSet(), Counter[str]()
        for number in range(len(tasks)):
            task_id = tasks.task_id(number)
            # A task that is listed twice gets twice as many samples.
            if not seen.add(int(task_id, 16)):
                repeats[task_id] += 1
            self._first_samples.append(samples_per_task * repeats.get(task_id, 0))
        # A rollout's number is samples_per_task times the index of its task, plus its sample.
        self._numbers: Sequence[int] = range(len(tasks) * samples_per_task)

    def where(self, is_wanted: Callable[[RolloutKey], bool]) -> "RolloutSpecs":
        """Returns the rollouts whose keys satisfy `is_wanted`."""
        chosen = copy.copy(self)
        numbers = (number for number in self._numbers if is_wanted(self._key(number)))
        chosen._numbers = array("Q", numbers)
        return chosen

    @property
    def keys(self) -> Iterator[RolloutKey]:
        """Yields the rollouts' keys without reading their tasks."""
        return map(self._key, self._numbers)

    def _key(self, number: int) -> RolloutKey:
        task, sample = divmod(number, self._samples)
        return RolloutKey(self._tasks.task_id(task), self._first_samples[task] + sample)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[RolloutSpec]:
        for number in self._numbers:
            task, sample = divmod(number, self._samples)
            yield RolloutSpec(self._tasks[task], self._first_samples[task] + sample)


async def collect_rollouts(
    specs: Iterable[RolloutSpec],
    context: RolloutContext,
    *,
    concurrency: int,
    on_outcome: Callable[[Outcome], Awaitable[None]],
    recorder_for: _RecorderFor | None = None,
) -> str | None:
    """Runs the rollouts and calls `on_outcome` with each outcome.

    At first `concurrency` rollouts run at once, and more when `context.concurrency_limit()` is
    higher.
    Returns the name of the budget limit that stopped the run early, or None.
    """
    workers = _Workers(iter(specs), context, on_outcome, recorder_for)
    with _rare_garbage_collection():
        async with anyio.create_task_group() as group:
            num_started = 0
            while not workers.is_done:
                wanted = max(concurrency, context.concurrency_limit())
                # Workers are only ever added; those beyond the policy's limit wait for it.
                for _ in range(wanted - num_started):
                    group.start_soon(workers.work)
                num_started = max(num_started, wanted)
                with anyio.move_on_after(_CHECK_LIMIT_EVERY_S):
                    await workers.done.wait()
    return workers.stopped_by


@contextmanager
def _rare_garbage_collection() -> Generator[None]:
    """Makes Python's garbage collector run less often inside the block.

    Hundreds of conversations are alive at once and hold few reference cycles; searching them
    repeatedly took a measured 10 % of the time of a call.
    """
    before = gc.get_threshold()
    # A threshold of 0 means that the collector is off; it stays off.
    gc.set_threshold(
        max(_ALLOCATIONS_BETWEEN_COLLECTIONS, before[0]) if before[0] else 0, *before[1:]
    )
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Workers:
    """Workers that take one rollout after another until none is left."""

    def __init__(
        self,
        waiting: Iterator[RolloutSpec],
        context: RolloutContext,
        on_outcome: Callable[[Outcome], Awaitable[None]],
        recorder_for: _RecorderFor | None,
    ) -> None:
        self._waiting, self._context = waiting, context
        self._on_outcome, self._recorder_for = on_outcome, recorder_for
        self.done = anyio.Event()
        self.stopped_by: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether no further rollout will be started."""
        return self.done.is_set()

    async def work(self) -> None:
        """Runs one rollout after another until none is left to start or the budget is spent."""
        for spec in self._waiting:
            recorder = self._recorder_for(spec.key) if self._recorder_for else EpisodeRecorder()
            try:
                outcome = await _run_rollout(spec, self._context, recorder)
            except BudgetSpentError as spent:
                # The rollout's finished turns are recorded: a run with a larger budget resumes it.
                self.stopped_by = spent.limit
                break
            await self._on_outcome(outcome)
        self.done.set()


async def _run_rollout(
    spec: RolloutSpec, context: RolloutContext, recorder: EpisodeRecorder
) -> Outcome:
    """Runs a rollout and computes its rewards.

    Returns a FailedRollout for an error that concerns this rollout alone, and raises any other.
    """
    task = spec.task
    keeps_state = context.tools is not None and context.tools.keeps_state
    if keeps_state and needs_lost_state(recorder, context.rules):
        recorder.start_over()
    started_at, started = now(), time.monotonic()
    episode = Episode(messages=list(task.messages))
    try:
        seed_key = f"{task.task_id}:{spec.sample}"
        async with (
            open_task_tools(task, context.tools, context.cut_reply) as tools,
            context.policy.converse(
                task.messages, tools.schemas, seed_key=seed_key
            ) as conversation,
        ):
            refiner, refined = context.refiner, None
            with _deadline(context.timeout_s):
                critic = await refiner.ask_critic(conversation, task, recorder) if refiner else None
                await play_episode(episode, conversation, recorder, tools, context.rules)
                judgement = await context.rewarder.judge(task, episode.messages, recorder=recorder)
            seconds = time.monotonic() - started
            dropped = recorder.dropped() + (critic or CallTotals()) + episode.unused
            if refiner is not None:
                refined = refiner.refinement(conversation, episode, critic)
                episode.messages = refiner.with_loss_weights(episode.messages, episode.authors)
            ended = _FinishedEpisode(
                episode, judgement, dropped, conversation.trace(), started_at, seconds, refined
            )
            return _trajectory(spec, context, ended)
    except CallFailedError as error:
        failure = Failure(kind=error.kind, message=error.message)
    # Caught before OSError, their base class: these two come from one tool, not e.g. a full disk.
    except (TimeoutError, ConnectionError) as error:
        failure = _internal_failure(error)
    # A rejected API key, a full disk or a spent budget ends every rollout, so it ends the run.
    except (EngineError, BudgetSpentError, OSError, MemoryError):
        raise
    # Any other error concerns this rollout alone and must not end the others.
    except Exception as error:
        failure = _internal_failure(error)
    return FailedRollout(spec.key, failure, episode.turns)


def _internal_failure(error: Exception) -> Failure:
    traceback.print_exc()
    return Failure(kind=FailureClass.INTERNAL, message=f"{type(error).__name__}: {error}")


@contextmanager
def _deadline(timeout_s: float | None) -> Generator[None]:
    """Raises CallFailedError if the block takes longer than `timeout_s`; None means no limit."""
    if timeout_s is None:
        yield
        return
    with anyio.move_on_after(timeout_s) as scope:
        yield
    if scope.cancelled_caught:
        message = f"timed out after {timeout_s:g} s (rollout_timeout)"
        raise CallFailedError(FailureClass.ROLLOUT_TIMEOUT, message)


@asynccontextmanager
async def open_task_tools(
    task: Task, source: ToolSource | None, cut: CutText | None
) -> AsyncGenerator[OfferedTools]:
    """Opens the tools that a task may use; nothing is opened for a task without tools."""
    schemas = offered_tools(task, source)
    if source is None or not schemas:
        yield OfferedTools(schemas, None)
        return
    async with source.session(tool_task(task)) as session:
        yield OfferedTools(schemas, session, cut)


@dataclass(frozen=True, slots=True)
class _FinishedEpisode:
    """A finished rollout with its rewards, dropped calls, token trace and times."""

    episode: Episode
    judgement: Judgement
    dropped: CallTotals
    trace: TokenTrace | None
    started_at: str
    seconds: float
    refined: Refinement | None

    @property
    def cost_usd(self) -> float | None:
        judge = self.judgement.judge
        judge_usd = judge.cost_usd if judge else 0.0
        return total_usd((self.episode.cost_usd, self.dropped.cost_usd, judge_usd))


def _trajectory(spec: RolloutSpec, context: RolloutContext, ended: _FinishedEpisode) -> Trajectory:
    """Returns the row of a finished rollout."""
    episode, judgement = ended.episode, ended.judgement
    return Trajectory(
        id=f"{spec.task.task_id}-{spec.sample}",
        task_id=spec.task.task_id,
        sample=spec.sample,
        messages=episode.messages,
        tools=offered_tools(spec.task, context.tools),
        metadata=spec.task.metadata,
        reward=judgement.total,
        rewards=dict(judgement.by_name),
        success=judgement.success,
        stop_reason=episode.stop_reason,
        turns=episode.turns,
        truncated=episode.stop_reason.cuts_off,
        tool_errors=episode.tool_errors,
        error=None,
        usage=episode.usage,
        cost_usd=ended.cost_usd,
        teacher=context.teacher,
        started_at=ended.started_at,
        duration_s=round(ended.seconds, 3),
        judge=judgement.judge,
        dropped=ended.dropped if ended.dropped.calls else None,
        tokens=ended.trace,
        variables=spec.task.variables,
        answered_by=episode.answered_by,
        refined=ended.refined,
    )
