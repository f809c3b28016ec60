"""The teachers that score the student's tokens, in this process or on servers.

A `PromptReplacer` puts the teacher's own prompt in place of the student's before a rollout is
scored.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import anyio

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task
from stillroom.data.instruction import PromptViews
from stillroom.errors import CallFailedError, ConfigError, EngineError, ModelError
from stillroom.models.batches import TokenBatch, TokenSequence
from stillroom.models.load import LoadedModel, load_model, load_tokenizer
from stillroom.models.pairing import check_pair
from stillroom.models.reread.pair_check import open_pair, open_pair_with_tokenizer, reading_note
from stillroom.models.reread.rereading import ReadingPair
from stillroom.models.resolve import locate_model
from stillroom.rollout.episode.collect import FailedRollout, key_of
from stillroom.serving.preflight import check_rereading
from stillroom.serving.scoring import ServedTeacher, TeacherScores
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import DatasetTeacher, served_teacher
from stillroom.train.config.schema import DistillConfig, TrainConfig
from stillroom.train.loop.student_environment import StudentEnvironment
from stillroom.train.student.model import Student
from stillroom.types import Failure, TokenTrace, ToolSchema, Trajectory


@dataclass(slots=True)
class Teachers:
    """The teachers of a run. Use as an async context manager."""

    local: Mapping[int, LocalTeacher] = field(default_factory=dict[int, LocalTeacher])
    """The teachers in this process, by dataset; they score during the update."""
    served: Mapping[int, ServedTeacher] = field(default_factory=dict[int, ServedTeacher])
    """The teachers on servers, by dataset; they score each rollout as soon as it ends."""
    pairs: Mapping[int, ReadingPair] = field(default_factory=dict[int, ReadingPair])
    """The student paired with each teacher of another tokenizer or template, by dataset."""
    notes: Sequence[str] = ()
    """Notes for the user on how the teachers score rollouts."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def num_scored_at_once(self) -> int:
        """The number of rollouts that servers may be scoring at once."""
        return sum(served.concurrency for served in set(self.served.values()))

    async def __aenter__(self) -> Self:
        for served in set(self.served.values()):
            await self._stack.enter_async_context(served.server)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def fits_teacher_context(self, trace: TokenTrace, dataset: int) -> bool:
        """Returns whether the tokens fit into the context of a teacher in this process.

        Always true for a served teacher, whose server checks this itself.
        """
        teacher = self.local.get(dataset)
        return teacher is None or len(trace.ids) <= teacher.loaded.max_context

    async def score(
        self, outcome: Trajectory, trace: TokenTrace, dataset: int
    ) -> TeacherScores | FailedRollout | None:
        """Returns a server's scores of a finished rollout's tokens; None if no server scores it.

        trace: the rollout in the teacher's tokens.

        If scoring fails, returns the rollout as a failed one: it cannot be trained on.
        """
        served = self.served.get(dataset)
        if served is None:
            return None
        try:
            return await served.score(trace)
        except CallFailedError as error:
            failure = Failure(
                kind=error.kind, message=f"the teacher did not score this rollout: {error.message}"
            )
            return FailedRollout(key_of(outcome), failure, outcome.turns)


def load_teachers(
    workspace: Workspace,
    config: DistillConfig,
    student: Student,
) -> Teachers:
    """Loads each configured teacher once, and checks those in this process."""
    local: dict[DatasetTeacher, LocalTeacher] = {}
    served: dict[DatasetTeacher, ServedTeacher] = {}
    pairs: dict[DatasetTeacher, ReadingPair] = {}
    notes: list[str] = []
    for configured in dict.fromkeys(config.teachers):
        if configured.section.is_served:
            top_k = config.algorithm.served_top_k
            served[configured] = served_teacher(workspace, configured, top_k=top_k)
            if configured.section.tokens == "reread":
                opened = open_served_pair(workspace, configured, student.loaded, config)
                notes += opened.notes
                if opened.pair is not None:
                    pairs[configured] = opened.pair
            continue
        teacher = load_local_teacher(workspace, configured, student.loaded)
        local[configured] = teacher
        if configured.section.tokens == "reread":
            pair = open_pair(student.loaded, teacher.loaded, config.rollout.reasoning_mode)
            notes.append(reading_note(configured.path, pair))
            if pair is not None:
                pairs[configured] = pair
    by_dataset = list(enumerate(config.teachers))
    return Teachers(
        local={i: local[configured] for i, configured in by_dataset if configured in local},
        served={i: served[configured] for i, configured in by_dataset if configured in served},
        pairs={i: pairs[configured] for i, configured in by_dataset if configured in pairs},
        notes=notes,
    )


def load_local_teacher(
    workspace: Workspace, teacher: DatasetTeacher, student: LoadedModel
) -> LocalTeacher:
    """Loads a teacher in this process.

    Raises ModelError if it cannot score the student's tokens, unless teacher.tokens is reread.
    """
    section = teacher.section
    loaded = load_model(
        workspace,
        locate_model(workspace, teacher.path),
        precision=section.precision,
        quantization=section.quantization,
        spread=section.spread,
    )
    if section.tokens == "same":
        check_pair(student, loaded)
    return LocalTeacher(loaded)


def teacher_sequences(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Returns the sequences as the teacher scores them: after its own prompt, if it has one."""
    return [one.for_teacher or one for one in sequences]


def teacher_batch(
    student: Student, teacher: LocalTeacher, sequences: Sequence[TokenSequence], batch: TokenBatch
) -> TokenBatch:
    """Returns the sequences of the student's `batch` as a batch for the teacher."""
    if any(one.for_teacher is not None for one in sequences):
        # The teacher's own prompt may be long, and the batch was sized by the student's tokens.
        return teacher.collate_long(teacher_sequences(sequences))
    if teacher.head.rules == student.head.rules:
        return batch
    return teacher.collate(sequences)


def check_teacher_context(max_context: int, sequences: Sequence[TokenSequence]) -> None:
    """Raises ConfigError if a sequence, in the teacher's tokens, exceeds the teacher's context."""
    longest = max((len(one.ids) for one in teacher_sequences(sequences)), default=0)
    if longest > max_context:
        raise ConfigError(
            f"with the teacher's prompt the longest row has {longest} tokens, but the teacher's "
            f"context has {max_context}",
            "shorten teacher.context_file or teacher.system if they are set, or skip longer rows "
            "with model.max_length",
        )


@dataclass(frozen=True, slots=True)
class ServedPair:
    """A student and a served teacher, with notes on how the teacher scores."""

    pair: ReadingPair | None
    """None: the teacher has the student's tokenizer and template, and scores its tokens."""
    notes: list[str]


def open_served_pair(
    workspace: Workspace, teacher: DatasetTeacher, student: LoadedModel, config: TrainConfig
) -> ServedPair:
    """Returns the student paired with a served teacher, after checking the server.

    Raises EngineError if the teacher's tokenizer is unavailable or not the server's, or if the
    teacher cannot tokenize the student's text.
    """
    tokenizer = _load_served_tokenizer(workspace, teacher)
    mode = config.rollout.reasoning_mode
    served = served_teacher(workspace, teacher, top_k=config.served_top_k)
    server = anyio.run(check_rereading, served, tokenizer, teacher.tokenizer or teacher.path)
    pair = open_pair_with_tokenizer(
        student, tokenizer, teacher.path, mode, max_context=server.max_context
    )
    return ServedPair(pair, [reading_note(teacher.path, pair, is_served=True), server.note])


def _load_served_tokenizer(workspace: Workspace, teacher: DatasetTeacher) -> Any:
    """Loads the tokenizer of a served teacher. Raises ModelError if it is not available."""
    name = teacher.tokenizer or teacher.path
    try:
        return load_tokenizer(locate_model(workspace, name))
    except EngineError as error:
        raise ModelError(
            "teacher.tokens: reread needs the tokenizer of the served teacher in this process, "
            f"but {name!r} is not available: {error.problem}",
            "set teacher.tokenizer to the folder or hub id of the served model",
        ) from error


PromptReplacer = Callable[[Task, TokenTrace, Sequence[ToolSchema]], TokenTrace | None]
"""Takes a task, a rollout's tokens and its tools; returns the tokens after the teacher's prompt.

The student's sampled tokens stay marked as `sampled`. None: the teacher's prompt is the student's.
"""


def teacher_prompt_replacer(environment: StudentEnvironment) -> PromptReplacer | None:
    """Returns the replacer of the student's prompts; None if the teacher has the same prompts."""
    if environment.views.are_equal:
        return None
    renderer = ChatRenderer(
        environment.student.loaded.tokenizer,
        include_thinking=environment.rollout.include_thinking,
        variables=environment.variables,
    )
    return prompt_replacer(renderer, environment.views)


def prompt_replacer(renderer: ChatRenderer, views: PromptViews) -> PromptReplacer:
    """Returns the replacer of prompts for a teacher with the student's tokenizer.

    renderer: the renderer of the student's prompts.
    """

    def replace(task: Task, trace: TokenTrace, tools: Sequence[ToolSchema]) -> TokenTrace | None:
        messages = views.student.apply_to(task.messages)
        teacher_messages = views.teacher.apply_to(task.messages)
        if teacher_messages == messages:
            return None
        prompt = renderer.prompt_ids(messages, tools)
        teacher_prompt = renderer.prompt_ids(teacher_messages, tools)
        start = len(prompt)
        if trace.ids[:start] != prompt:
            raise ModelError(
                f"the rollout of task {task.task_id} does not start with the tokens of its prompt, "
                "so it cannot be scored after the teacher's own prompt",
                "leave teacher.system, teacher.context_file and model.system out",
            )
        return TokenTrace(
            ids=teacher_prompt + trace.ids[start:],
            sampled=[False] * len(teacher_prompt) + trace.sampled[start:],
            logprobs=[0.0] * len(teacher_prompt) + trace.logprobs[start:],
        )

    return replace
