"""Measures the exact reverse KL per token between a model and a teacher, on the model's samples.

Shapes: N sampled tokens of a batch, K tokens of a teacher with another tokenizer, V columns of the
vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stillroom.errors import InputError, ModelError
from stillroom.evaluate.intervals import Estimate, ratio_estimate
from stillroom.evaluate.request import KLModels
from stillroom.models.batches import TokenSequence, microbatches, sampled_sequence
from stillroom.models.divergence import reverse_kl, shared_logprobs
from stillroom.models.load import include_tools, load_model
from stillroom.models.reread.byte_chain import NextSymbols, SortedSums, SummedSymbols, TrieNodes
from stillroom.models.reread.pair_check import open_pair
from stillroom.models.reread.rereading import ByteReading
from stillroom.models.reread.tile_divergence import ByteDivergences
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.types import Trajectory


@torch.no_grad()
def measure_teacher_kl(
    workspace: Workspace,
    models: KLModels,
    rollouts: Sequence[Trajectory],
    note: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Returns KL(model || teacher) in nats per token, summed over the whole vocabulary.

    A teacher with another tokenizer or chat template tokenizes the rollouts itself. The KL of a
    token is then the sum, over its bytes, of the KL of the next byte. Tokens that cannot be
    compared are left out, and `note` is called with the share of compared tokens. The interval
    assumes that rollouts are independent, but not their tokens.

    Raises:
        InputError: no rollout has a sampled token that can be compared.
        ModelError: the teacher's tokenizer or chat template cannot be compared with the model's.
    """
    student = load_model(workspace, models.student, template=models.template)
    teacher = load_model(workspace, models.teacher)
    if any(rollout.tools for rollout in rollouts):
        # The student's own template was changed in the same way when it was sampled.
        for loaded in [teacher] if models.template is not None else [student, teacher]:
            include_tools(loaded)
    try:
        pair = open_pair(student, teacher)
    except ModelError as error:
        raise ModelError(
            error.problem,
            "leave teacher out and compare accuracies, or use a teacher of the student's own "
            "family",
        ) from error
    sampled = [
        (rollout, rollout.tokens)
        for rollout in rollouts
        if rollout.tokens is not None and any(rollout.tokens.sampled)
    ]
    sequences = [sampled_sequence(tokens) for _, tokens in sampled]
    if not sequences:
        raise InputError(
            "no rollout has a sampled token, so there is nothing to measure the KL on",
            "shorten the prompts, which fill the model's context, or leave teacher out",
        )
    scoring = LocalTeacher(student), LocalTeacher(teacher)
    if pair is None:
        sums, sizes = _kl_of_each(sequences, *scoring)
    else:
        readings = [
            pair.read(tokens, one.messages, one.tools, num_turns=one.turns)
            for one, tokens in sampled
        ]
        sums, sizes = _byte_kl_of_each(sequences, readings, *scoring)
        share = sum(sizes) / sum(sequence.num_trained for sequence in sequences)
        note(
            f"{pair.teacher.name} has another tokenizer or chat template than the student, so "
            "teacher_kl compares the two per byte and sums the reverse KL over each student token; "
            f"{share:.1%} of the student's tokens could be compared"
        )
    if len(sums) == 1:
        # A single rollout shows no spread, so there is no interval.
        return Estimate(value=sums[0] / sizes[0], low=None, high=None, n=1)
    return ratio_estimate(sums, sizes, lowest=0.0)


def _kl_of_each(
    sequences: Sequence[TokenSequence], student: LocalTeacher, teacher: LocalTeacher
) -> tuple[list[float], list[int]]:
    """Returns, for each sequence, the KL summed over its sampled tokens, and their number."""
    sums: list[float] = []
    sizes: list[int] = []
    lengths = [len(sequence.ids) for sequence in sequences]
    for group in microbatches(lengths, max_tokens=4096):
        members = [sequences[i] for i in group]
        student_NV, teacher_NV = shared_logprobs(
            student.logits(student.collate(members)), teacher.logits(teacher.collate(members))
        )
        kl_N = reverse_kl(student_NV, teacher_NV, student_NV.exp()).value_N
        counts = [member.num_trained for member in members]
        sums += [part.sum().item() for part in kl_N.split(counts)]
        sizes += counts
    return sums, sizes


def _byte_kl_of_each(
    sequences: Sequence[TokenSequence],
    readings: Sequence[ByteReading],
    student: LocalTeacher,
    teacher: LocalTeacher,
) -> tuple[list[float], list[int]]:
    """Returns, for each sequence, the KL summed over its bytes, and its number of compared tokens.

    Sequences in which no token can be compared are left out.
    """
    sums: list[float] = []
    sizes: list[int] = []
    pairs = list(zip(sequences, readings, strict=True))
    lengths = [len(sequence.ids) + len(reading.tokens.ids) for sequence, reading in pairs]
    for group in microbatches(lengths, max_tokens=4096):
        members, read = [sequences[i] for i in group], [readings[i] for i in group]
        counts = [member.num_trained for member in members]
        kl_N = _byte_kl(members, read, student, teacher)
        for reading, count, kl_n in zip(read, counts, kl_N.split(counts), strict=True):
            if count > reading.num_uncompared_tokens:
                sums.append(kl_n.sum().item())
                sizes.append(count - reading.num_uncompared_tokens)
    if not sizes:
        raise InputError(
            "the teacher's chat template cannot render any turn of the samples, so there is "
            "nothing to measure the KL on",
            "leave teacher out and compare accuracies",
        )
    return sums, sizes


def _byte_kl(
    sequences: Sequence[TokenSequence],
    readings: Sequence[ByteReading],
    student: LocalTeacher,
    teacher: LocalTeacher,
) -> Tensor:
    """Returns the reverse KL, KL(student || teacher), of each sampled token, [N].

    A token's KL is the sum over its bytes.
    """
    student_NV = student.logits(student.collate(sequences)).log_softmax(-1)
    teacher_batch = teacher.collate([reading.tokens for reading in readings])
    teacher_KV = teacher.logits(teacher_batch).softmax(-1).to(student_NV.device)
    order_P = torch.from_numpy(readings[0].pair.teacher_trie.order).to(student_NV.device)

    def symbols(part: slice, cuts: Sequence[TrieNodes]) -> NextSymbols:
        return SummedSymbols(SortedSums(teacher_KV[part], order_P, cuts))

    counts = [sequence.num_trained for sequence in sequences]
    divergences = ByteDivergences(readings, counts, student_NV.device)
    all_tokens = slice(0, len(student_NV))
    divergence, _ = divergences.compute_tile(all_tokens, student_NV, student_NV.exp(), symbols)
    return divergence.value_N
