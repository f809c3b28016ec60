"""Checks student and teacher before time is spent on the first rollout.

Shapes: N sampled tokens.
"""

import functools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task
from stillroom.data.instruction import PromptViews
from stillroom.errors import ConfigError, ModelError
from stillroom.models.batches import TokenSequence
from stillroom.models.pairing import OFF_POLICY_ROUTE
from stillroom.models.reread.pair_check import check_calls
from stillroom.models.reread.rereading import ReadingPair
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.serving.preflight import check_served
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection, served_teacher
from stillroom.train.config.request import TrainingPlan
from stillroom.train.config.schema import DistillConfig, TrainConfig
from stillroom.train.on_policy.token_scores import comparison_of, score_with_teacher
from stillroom.train.student.model import Student
from stillroom.types import Message, SamplingSettings

_PROBE: list[Message] = [
    {"role": "user", "content": "Name three colours, and say why you like them."}
]
"""The prompt of the answers on which sampler and trainer are compared."""
_NUM_TOKENS = 24
_NUM_ANSWERS = 2
# The mean difference in nats per token; rounding in half precision adds up over the layers.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.1


def check_before_rollouts(
    workspace: Workspace,
    config: DistillConfig,
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    views: PromptViews,
    tasks: Sequence[Task],
    *,
    rereading: Collection[int] = (),
) -> list[str]:
    """Checks the student's probabilities and each served teacher; returns notes for the user.

    A teacher in this process is checked as it is loaded (`models.pairing`), as is one that reads
    text in tokens of its own: those of the datasets `rereading`.
    Raises an EngineError if the teacher could not score rollouts correctly.
    """
    notes = check_agreement(student, config.algorithm)
    max_context = min(student.loaded.max_context, config.rollout.max_context_window)
    tokenizer = student.loaded.tokenizer
    leads = prompt_leads(tokenizer, views, tasks)
    rooms = {dataset: teacher.loaded.max_context for dataset, teacher in teachers.items()}
    notes += check_contexts(leads, rooms, max_context=max_context)
    return notes + check_teacher_server(
        workspace,
        config,
        tokenizer,
        max_context=max_context,
        num_own=num_own_tokens(leads),
        rereading=rereading,
    )


def check_tools_can_be_read(
    plan: TrainingPlan, tasks: Sequence[Task], pairs: Mapping[int, ReadingPair]
) -> None:
    """Raises ModelError if the student may call tools whose calls its teacher could not be shown.

    pairs: by dataset, the student and a teacher that reads text in tokens of its own.
    """
    rollout = plan.config.rollout
    has_tools = plan.tools_file is not None or bool(rollout.mcp_servers) or rollout.browse
    datasets = {task.dataset for task in tasks if task.tool_names != []}
    for dataset in sorted(datasets & pairs.keys()) if has_tools else ():
        check_calls(pairs[dataset])


@dataclass(frozen=True, slots=True)
class PromptLead:
    """The tokens of one prompt, without tools, as student and teacher read it."""

    dataset: int
    student: list[int]
    teacher: list[int]


def prompt_leads(tokenizer: Any, views: PromptViews, tasks: Sequence[Task]) -> list[PromptLead]:
    """Returns the first prompt of each dataset as both read it; none if both read the same.

    Raises ModelError if the chat template refuses what one of them is to read.
    """
    if views.are_equal:
        return []
    renderer = ChatRenderer(tokenizer)
    first = {task.dataset: task for task in reversed(tasks)}
    return [
        PromptLead(
            dataset,
            *(
                renderer.prompt_ids(one.put_before(task.messages), [])
                for one in (views.student, views.teacher)
            ),
        )
        for dataset, task in sorted(first.items())
    ]


def num_own_tokens(leads: Sequence[PromptLead]) -> int:
    """Returns the most tokens that a teacher reads beyond the student's, before an answer."""
    return max([0, *(len(lead.teacher) - len(lead.student) for lead in leads)])


def check_contexts(
    leads: Sequence[PromptLead], rooms: Mapping[int, int], *, max_context: int
) -> list[str]:
    """Checks that the teachers in this process have room for prompts of their own; returns notes.

    rooms: the most tokens that they can read, by dataset. max_context: the most tokens of a
    student's rollout. Raises ConfigError if a teacher's context ends with its prompt.
    """
    notes: list[str] = []
    for lead in leads:
        if (room := rooms.get(lead.dataset)) is None:
            continue
        num_own = len(lead.teacher)
        if num_own >= room:
            raise ConfigError(
                f"the teacher's prompt has {num_own} tokens and its context {room}, so it could "
                "not read any answer",
                "shorten teacher.context_file or teacher.system, or take a teacher with a longer "
                "context",
            )
        num = len(lead.student)
        note = f"before an answer the student reads {num} tokens and the teacher {num_own}"
        if (most := room - num_own + num) < max_context:
            note += f"; rollouts of more than {most} tokens are left out and counted (left_out)"
        notes.append(note)
    return notes


def check_teacher_server(
    workspace: Workspace,
    config: TrainConfig,
    tokenizer: Any,
    *,
    max_context: int,
    num_own: int = 0,
    rereading: Collection[int] = (),
) -> list[str]:
    """Checks each served teacher and returns notes; none for teachers in this process.

    num_own: the number of tokens that the teacher reads of a rollout beyond the student's.
    rereading: the datasets whose teachers read text in tokens of their own, and were checked.
    """
    notes: list[str] = []
    scoring = [one for i, one in enumerate(config.teachers) if i not in rereading]
    for teacher in dict.fromkeys(scoring):
        if teacher.section.is_served:
            served = served_teacher(workspace, teacher, top_k=config.num_listed_tokens)
            check = functools.partial(check_served, max_context=max_context, num_own=num_own)
            notes += anyio.run(check, workspace, teacher.tokenizer, served, tokenizer)
    return notes


def check_agreement(student: Student, algorithm: AlgorithmSection) -> list[str]:
    """Checks that sampler, trainer and the teacher's code agree on probabilities; returns a note.

    The student is its own teacher here, so the divergence must be zero.
    Raises ModelError if they differ by more than rounding.
    """
    answers = _answers(student)
    if not answers:
        return ["the student's first token ended its turn, so nothing was measured"]
    sequences = [TokenSequence(answer.ids, answer.sampled) for answer in answers]
    batch = student.collate(sequences)
    same_model = LocalTeacher(student.loaded)
    with torch.no_grad():
        scores = score_with_teacher(student, same_model, batch, batch, comparison_of(algorithm))
    logprobs = [value for answer in answers for value in answer.trace().sampled_logprobs]
    sampler_N = torch.tensor(logprobs, device=scores.student_N.device)
    gap = (scores.student_N - sampler_N).abs().mean().item()
    kl = (scores.student_N - scores.teacher_N).abs().mean().item()
    tolerance = _TOLERANCE.get(student.loaded.model.dtype, _HALF_TOLERANCE)
    if not gap <= tolerance:
        raise ModelError(
            f"sampler and trainer differ by {gap:.3g} nats a token (at most {tolerance:g} is "
            "rounding), so ratios between them would mean nothing",
            f"set model.precision: fp32, or {OFF_POLICY_ROUTE}",
        )
    if not kl <= tolerance:
        raise ModelError(
            f"a teacher that is the student itself would teach {kl:.3g} nats a token (at most "
            f"{tolerance:g} is rounding)",
            f"set model.precision: fp32, or {OFF_POLICY_ROUTE}",
        )
    note = (
        f"sampler and trainer agree to {gap:.1e} nats a token over {len(logprobs)} sampled tokens; "
        f"the student as its own teacher has a KL of {kl:.1e}"
    )
    return [note]


def _answers(student: Student) -> list[DecodedSequence]:
    """Returns short answers of the student, sampled in the same way as in training."""
    loaded = student.loaded
    student.module.eval()
    prompt = ChatRenderer(loaded.tokenizer).prompt_ids(_PROBE, [])
    limit = min(loaded.max_context, len(prompt) + _NUM_TOKENS)
    engine = DecodeEngine(loaded, max_rows=_NUM_ANSWERS, max_context=limit)
    settings = SamplingSettings(temperature=1.0, max_tokens=_NUM_TOKENS)
    sequences = [
        DecodedSequence(settings, draws=random.Random(seed)) for seed in range(_NUM_ANSWERS)
    ]
    for sequence in sequences:
        sequence.give(prompt)
        engine.ask(sequence)
    while engine.has_work:
        engine.step()
    return [sequence for sequence in sequences if any(sequence.sampled)]
