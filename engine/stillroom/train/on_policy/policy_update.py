"""The optimiser steps of one iteration, on the sampled tokens and the teacher's scores.

Shapes: N sampled tokens of a microbatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stillroom.errors import TeacherError
from stillroom.models.batches import TokenBatch, microbatches
from stillroom.models.divergence import TokenScores
from stillroom.models.prefixes import packs
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.schema import DistillConfig
from stillroom.train.on_policy.byte_scores import (
    add_gradient_with_listed_tokens,
    add_gradient_with_reader,
)
from stillroom.train.on_policy.token_losses import (
    KnownTokens,
    UpdateStats,
    row_losses,
    token_losses,
)
from stillroom.train.on_policy.token_scores import (
    Losses,
    ServedScorer,
    add_gradient,
    add_gradient_with_teacher,
    comparison_of,
)
from stillroom.train.on_policy.training_sequences import (
    TrainingSequence,
    known_tokens,
    prepare_sequences,
    special_token_ids,
)
from stillroom.train.student.encode import epoch_order
from stillroom.train.student.model import Student
from stillroom.train.student.optimizer import Optimizer


def update_student(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    sequences: Sequence[TrainingSequence],
    optimizer: Optimizer,
    config: DistillConfig,
    iteration: int,
) -> UpdateStats:
    """Takes an iteration's optimiser steps, each on a part of the rollouts; returns their sums.

    teachers: the teachers in this process, by dataset.
    """
    algorithm = config.algorithm
    stats = UpdateStats()
    # Not train(), since with dropout the trainer's probabilities would differ from the sampler's.
    student.module.eval()
    special_ids = special_token_ids(student.loaded)
    sequences = prepare_sequences(sequences, algorithm, special_ids=special_ids)
    if algorithm.importance_cap is not None and algorithm.substeps > 1:
        # With one step the student's weights don't change before these log-probabilities are
        # needed.
        sequences = _with_trainer_logprobs(student, sequences)
    order = epoch_order(len(sequences), iteration, config.trainer.seed + 1)
    for part in (order[i :: algorithm.substeps] for i in range(algorithm.substeps)):
        accumulate_gradient(student, teachers, [sequences[i] for i in part], algorithm, stats)
        # A step is taken even if the part is empty, so that the learning rate follows its schedule.
        stats.steps.append(optimizer.step())
    return stats.over(student.peers)


@torch.no_grad()
def _with_trainer_logprobs(
    student: Student, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Returns the sequences with their tokens' log-probabilities by the student as it is now."""
    scored: dict[int, TrainingSequence] = {}
    lengths = [len(sequence.tokens.ids) for sequence in sequences]
    for group in microbatches(lengths, max_tokens=student.max_microbatch_tokens):
        members = [sequences[i] for i in group]
        batch = student.collate([member.tokens for member in members])
        with student.autocast():
            logprobs_N = student.head.batch_logprobs(batch)
        parts = logprobs_N.cpu().split([member.tokens.num_trained for member in members])
        for index, member, logprobs_n in zip(group, members, parts, strict=True):
            scored[index] = replace(member, trainer_logprobs=logprobs_n.tolist())
    return [scored[index] for index in range(len(sequences))]


def accumulate_gradient(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    sequences: Sequence[TrainingSequence],
    algorithm: AlgorithmSection,
    stats: UpdateStats,
) -> None:
    """Adds the gradient of the mean token loss of one optimiser step's sequences.

    Each process adds the gradient of its own part; the mean is over all processes' sequences.
    """
    num_tokens = sum(sequence.tokens.num_trained for sequence in sequences)
    mine = student.peers.share([len(sequence.tokens.ids) for sequence in sequences])
    for members in _passes(student, [sequences[i] for i in mine]):
        batch = student.collate([member.tokens for member in members])
        known = known_tokens(members, batch.targets_N.device)

        if members[0].is_row:
            _add_gradient(
                student,
                teachers,
                members,
                batch,
                algorithm,
                lambda _, scores: row_losses(scores, algorithm, stats) / num_tokens,
            )
            continue

        def losses(part: slice, scores: TokenScores, known: KnownTokens = known) -> Tensor:
            losses_n = token_losses(scores, known.part(part), algorithm, stats)
            stats.loss += losses_n.sum().item()
            return losses_n / num_tokens

        _add_gradient(student, teachers, members, batch, algorithm, losses)
        stats.num_tokens += batch.num_trained


def _passes(
    student: Student, sequences: Sequence[TrainingSequence]
) -> Iterator[list[TrainingSequence]]:
    """Yields the sequences of each forward pass: all rows, or rollouts of one teacher's dataset.

    In a pack the shared prompt of a group's rollouts occurs once; padded rows have similar lengths.
    """
    for kind in sorted({(sequence.is_row, sequence.dataset) for sequence in sequences}):
        of_dataset = [one for one in sequences if (one.is_row, one.dataset) == kind]
        ids = [sequence.tokens.ids for sequence in of_dataset]
        lengths = [len(one) for one in ids]
        groups = microbatches(lengths, max_tokens=student.max_microbatch_tokens)
        if student.head.can_pack:
            groups = packs(ids, max_tokens=student.pack_tokens(max(lengths)))
        for group in groups:
            yield [of_dataset[i] for i in group]


def _add_gradient(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    members: Sequence[TrainingSequence],
    batch: TokenBatch,
    algorithm: AlgorithmSection,
    losses: Losses,
) -> None:
    """Adds the gradient of the losses' sum, with the scores of a server or a local teacher."""
    scores = [member.teacher for member in members if member.teacher is not None]
    readings = [member.reading for member in members if member.reading is not None]
    if len(scores) == len(members):
        if readings:
            add_gradient_with_listed_tokens(student, scores, batch, readings, losses)
            return
        scorer = ServedScorer(scores, algorithm, student.loaded.device)
        add_gradient(student, scorer, batch, losses)
        return
    dataset = members[0].dataset
    if (teacher := teachers.get(dataset)) is None:
        raise TeacherError(
            f"{len(members) - len(scores)} rollouts of dataset {dataset} were not scored by its "
            "teacher",
            "look into the run's log for what its server answered, then resume the run",
        )
    if readings:
        add_gradient_with_reader(student, teacher, batch, readings, losses)
        return
    teacher_batch = batch
    if any(member.teacher_tokens is not None for member in members):
        # The teacher's own prompt may be long, and the batch was chosen by the student's tokens.
        teacher_batch = teacher.collate_long([m.teacher_tokens or m.tokens for m in members])
    elif teacher.head.rules != student.head.rules:
        teacher_batch = teacher.collate([member.tokens for member in members])
    comparison = comparison_of(algorithm)
    add_gradient_with_teacher(student, teacher, batch, teacher_batch, comparison, losses)
