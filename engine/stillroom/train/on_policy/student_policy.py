"""The policy for the student's rollouts: within the curriculum's limits, assisted by a teacher."""

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from stillroom.data.formats import Task
from stillroom.data.instruction import UNCHANGED, PromptViews
from stillroom.files import content_hash
from stillroom.policy.conversation import TokenConversation
from stillroom.policy.hf import HFPolicy, SamplingStoppedError
from stillroom.rollout.journal.records import EpisodeRecorder
from stillroom.serving.policy import ServedPolicy
from stillroom.tools.source import ToolResult
from stillroom.train.config.resume import CarriedRollout, RecordedTurn
from stillroom.train.config.schema import DistillConfig
from stillroom.types import Message, PartialTurn, SampledTurn, TokenTrace, ToolSchema, Usage


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the rollouts of one iteration."""

    max_turns: int
    prefix_tokens: int | None = None
    """The maximum number of tokens that the student samples over all its turns; None: no limit."""
    teacher_share: float = 0.0
    """The probability that the teacher writes a turn."""

    def teacher_turns(self, key: str, *, seed: int) -> frozenset[int]:
        """Returns the indices of the turns that the teacher writes, drawn by `key` and `seed`."""
        if not self.teacher_share:
            return frozenset()
        draws = random.Random(content_hash(["teacher turns", seed, key]))
        return frozenset(i for i in range(self.max_turns) if draws.random() < self.teacher_share)


def limits_at(config: DistillConfig, iteration: int) -> Limits:
    """Returns the curriculum's limits for an iteration's rollouts; iterations count from 0."""
    section, max_turns = config.curriculum, config.rollout.max_turns
    prefix = section.prefix_tokens
    if section.prefix_steps is not None and prefix is not None:
        end = section.prefix_tokens_end or prefix
        grown = round(prefix + (end - prefix) * iteration / section.prefix_steps)
        prefix = grown if iteration < section.prefix_steps else None
    turns = max_turns
    if section.first_turns is not None and section.turn_steps is not None:
        first_turns = min(section.first_turns, max_turns)
        growth = min(1.0, iteration / section.turn_steps)
        turns = first_turns + int((max_turns - first_turns) * growth)
    decay = 1 - iteration / section.teacher_steps if section.teacher_steps else 0.0
    return Limits(turns, prefix, section.teacher_share * max(0.0, decay))


@dataclass(slots=True)
class StudentRollout(EpisodeRecorder):
    """One rollout of the student: its task, its limits and its turns so far."""

    task: Task
    iteration: int
    """The iteration in which the rollout began, counted from 0."""
    index: int
    seed: int
    limits: Limits
    teacher_turns: frozenset[int] = frozenset()
    turns: list[RecordedTurn] = field(default_factory=list[RecordedTurn])
    begun: PartialTurn | None = None
    """The partial tokens of its next turn; None: the turn starts from scratch."""
    is_stopped: bool = False
    """Whether sampling was stopped, so that the rollout continues in a later iteration."""
    is_prefix_cut: bool = False
    """Whether curriculum.prefix_tokens cut the rollout off."""

    def to_carried(self) -> CarriedRollout:
        """Returns the state from which a later iteration can resume the rollout."""
        return CarriedRollout(
            iteration=self.iteration, index=self.index, turns=self.turns, begun=self.begun
        )

    def recorded_turn(self, index: int) -> SampledTurn | None:
        """Returns turn `index` if it was sampled earlier."""
        return self.turns[index].turn if index < len(self.turns) else None

    def recorded_replies(self, index: int) -> list[ToolResult] | None:
        """Returns the tools' replies to turn `index` if they were received earlier."""
        return self.turns[index].replies if index < len(self.turns) else None

    def start_over(self) -> None:
        """Drops the turns so far, because the state of the rollout's tools is lost."""
        self.turns, self.begun = [], None

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps a finished turn for a later iteration."""
        self.turns.append(RecordedTurn(turn=turn))

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Keeps the tools' replies to turn `index`."""
        self.turns[index] = RecordedTurn(turn=self.turns[index].turn, replies=replies)


class StudentPolicy:
    """A policy in which the student writes all turns except those drawn for the teacher."""

    def __init__(
        self,
        student: HFPolicy | ServedPolicy,
        rollouts: Mapping[str, StudentRollout],
        *,
        max_tokens: int,
        views: PromptViews = UNCHANGED,
        teacher: HFPolicy | None = None,
        num_stragglers: int = 0,
    ) -> None:
        """rollouts: all rollouts to sample, by key. max_tokens: the limit of a turn. views: the
        teacher's view of a prompt when it writes a turn. num_stragglers: the number of unfinished
        rollouts that are not waited for: once no more are left, they are stopped.
        """
        self._student, self._teacher = student, teacher
        self._rollouts, self._max_tokens, self._views = rollouts, max_tokens, views
        self._num_unfinished, self._num_stragglers = len(rollouts), num_stragglers

    @asynccontextmanager
    async def converse(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed_key: str
    ) -> AsyncGenerator["StudentConversation"]:
        """Opens a rollout's conversation; its key and iteration's seed determine its samples."""
        rollout = self._rollouts[seed_key]
        # Keyed by the index within the iteration, so that samples do not depend on the number that
        # distinguishes rollouts of different iterations.
        key = f"{seed_key.rpartition(':')[0]}:{rollout.index}"
        async with AsyncExitStack() as stack:
            student = await stack.enter_async_context(
                self._student.converse(messages, tools, seed_key=key, seed=rollout.seed)
            )
            teacher = None
            if self._teacher is not None and rollout.teacher_turns:
                teacher = await stack.enter_async_context(
                    self._teacher.converse(
                        self._views.teacher.apply_to(rollout.task.messages),
                        tools,
                        seed_key=f"{key}:teacher",
                        seed=rollout.seed,
                    )
                )
                teacher.set_aside()
            try:
                yield StudentConversation(student, teacher, rollout, self._max_tokens)
            finally:
                # Before the student's conversation closes, so that a stop takes effect before the
                # student's next step.
                self._record_end(rollout)

    def _record_end(self, rollout: StudentRollout) -> None:
        """Counts a finished rollout; stops the others once only stragglers are left."""
        if rollout.is_stopped:
            return
        self._num_unfinished -= 1
        if self._num_unfinished <= self._num_stragglers:
            self._student.stop_sampling()


class StudentConversation:
    """One rollout's conversation, in which student and teacher have exactly the same tokens."""

    def __init__(
        self,
        student: TokenConversation,
        teacher: TokenConversation | None,
        rollout: StudentRollout,
        max_tokens: int,
    ) -> None:
        self._student, self._teacher = student, teacher
        self._rollout, self._max_tokens = rollout, max_tokens
        self._num_turns = 0
        self._num_sampled = 0

    async def sample(self) -> SampledTurn:
        """Returns the next turn, sampled from the student or from the teacher."""
        if self._teacher is not None and self._is_teacher_turn:
            self._student.set_aside()
            turn = await self._teacher.sample()
            self._student.add_turn(turn)
            self._num_turns += 1
            return turn
        if self._teacher is not None:
            self._teacher.set_aside()
        turn = await self._sample_student_turn()
        self._record_student_turn(turn)
        return turn

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that was recorded earlier, instead of sampling it."""
        if self._teacher is not None and self._is_teacher_turn:
            self._teacher.restore(turn)
            self._student.add_turn(turn)
            self._num_turns += 1
            return
        self._student.restore(turn)
        self._record_student_turn(turn)

    def add_responses(self, turn: Message, responses: Sequence[Message]) -> None:
        """Appends the tool results, or a user's message, that follow the last turn."""
        self._student.add_responses(turn, responses)
        if self._teacher is not None:
            self._teacher.add_responses(turn, responses)

    def trace(self) -> TokenTrace | None:
        """Returns the exact tokens; only those of the student's own turns count as sampled."""
        return self._student.trace()

    @property
    def _is_teacher_turn(self) -> bool:
        """Whether the teacher writes the next turn."""
        return self._num_turns in self._rollout.teacher_turns

    async def _sample_student_turn(self) -> SampledTurn:
        """Returns a turn of the student, within the turn limit and curriculum.prefix_tokens.

        Raises SamplingStoppedError if sampling is stopped; the partial turn is kept.
        """
        rollout = self._rollout
        remaining = self._max_tokens
        if rollout.limits.prefix_tokens is not None:
            remaining = rollout.limits.prefix_tokens - self._num_sampled
        if remaining <= 0:
            rollout.is_prefix_cut = True
            return _empty_turn()
        self._student.limit_turn(remaining)
        if rollout.begun is not None:
            self._student.resume_turn(rollout.begun)
        try:
            turn = await self._student.sample()
        except SamplingStoppedError:
            begun = self._student.partial_turn()
            rollout.begun, rollout.is_stopped = begun if begun.ids else None, True
            raise
        rollout.begun = None
        is_prefix_limit = rollout.limits.prefix_tokens is not None and remaining <= self._max_tokens
        rollout.is_prefix_cut = is_prefix_limit and turn.finish_reason == "length"
        return turn

    def _record_student_turn(self, turn: SampledTurn) -> None:
        self._num_turns += 1
        self._num_sampled += len(turn.token_ids or [])
        if self._teacher is not None:
            self._teacher.add_turn(turn)


def _empty_turn() -> SampledTurn:
    """Returns an empty turn, for a rollout without tokens left."""
    return SampledTurn(
        message={"role": "assistant", "content": ""},
        finish_reason="length",
        usage=Usage(),
        token_ids=[],
        logprobs=[],
    )
