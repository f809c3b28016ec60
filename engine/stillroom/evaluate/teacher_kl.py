"""Measures the exact reverse KL per token between a model and a teacher, on the model's samples.

Shapes: N sampled tokens of a batch, V columns of the vocabulary.
"""

from collections.abc import Sequence

import torch

from stillroom.errors import InputError, ModelError
from stillroom.evaluate.intervals import Estimate, ratio_estimate
from stillroom.evaluate.request import KLModels
from stillroom.models.batches import TokenSequence, microbatches, sampled_sequence
from stillroom.models.divergence import reverse_kl, shared_logprobs
from stillroom.models.load import load_model
from stillroom.models.pairing import check_pair
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.types import Trajectory


@torch.no_grad()
def measure_teacher_kl(
    workspace: Workspace, models: KLModels, rollouts: Sequence[Trajectory]
) -> Estimate:
    """Returns KL(model || teacher) in nats per token, summed over the whole vocabulary.

    The interval assumes that the rollouts are independent, not their tokens.

    Raises:
        InputError: no rollout has a sampled token.
        ModelError: the two models differ in tokens, chat template or turn ends.
    """
    student = load_model(workspace, models.student)
    teacher = load_model(workspace, models.teacher)
    try:
        check_pair(student, teacher)
    except ModelError as error:
        raise ModelError(
            error.problem,
            "leave teacher out and compare accuracies (the KL is over tokens that both models "
            "have), or take a teacher of the student's own family",
        ) from error
    sequences = [
        sampled_sequence(rollout.tokens)
        for rollout in rollouts
        if rollout.tokens is not None and any(rollout.tokens.sampled)
    ]
    if not sequences:
        raise InputError(
            "no rollout holds a sampled token, so there is nothing to measure the KL on",
            "shorten the prompts: they fill the model's context; or leave teacher out",
        )
    sums, sizes = _kl_of_each(sequences, LocalTeacher(student), LocalTeacher(teacher))
    if len(sums) == 1:
        # A single rollout shows no spread, so there is no interval.
        return Estimate(value=sums[0] / sizes[0], low=None, high=None, n=1)
    return ratio_estimate(sums, sizes, least=0.0)


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
