"""Tries a short iteration of distillation to measure its time; its result is thrown away.

Planning has no effects, so no tool is called: each rollout has one short turn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from stillroom.data.formats import Task
from stillroom.data.instruction import PromptViews
from stillroom.models.batches import sampled_sequence
from stillroom.models.reread.rereading import ReadingPair
from stillroom.policy.hf import HFPolicy
from stillroom.settings import Workspace
from stillroom.train.config.schema import DistillConfig
from stillroom.train.on_policy.policy_update import update_student
from stillroom.train.on_policy.teacher_reading import own_prompt
from stillroom.train.on_policy.teachers import load_teachers
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.planning.trial import MOST_OPERATIONS
from stillroom.train.student.memory import peak_memory_gb
from stillroom.train.student.model import Student, load_student
from stillroom.types import SamplingSettings

_MOST_ROLLOUTS, _MOST_TOKENS = 16, 32
_PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class RolloutTrial:
    """The measurements of a short iteration."""

    token_s: float
    """The seconds per sampled token for sampling, scoring and learning together."""
    answer_tokens: float
    """The tokens of a turn: the measured mean, or rollout.max_tokens if the trial cut a turn
    off."""
    is_cut: bool
    """Whether the trial cut off a turn."""
    memory_gb: float
    load_s: float
    """The seconds that loading student and teachers took."""

    def seconds(self, config: DistillConfig, steps: int, *, token_s: float) -> float:
        """Returns the seconds of `steps` iterations whose rollouts have one turn each."""
        rollouts = config.data.batch_size * config.data.group_size
        return steps * rollouts * self.answer_tokens * token_s


def try_iteration(
    workspace: Workspace, config: DistillConfig, tasks: Sequence[Task], views: PromptViews
) -> RolloutTrial | None:
    """Measures an iteration of a few short answers; None if a server scores or all are empty."""
    started = time.monotonic()
    student = load_student(workspace, config.model, seed=config.trainer.seed)
    teachers = load_teachers(workspace, config, student)
    if teachers.served or not teachers.local:
        return None
    load_s = time.monotonic() - started
    max_tokens = min(config.rollout.max_tokens, _MOST_TOKENS)
    num = min(config.data.batch_size * config.data.group_size, _MOST_ROLLOUTS)
    models = [student.loaded, *(teacher.loaded for teacher in teachers.local.values())]
    size = sum(p.numel() for loaded in models for p in loaded.model.parameters())
    operations = MOST_OPERATIONS[student.loaded.device.type]
    num = max(1, min(num, int(operations / (8 * size * (max_tokens + _PROMPT_TOKENS)))))
    chosen = [tasks[index // config.data.group_size % len(tasks)] for index in range(num)]
    started = time.monotonic()
    pair = teachers.pairs.get(0)
    sequences = anyio.run(_sample, student, config, chosen, views, max_tokens, pair)
    tokens = [sequence.tokens.num_trained for sequence in sequences]
    if not sum(tokens):
        return None
    optimizer = student.optimizer(config.trainer, total_steps=config.algorithm.substeps)
    update_student(student, teachers.local, sequences, optimizer, config, 0)
    is_cut = max_tokens < config.rollout.max_tokens and max(tokens) >= max_tokens
    return RolloutTrial(
        token_s=(time.monotonic() - started) / sum(tokens),
        answer_tokens=config.rollout.max_tokens if is_cut else sum(tokens) / len(tokens),
        is_cut=is_cut,
        memory_gb=peak_memory_gb(student.loaded.device),
        load_s=load_s,
    )


async def _sample(
    student: Student,
    config: DistillConfig,
    tasks: Sequence[Task],
    views: PromptViews,
    max_tokens: int,
    pair: ReadingPair | None,
) -> list[TrainingSequence]:
    """Returns one sampled turn for each task, as both models read it.

    pair: the student and a teacher that reads it in tokens of its own; None: in the student's.
    """
    student.module.eval()
    sampling = SamplingSettings(temperature=1.0, max_tokens=max_tokens, seed=config.trainer.seed)
    sequences: list[TrainingSequence] = []
    policy = HFPolicy(
        student.loaded,
        sampling,
        max_rows=min(len(tasks), config.rollout.concurrency),
        max_context=config.rollout.max_context_window,
    )

    read = own_prompt(policy.renderer, views)

    async def sample_turn(task: Task, number: int) -> None:
        messages = views.for_student(task).messages
        async with policy.converse(messages, [], seed_key=str(number)) as conversation:
            turn = await conversation.sample()
            trace = conversation.trace()
        if trace is None or not any(trace.sampled):
            return
        reading, own = None, None
        if pair is not None:
            prompt = views.teacher.put_before(task.messages)
            reading = pair.read(trace, [*prompt, turn.message], [], num_turns=1)
        else:
            own = read(task, trace, [])
        sequences.append(
            TrainingSequence(
                sampled_sequence(trace),
                trace.sampled_logprobs,
                reading=reading,
                teacher_tokens=own and sampled_sequence(own),
            )
        )

    async with policy, anyio.create_task_group() as group:
        for number, task in enumerate(tasks):
            group.start_soon(sample_turn, task, number)
    return sequences
