"""What one iteration of on-policy distillation teaches: the teacher scores, the student moves.

Shapes: N sampled tokens of a microbatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stillroom.errors import DataError, TeacherError
from stillroom.models.batches import TokenBatch, collate, microbatches
from stillroom.models.load import LoadedModel
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.scores import TeacherScores
from stillroom.train.advantages import decayed, reward_advantages
from stillroom.train.algorithm import AlgorithmSection
from stillroom.train.config import TrainConfig
from stillroom.train.losses import (
    above_expected,
    beyond_rounding,
    importance_sampling_losses,
    ppo_losses,
    reverse_kl_advantages,
    truncated_ratios,
)
from stillroom.train.optimizer import Optimizer
from stillroom.train.session import epoch_order
from stillroom.train.student import Student
from stillroom.train.student_rollouts import SampledSequence
from stillroom.train.token_scores import TokenScores, score_as_told, score_with_teacher
from stillroom.train.update_stats import UpdateStats


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
    return stats


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
    """Adds the gradient of the mean token loss of one optimiser step's rollouts."""
    num_tokens = sum(lesson.sampled.tokens.num_trained for lesson in lessons)
    for members in _passes(lessons, max_tokens=student.max_microbatch_tokens):
        batch = _collated(student, members)
        scores = _scores(student, teachers, members, batch, algorithm)
        losses_N = _token_losses(scores, members, algorithm, stats)
        loss = losses_N.sum() / num_tokens
        loss.backward()
        stats.loss += losses_N.sum().item()
        stats.num_tokens += batch.num_trained


def _passes(lessons: Sequence[Lesson], *, max_tokens: int) -> Iterator[list[Lesson]]:
    """Yields lessons of similar length with one teacher: each dataset's own."""
    for dataset in sorted({lesson.sampled.dataset for lesson in lessons}):
        own = [lesson for lesson in lessons if lesson.sampled.dataset == dataset]
        lengths = [len(lesson.sampled.tokens.ids) for lesson in own]
        for group in microbatches(lengths, max_tokens=max_tokens):
            yield [own[i] for i in group]


def _collated(student: Student, members: Sequence[Lesson]) -> TokenBatch:
    return collate([member.sampled.tokens for member in members], device=student.loaded.device)


def _scores(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    members: Sequence[Lesson],
    batch: TokenBatch,
    algorithm: AlgorithmSection,
) -> TokenScores:
    told = [member.sampled.teacher for member in members if member.sampled.teacher is not None]
    if len(told) == len(members):
        return score_as_told(student, told, batch, algorithm)
    dataset = members[0].sampled.dataset
    if (teacher := teachers.get(dataset)) is None:
        raise TeacherError(
            f"{len(members) - len(told)} rollouts of dataset {dataset} were not scored by its "
            "teacher",
            "look into the run's log for what its server answered, then resume the run",
        )
    return score_with_teacher(student, teacher, batch, algorithm)


def _token_losses(
    scores: TokenScores, members: Sequence[Lesson], algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the loss of each sampled token and adds to the statistics."""
    student_N, teacher_N = scores.student_N, scores.teacher_N
    now_N = student_N.detach()
    sampler_N = _of_tokens(now_N, [member.sampled.sampler_logprobs for member in members])
    rewards_N = _of_tokens(now_N, [member.advantages for member in members])
    stats.add_teacher_kl(sampler_N - teacher_N, dataset=members[0].sampled.dataset)
    stats.entropy += scores.entropy_N.sum().item()
    stats.add_ratios((now_N - sampler_N).exp())
    if not stats.steps:
        stats.logprob_gap += (now_N - sampler_N).abs().sum().item()
        stats.num_fresh_tokens += len(sampler_N)
    if algorithm.is_sampled_loss:
        return _sampled_losses(scores, members, sampler_N, rewards_N, algorithm, stats)
    losses_N = algorithm.kl_coef * beyond_rounding(scores.divergence_N)
    if algorithm.reward_coef > 0:
        stats.add_advantages(rewards_N)
        losses_N = losses_N + importance_sampling_losses(student_N, sampler_N, rewards_N)
    return losses_N


def _sampled_losses(
    scores: TokenScores,
    members: Sequence[Lesson],
    sampler_N: Tensor,
    rewards_N: Tensor,
    algorithm: AlgorithmSection,
    stats: UpdateStats,
) -> Tensor:
    """Returns the losses that know of the sampled token alone."""
    student_N, cap, coef = scores.student_N, algorithm.importance_cap, algorithm.kl_coef
    old_N, weights_N = sampler_N, torch.ones_like(sampler_N)
    if cap is not None:
        now_N = student_N.detach()
        is_known = members[0].trainer_logprobs is not None
        logprobs = [member.trainer_logprobs for member in members]
        old_N = _of_tokens(now_N, logprobs) if is_known else now_N
        weights_N = truncated_ratios(old_N, sampler_N, cap=cap)
        stats.num_capped += int((weights_N >= cap).sum())
    advantages_N = reverse_kl_advantages(old_N, scores.teacher_N, coef=coef)
    if algorithm.kl_baseline == "exact":
        expected_N = beyond_rounding(scores.divergence_N.detach())
        advantages_N = above_expected(advantages_N, expected_N, coef=coef)
    advantages_N = advantages_N + rewards_N
    stats.add_advantages(advantages_N)
    if algorithm.loss_fn == "importance_sampling":
        return weights_N * importance_sampling_losses(student_N, old_N, advantages_N)
    clip = algorithm.clip_ratio
    ratios_N = (student_N.detach() - old_N).exp()
    is_clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + clip, ratios_N < 1 - clip)
    stats.num_clipped += int(is_clipped_N.sum())
    return weights_N * ppo_losses(student_N, old_N, advantages_N, clip_ratio=clip)


def _of_tokens(like_N: Tensor, values: Sequence[list[float] | None]) -> Tensor:
    """Returns the sequences' numbers one after the other, zeros where they have none."""
    if all(numbers is None for numbers in values):
        return torch.zeros_like(like_N)
    return torch.tensor(
        [x for numbers in values for x in numbers or []], dtype=like_N.dtype, device=like_N.device
    )
