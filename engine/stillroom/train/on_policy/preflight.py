"""Checks student and teacher before any time is spent on rollouts.

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
"""The prompt for answers on which sampler and trainer are compared."""
_NUM_TOKENS = 24
_NUM_ANSWERS = 2
# The mean difference in nats per token; rounding in bf16 and fp16 accumulates over the layers.
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
    cross_tokenizer_datasets: Collection[int] = (),
) -> list[str]:
    """Checks that rollouts can be sampled and scored correctly; returns notes for the user.

    Sampler and trainer must agree, teachers in this process need room for their prompts, and each
    served teacher must score tokens. Whether a teacher in this process scores correctly is checked
    when it is loaded (`models.pairing`), as is a teacher with another tokenizer.
    cross_tokenizer_datasets: the indices of datasets whose teacher has another tokenizer.
    Raises EngineError if a check fails.
    """
    notes = check_agreement(student, config.algorithm)
    max_context = min(student.loaded.max_context, config.rollout.max_context_window)
    tokenizer = student.loaded.tokenizer
    prompts = paired_prompts(tokenizer, views, tasks)
    contexts = {dataset: teacher.loaded.max_context for dataset, teacher in teachers.items()}
    notes += check_contexts(prompts, contexts, max_context=max_context)
    return notes + check_teacher_server(
        workspace,
        config,
        tokenizer,
        max_context=max_context,
        num_extra=max_extra_tokens(prompts),
        cross_tokenizer_datasets=cross_tokenizer_datasets,
    )


def check_tool_calls(
    plan: TrainingPlan, tasks: Sequence[Task], pairs: Mapping[int, ReadingPair]
) -> None:
    """Raises ModelError if the student has tools but its teacher's template cannot render calls.

    pairs: the student paired with each teacher of another tokenizer or template, by dataset.
    """
    rollout = plan.config.rollout
    has_tools = plan.tools_file is not None or bool(rollout.mcp_servers) or rollout.browse
    datasets = {task.dataset for task in tasks if task.tool_names != []}
    for dataset in sorted(datasets & pairs.keys()) if has_tools else ():
        check_calls(pairs[dataset])


@dataclass(frozen=True, slots=True)
class PairedPrompt:
    """One prompt, without tools, in the student's and in the teacher's tokens."""

    dataset: int
    student: list[int]
    teacher: list[int]


def paired_prompts(tokenizer: Any, views: PromptViews, tasks: Sequence[Task]) -> list[PairedPrompt]:
    """Returns the first prompt of each dataset for both models; [] if their prompts are equal.

    Raises ModelError if the chat template rejects one of the prompts.
    """
    if views.are_equal:
        return []
    renderer = ChatRenderer(tokenizer)
    first = {task.dataset: task for task in reversed(tasks)}
    return [
        PairedPrompt(
            dataset,
            *(
                renderer.prompt_ids(one.apply_to(task.messages), [])
                for one in (views.student, views.teacher)
            ),
        )
        for dataset, task in sorted(first.items())
    ]


def max_extra_tokens(prompts: Sequence[PairedPrompt]) -> int:
    """Returns the maximum number of tokens by which a teacher's prompt exceeds the student's."""
    return max([0, *(len(prompt.teacher) - len(prompt.student) for prompt in prompts)])


def check_contexts(
    prompts: Sequence[PairedPrompt], contexts: Mapping[int, int], *, max_context: int
) -> list[str]:
    """Checks that the teachers in this process have room for their own prompts; returns notes.

    contexts: the context lengths of the teachers, by dataset. max_context: the maximum number of
    tokens of a rollout. Raises ConfigError if a teacher's prompt fills its context.
    """
    notes: list[str] = []
    for prompt in prompts:
        if (context := contexts.get(prompt.dataset)) is None:
            continue
        num_teacher, num_student = len(prompt.teacher), len(prompt.student)
        if num_teacher >= context:
            raise ConfigError(
                f"the teacher's prompt has {num_teacher} tokens, but its context only "
                f"{context}, which leaves no room for an answer",
                "shorten teacher.context_file or teacher.system, or use a teacher with a longer "
                "context",
            )
        note = f"the student's prompt has {num_student} tokens, the teacher's {num_teacher}"
        if (limit := context - num_teacher + num_student) < max_context:
            note += f"; rollouts of more than {limit} tokens are skipped and counted (left_out)"
        notes.append(note)
    return notes


def check_teacher_server(
    workspace: Workspace,
    config: TrainConfig,
    tokenizer: Any,
    *,
    max_context: int,
    num_extra: int = 0,
    cross_tokenizer_datasets: Collection[int] = (),
) -> list[str]:
    """Checks each served teacher and returns notes; none for teachers in this process.

    num_extra: the number of tokens by which the teacher's prompt exceeds the student's.
    cross_tokenizer_datasets: datasets whose teacher has another tokenizer; skipped here.
    """
    notes: list[str] = []
    scoring = [one for i, one in enumerate(config.teachers) if i not in cross_tokenizer_datasets]
    for teacher in dict.fromkeys(scoring):
        if teacher.section.is_served:
            served = served_teacher(workspace, teacher, top_k=config.served_top_k)
            check = functools.partial(check_served, max_context=max_context, num_extra=num_extra)
            notes += anyio.run(check, workspace, teacher.tokenizer, served, tokenizer)
    return notes


def check_agreement(student: Student, algorithm: AlgorithmSection) -> list[str]:
    """Checks that sampler, trainer and the teacher's code agree on probabilities; returns a note.

    The student is scored as its own teacher, so the divergence must be zero.
    Raises ModelError if they differ by more than rounding.
    """
    answers = _sample_answers(student)
    if not answers:
        return ["the student's first token ended its turn, so agreement was not measured"]
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
            f"sampler and trainer differ by {gap:.3g} nats per token (rounding explains at most "
            f"{tolerance:g}), so their probability ratios would be wrong",
            f"set model.precision: fp32, or {OFF_POLICY_ROUTE}",
        )
    if not kl <= tolerance:
        raise ModelError(
            f"the student as its own teacher has a KL of {kl:.3g} nats per token (rounding "
            f"explains at most {tolerance:g})",
            f"set model.precision: fp32, or {OFF_POLICY_ROUTE}",
        )
    note = (
        f"sampler and trainer agree to {gap:.1e} nats per token over {len(logprobs)} sampled "
        f"tokens; the student as its own teacher has a KL of {kl:.1e}"
    )
    return [note]


def _sample_answers(student: Student) -> list[DecodedSequence]:
    """Returns short answers that the student gives when it is sampled as in training."""
    loaded = student.loaded
    student.module.eval()
    prompt = ChatRenderer(loaded.tokenizer).prompt_ids(_PROBE, [])
    limit = min(loaded.max_context, len(prompt) + _NUM_TOKENS)
    engine = DecodeEngine(loaded, max_rows=_NUM_ANSWERS, max_context=limit)
    settings = SamplingSettings(temperature=1.0, max_tokens=_NUM_TOKENS)
    sequences = [DecodedSequence(settings, rng=random.Random(seed)) for seed in range(_NUM_ANSWERS)]
    for sequence in sequences:
        sequence.append_given(prompt)
        engine.request_turn(sequence)
    while engine.has_work:
        engine.step()
    return [sequence for sequence in sequences if any(sequence.sampled)]
