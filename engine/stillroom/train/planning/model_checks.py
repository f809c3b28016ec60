"""Checks of the models before a run: whether they are compatible, and how far apart they are.

Shapes: N sampled tokens, V vocabulary, K most likely tokens.
"""

from collections.abc import Sequence
from statistics import fmean

import torch

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task
from stillroom.models.batches import TokenSequence
from stillroom.models.divergence import shared_logprobs
from stillroom.models.load import context_length
from stillroom.models.reread.rereading import Reader, ReadingPair
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.request import TrainingPlan
from stillroom.train.methods.dpo import TokenPair
from stillroom.train.on_policy.preflight import (
    check_contexts,
    check_teacher_server,
    check_tool_calls,
    max_extra_tokens,
    paired_prompts,
)
from stillroom.train.on_policy.teachers import check_teacher_context
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.planning.weightless_models import WeightlessStudent, WeightlessTeachers
from stillroom.train.student.model import Student
from stillroom.types import Message

# A hundred times the uniform probability in a vocabulary of 100,000 tokens.
_UNLIKELY = 1e-3
# A teacher whose end token is less likely than this where answers end would write longer ones.
_UNSURE = 0.2
_VOCABULARY_LAYERS = ("lm_head", "embed", "wte")
_TOP_K = 16
# Nats per token. Two seeds of the same training differ by more.
_SAME_KL = 0.01
_LITTLE_OVERLAP = 0.25


def end_token_notes(
    student: Student, sequences: Sequence[TokenSequence], teacher: LocalTeacher | None = None
) -> list[str]:
    """Returns a note for each model that is unlikely to end the answers where they end.

    The student is measured if its LoRA adapter could not learn the end token; a teacher of soft
    targets, because it would teach the student to continue.
    """
    tokenizer = student.loaded.tokenizer
    end = ChatRenderer(tokenizer).end_of_turn
    batch = student.collate(sequences)
    is_end_N = batch.targets_N == tokenizer.convert_tokens_to_ids(end)
    if not bool(is_end_N.any()):
        return []
    notes: list[str] = []
    measured = f"(mean of {int(is_end_N.sum())})"
    if student.is_adapter and not _trains_vocabulary(student):
        with torch.no_grad():
            probability = student.logprobs(batch)[is_end_N].mean().exp().item()
        if probability < _UNLIKELY:
            notes.append(
                f"where the first answers end, the student gives {end} a probability of "
                f"{probability:.1g} {measured}, and the adapter trains neither the embeddings nor "
                f"the output head: after training, check with evaluate_model that answers end with "
                f"{end}; if not, train longer, train all weights (model.qlora_rank: 0), or use a "
                "chat template whose end token the model knows"
            )
    if teacher is not None:
        scores_N = torch.cat(teacher.score_tokens(sequences))
        probability = scores_N[is_end_N.cpu()].mean().exp().item()
        if probability < _UNSURE:
            notes.append(
                f"where the first answers end, the teacher gives {end} a probability of "
                f"{probability:.1g} {measured}: its soft targets would teach the student to "
                "continue there; use rows that this teacher wrote, or train on tokens (leave "
                "soft_targets out)"
            )
    return notes


def _trains_vocabulary(student: Student) -> bool:
    trained = (name for name, p in student.module.named_parameters() if p.requires_grad)
    return any(part in name for name in trained for part in _VOCABULARY_LAYERS)


@torch.no_grad()
def divergence_note(
    student: Student, teacher: LocalTeacher, sequences: Sequence[TrainingSequence]
) -> str:
    """Returns a note on how far apart student and teacher are on the student's own tokens.

    Measured as reverse KL, and as the share of the K most likely tokens that both have in common.
    """
    kls: list[float] = []
    overlaps: list[float] = []
    for sequence in sequences:
        logits_NV = student.head.batch_logits(student.collate([sequence.tokens]))
        for_teacher = teacher.collate([sequence.tokens.for_teacher or sequence.tokens])
        student_NV, teacher_NV = shared_logprobs(logits_NV, teacher.logits(for_teacher))
        kls += (student_NV.exp() * (student_NV - teacher_NV)).sum(dim=-1).tolist()
        num = min(_TOP_K, student_NV.shape[1])
        top_NK, other_NK = (one_NV.topk(num).indices for one_NV in (student_NV, teacher_NV))
        is_shared_NK = (top_NK[:, :, None] == other_NK[:, None, :]).any(dim=-1)
        overlaps += is_shared_NK.float().mean(dim=-1).tolist()
    kl, overlap = fmean(kls), fmean(overlaps)
    note = (
        f"on {len(sequences)} short answers of the student, its reverse KL to the teacher is "
        f"{kl:.2g} nats per token, and they share {overlap:.0%} of their {_TOP_K} most likely "
        "tokens"
    )
    if kl < _SAME_KL:
        return note + (
            ": this teacher will teach little; compare both with evaluate_model first, and look "
            "for a stronger teacher or harder prompts"
        )
    if overlap < _LITTLE_OVERLAP:
        return note + (
            ": so far apart, on-policy distillation learns slowly; train the student on the "
            "teacher's answers first (dataset_type: sft)"
        )
    return note


def prompt_note(pair: ReadingPair, messages: Sequence[Message]) -> str | None:
    """Returns a note on what one model's chat template alone adds to a prompt; None if nothing.

    For example a default system message, or the date.
    """
    student, teacher = (_added_lines(one, messages) for one in (pair.student, pair.teacher))
    differing = [(pair.student.name, student - teacher), (pair.teacher.name, teacher - student)]
    parts = [
        f"the chat template of {name} adds {', '.join(map(repr, sorted(lines)))}"
        for name, lines in differing
        if lines
    ]
    if not parts:
        return None
    return (
        "; ".join(parts) + ": so the models answer different prompts; if that matters, give the "
        "prompts a system message"
    )


def _added_lines(reader: Reader, messages: Sequence[Message]) -> set[str]:
    """Returns the lines of a rendered prompt that come neither from messages nor special tokens."""
    text = reader.renderer.decode(reader.renderer.prompt_ids(messages, []))
    for message in messages:
        text = text.replace(str(message.get("content", "")).strip(), "\n")
    for token in reader.tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(str(token), "\n")
    # A role is one word.
    return {line.strip() for line in text.splitlines() if len(line.split()) > 1}


def check_models(
    workspace: Workspace,
    plan: TrainingPlan,
    student: WeightlessStudent,
    teachers: WeightlessTeachers,
    tasks: Sequence[Task],
    units: Sequence[TokenSequence | TokenPair],
) -> list[str]:
    """Checks the teachers and returns notes; raises EngineError if one would end the run.

    units: the sequences or pairs to train on; none if the student samples them (distill).
    """
    config = student.config
    if config.soft_targets is not None and teachers.contexts:
        sequences = [unit for unit in units if isinstance(unit, TokenSequence)]
        check_teacher_context(min(teachers.contexts.values()), sequences)
    pairs = {
        i: teachers.pairs[one] for i, one in enumerate(config.teachers) if one in teachers.pairs
    }
    check_tool_calls(plan, tasks, pairs)
    local_paths = dict.fromkeys(t.path for t in config.teachers if not t.section.is_served)
    is_reread = config.teacher is not None and config.teacher.tokens == "reread"
    result = (
        "can score the student's text with its own tokenizer"
        if is_reread
        else "has the student's tokenizer and chat template"
    )
    checks = [f"{path} {result}" for path in local_paths]
    max_context = min(context_length(student.empty), config.rollout.max_context_window)
    prompts = paired_prompts(student.tokenizer, plan.views, tasks)
    contexts = {
        i: teachers.contexts[one]
        for i, one in enumerate(config.teachers)
        if one in teachers.contexts
    }
    checks += check_contexts(prompts, contexts, max_context=max_context)
    checks += [note for notes in teachers.cross_tokenizer.values() for note in notes]
    first = {task.dataset: task for task in reversed(tasks)}
    for dataset, pair in pairs.items():
        if dataset in first and (note := prompt_note(pair, first[dataset].messages)) is not None:
            checks.append(note)
    return checks + check_teacher_server(
        workspace,
        config,
        student.tokenizer,
        max_context=max_context,
        num_extra=max_extra_tokens(prompts),
        cross_tokenizer_datasets=[
            i for i, one in enumerate(config.teachers) if one in teachers.cross_tokenizer
        ],
    )
