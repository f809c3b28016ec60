"""What one iteration of on-policy distillation teaches: the teacher scores, the student moves.

Shapes: N sampled tokens of a microbatch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stillroom.errors import DataError, TeacherError
from stillroom.models.batches import TokenBatch, microbatches
from stillroom.models.divergence import TokenScores
from stillroom.models.load import LoadedModel
from stillroom.models.sharing import packs
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.scores import TeacherScores
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.schema import TrainConfig
from stillroom.train.loop.row_batches import epoch_order
from stillroom.train.on_policy.advantages import decayed, reward_advantages
from stillroom.train.on_policy.student_rollouts import SampledSequence
from stillroom.train.on_policy.token_losses import KnownTokens, token_losses
from stillroom.train.on_policy.token_scores import (
    Losses,
    add_gradient_with_scores,
    add_gradient_with_teacher,
)
from stillroom.train.on_policy.update_stats import UpdateStats
from stillroom.train.student.model import Student
from stillroom.train.student.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class Lesson:
    """A sampled sequence, and what the update knows of its tokens before the first step."""

    sampled: SampledSequence
    advantages: list[float] | None = None
    """What its reward adds to the advantage of each sampled token; None: nothing."""
    trainer_logprobs: list[float] | None = None
    """Of the sampled tokens, by the student as it was before the iteration's first step."""


def update_student(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    sequences: Sequence[SampledSequence],
    optimizer: Optimizer,
    config: TrainConfig,
    iteration: int,
) -> UpdateStats:
    """Takes the iteration's optimiser steps, each on its share of the rollouts.

    teachers: those in this process, by the dataset they are for.
    """
    algorithm = config.algorithm
    stats = UpdateStats()
    # Not train(): with dropout the trainer's probabilities would not be the sampler's.
    student.module.eval()
    lessons = make_lessons(sequences, algorithm, special_ids=special_token_ids(student.loaded))
    if algorithm.importance_cap is not None and algorithm.substeps > 1:
        lessons = _with_trainer_logprobs(student, lessons)
    order = epoch_order(len(lessons), iteration, config.trainer.seed + 1)
    for share in (order[i :: algorithm.substeps] for i in range(algorithm.substeps)):
        accumulate_gradient(student, teachers, [lessons[i] for i in share], algorithm, stats)
        # Also with an empty share, so that the schedule goes on as planned.
        stats.steps.append(optimizer.step())
    return stats.over(student.peers)


def make_lessons(
    sequences: Sequence[SampledSequence],
    algorithm: AlgorithmSection,
    *,
    special_ids: AbstractSet[int] = frozenset(),
) -> list[Lesson]:
    """Returns what is learnt of the sequences, with their rewards' advantages if these count.

    Raises DataError if rewards are to count and there are none.
    """
    advantages = [0.0] * len(sequences)
    if algorithm.reward_coef > 0:
        rewards = [sequence.reward for sequence in sequences]
        if all(reward is None for reward in rewards):
            raise DataError(
                "algorithm.reward_coef is set and no rollout of the iteration has a reward",
                "give the prompts metadata.expected_answer or write rewards.py beside config.yml; "
                "or leave algorithm.reward_coef out",
            )
        prompts = [(sequence.dataset, sequence.prompt) for sequence in sequences]
        advantages = reward_advantages(rewards, prompts, estimator=algorithm.adv_estimator)
    lessons: list[Lesson] = []
    for sequence, advantage in zip(sequences, advantages, strict=True):
        of_tokens = None
        if algorithm.reward_coef > 0:
            of_tokens = decayed(
                algorithm.reward_coef * advantage,
                sequence.tokens.num_trained,
                gae_lambda=algorithm.gae_lambda,
            )
        lesson = Lesson(sequence, of_tokens)
        if algorithm.mask_special_tokens:
            lesson = _without(special_ids, lesson)
        if lesson.sampled.tokens.num_trained:
            lessons.append(lesson)
    return lessons


def special_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Returns the tokens that are not text: marks of the chat template, and what ends a turn."""
    added = loaded.tokenizer.added_tokens_decoder.items()
    marks = {token_id for token_id, token in added if token.special}
    return frozenset(marks | set(loaded.tokenizer.all_special_ids) | set(loaded.stop_ids))


def _without(special_ids: AbstractSet[int], lesson: Lesson) -> Lesson:
    """Returns the lesson with these tokens only read."""
    sampled, told = lesson.sampled, lesson.sampled.teacher
    ids = sampled.tokens.ids
    is_learnt = [
        is_trained and ids[i] not in special_ids
        for i, is_trained in enumerate(sampled.tokens.trained)
    ]
    where = [i for i, is_trained in enumerate(sampled.tokens.trained) if is_trained and i > 0]
    kept = [place for place, i in enumerate(where) if is_learnt[i]]
    if told is not None:
        told = TeacherScores(
            [told.logprobs[place] for place in kept],
            told.top_ids and [told.top_ids[place] for place in kept],
            told.top_logprobs and [told.top_logprobs[place] for place in kept],
        )
    advantages = lesson.advantages and [lesson.advantages[place] for place in kept]
    return Lesson(
        replace(
            sampled,
            tokens=replace(sampled.tokens, trained=is_learnt),
            sampler_logprobs=[sampled.sampler_logprobs[place] for place in kept],
            teacher=told,
        ),
        advantages,
    )


@torch.no_grad()
def _with_trainer_logprobs(student: Student, lessons: Sequence[Lesson]) -> list[Lesson]:
    """Returns the lessons with what the student, as it is now, finds of their sampled tokens."""
    found: dict[int, Lesson] = {}
    lengths = [len(lesson.sampled.tokens.ids) for lesson in lessons]
    for group in microbatches(lengths, max_tokens=student.max_microbatch_tokens):
        members = [lessons[i] for i in group]
        batch = _collated(student, members)
        with student.autocast():
            logprobs_N = student.head.batch_logprobs(batch)
        parts = logprobs_N.cpu().split([m.sampled.tokens.num_trained for m in members])
        for index, member, part in zip(group, members, parts, strict=True):
            found[index] = replace(member, trainer_logprobs=part.tolist())
    return [found[index] for index in range(len(lessons))]


def accumulate_gradient(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    lessons: Sequence[Lesson],
    algorithm: AlgorithmSection,
    stats: UpdateStats,
) -> None:
    """Adds the gradient of the mean token loss of one optimiser step's rollouts.

    Each process adds that of its share of the rollouts; the mean is over all of them.
    """
    num_tokens = sum(lesson.sampled.tokens.num_trained for lesson in lessons)
    shared = student.peers.share([len(lesson.sampled.tokens.ids) for lesson in lessons])
    for members in _passes(student, [lessons[i] for i in shared]):
        batch = _collated(student, members)
        known = _known(members, batch.targets_N.device)

        def losses(part: slice, scores: TokenScores, known: KnownTokens = known) -> Tensor:
            losses_N = token_losses(scores, known.part(part), algorithm, stats)
            stats.loss += losses_N.sum().item()
            return losses_N / num_tokens

        _add_gradient(student, teachers, members, batch, algorithm, losses)
        stats.num_tokens += batch.num_trained


def _passes(student: Student, lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """Yields lessons to be run at once, with one teacher: each dataset's own.

    In a pack a group's prompt stands once; padded rows are of similar length.
    """
    for dataset in sorted({lesson.sampled.dataset for lesson in lessons}):
        own = [lesson for lesson in lessons if lesson.sampled.dataset == dataset]
        ids = [lesson.sampled.tokens.ids for lesson in own]
        lengths = [len(sequence) for sequence in ids]
        groups = microbatches(lengths, max_tokens=student.max_microbatch_tokens)
        if student.head.can_pack:
            groups = packs(ids, max_tokens=student.pack_tokens(max(lengths)))
        for group in groups:
            yield [own[i] for i in group]


def _collated(student: Student, members: Sequence[Lesson]) -> TokenBatch:
    return student.collate([member.sampled.tokens for member in members])


def _add_gradient(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    members: Sequence[Lesson],
    batch: TokenBatch,
    algorithm: AlgorithmSection,
    losses: Losses,
) -> None:
    """Adds the gradient of the losses' sum, with the scores of whichever teacher there is."""
    told = [member.sampled.teacher for member in members if member.sampled.teacher is not None]
    if len(told) == len(members):
        add_gradient_with_scores(student, told, batch, algorithm, losses)
        return
    dataset = members[0].sampled.dataset
    if (teacher := teachers.get(dataset)) is None:
        raise TeacherError(
            f"{len(members) - len(told)} rollouts of dataset {dataset} were not scored by its "
            "teacher",
            "look into the run's log for what its server answered, then resume the run",
        )
    theirs = batch
    if teacher.head.can_pack != student.head.can_pack:
        theirs = teacher.collate([member.sampled.tokens for member in members])
    add_gradient_with_teacher(student, teacher, batch, theirs, algorithm, losses)


def _known(members: Sequence[Lesson], device: torch.device) -> KnownTokens:
    """Returns what is known of the members' sampled tokens, in their order."""

    def joined(numbers: Iterable[list[float]]) -> Tensor:
        return torch.tensor([x for of_one in numbers for x in of_one], device=device)

    old = [m.trainer_logprobs for m in members if m.trainer_logprobs is not None]
    return KnownTokens(
        joined(m.sampled.sampler_logprobs for m in members),
        joined(m.advantages or [0.0] * m.sampled.tokens.num_trained for m in members),
        joined(old) if old else None,
        members[0].sampled.dataset,
    )
