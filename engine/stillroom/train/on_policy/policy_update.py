"""The optimiser steps of one iteration, on the sampled tokens and the teacher's scores.

Shapes: N sampled tokens of a microbatch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stillroom.errors import TeacherError
from stillroom.models.batches import TokenBatch, microbatches
from stillroom.models.divergence import TokenScores
from stillroom.models.prefixes import group_by_prefix
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.schema import DistillConfig
from stillroom.train.loop.rows import epoch_order
from stillroom.train.methods.losses import (
    importance_sampling_losses,
    ppo_losses,
    reverse_kl_advantages,
    subtract_expected_advantage,
    truncated_ratios,
    zero_rounding,
)
from stillroom.train.on_policy.teachers import teacher_batch
from stillroom.train.on_policy.token_scores import (
    Losses,
    ServedScorer,
    add_gradient,
    add_gradient_by_bytes,
    add_gradient_with_listed_tokens,
    add_gradient_with_teacher,
    comparison_of,
)
from stillroom.train.on_policy.training_sequences import (
    SampledTokens,
    TrainingSequence,
    prepare_sequences,
    sampled_tokens,
    special_token_ids,
)
from stillroom.train.student.collective import Collective
from stillroom.train.student.model import Optimizer, StepInfo, Student

_SUMS = (
    "loss",
    "entropy",
    "logprob_gap",
    "num_tokens",
    "num_fresh_tokens",
    "num_tail",
    "ratio",
    "num_clipped",
    "num_capped",
    "advantage",
    "squared_advantage",
    "num_advantages",
    "row_loss",
    "num_row_tokens",
)
"""The fields of UpdateStats that are summed over processes by plain addition."""

_TAIL_NATS = math.log(100)
"""A token counts as tail if the teacher finds it a hundred times less likely than the sampler."""


@dataclass(slots=True)
class UpdateStats:
    """Running sums over the tokens of one iteration's update."""

    loss: float = 0.0
    entropy: float = 0.0
    """The student's entropy (nats): exact if the loss uses the full distribution, else -log p of
    the sampled tokens."""
    logprob_gap: float = 0.0
    """|log p_trainer - log p_sampler| of the tokens scored before the first optimiser step."""
    num_tokens: int = 0
    num_fresh_tokens: int = 0
    """The tokens scored before the first optimiser step."""
    num_tail: int = 0
    """The tokens that the sampler finds at least a hundred times as likely as the teacher."""
    ratio: float = 0.0
    """The ratio p_now / p_when_sampled."""
    largest_ratio: float = 0.0
    num_clipped: int = 0
    num_capped: int = 0
    advantage: float = 0.0
    squared_advantage: float = 0.0
    num_advantages: int = 0
    row_loss: float = 0.0
    """The loss of rows that the student did not sample."""
    num_row_tokens: int = 0
    gaps_by_dataset: dict[int, tuple[float, int]] = field(
        default_factory=dict[int, tuple[float, int]]
    )
    """The sum of log p_sampler - log p_teacher over each dataset's tokens, and their number."""
    steps: list[StepInfo] = field(default_factory=list[StepInfo])

    @property
    def teacher_kl(self) -> float:
        """The sum of log p_sampler - log p_teacher over all sampled tokens."""
        return sum(gaps for gaps, _ in self.gaps_by_dataset.values())

    def add_teacher_kl(self, gaps_N: Tensor, *, dataset: int) -> None:
        """Adds log p_sampler - log p_teacher of one dataset's tokens."""
        self._add_gaps(dataset, gaps_N.sum().item(), len(gaps_N))
        self.num_tail += int((gaps_N > _TAIL_NATS).sum())

    def add_ratios(self, ratios_N: Tensor) -> None:
        """Adds the tokens' ratios p_now / p_when_sampled."""
        if len(ratios_N):
            self.ratio += ratios_N.sum().item()
            self.largest_ratio = max(self.largest_ratio, ratios_N.max().item())

    def add_advantages(self, advantages_N: Tensor) -> None:
        """Adds the tokens' advantages, from rewards and the teacher together."""
        self.advantage += advantages_N.sum().item()
        self.squared_advantage += advantages_N.square().sum().item()
        self.num_advantages += len(advantages_N)

    def sum_over(self, peers: Collective) -> "UpdateStats":
        """Returns the sums over all processes."""
        total, *others = peers.gathered(self)
        for part in others:
            total._add(part)
        return total

    def _add(self, other: "UpdateStats") -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_ratio = max(self.largest_ratio, other.largest_ratio)
        for dataset, (gaps, count) in other.gaps_by_dataset.items():
            self._add_gaps(dataset, gaps, count)

    def _add_gaps(self, dataset: int, gaps: float, count: int) -> None:
        before, tokens = self.gaps_by_dataset.get(dataset, (0.0, 0))
        self.gaps_by_dataset[dataset] = before + gaps, tokens + count

    def metrics(self, *, is_clipped: bool, is_capped: bool) -> dict[str, float]:
        """Returns the means over tokens, named as in events.jsonl.

        is_clipped, is_capped: whether the loss clips or caps ratios; the share of such tokens is
        then a metric.
        """
        tokens = max(1, self.num_tokens)
        metrics = {
            "teacher_kl": self.teacher_kl / tokens,
            "tail": self.num_tail / tokens,
            "loss": self.loss / tokens,
            "logprob_gap": self.logprob_gap / max(1, self.num_fresh_tokens),
            "entropy": self.entropy / tokens,
            "ratio": self.ratio / tokens,
            "ratio_max": self.largest_ratio,
        }
        if len(self.gaps_by_dataset) > 1:
            for dataset, (total, count) in sorted(self.gaps_by_dataset.items()):
                metrics[f"teacher_kl/dataset_{dataset}"] = total / max(1, count)
        if self.num_advantages:
            mean = self.advantage / self.num_advantages
            variance = self.squared_advantage / self.num_advantages - mean**2
            metrics |= {"advantage": mean, "advantage_std": math.sqrt(max(0.0, variance))}
        if self.num_row_tokens:
            metrics["row_loss"] = self.row_loss / self.num_row_tokens
        if is_clipped:
            metrics["clipped"] = self.num_clipped / tokens
        if is_capped:
            metrics["capped"] = self.num_capped / tokens
        if self.steps:
            metrics["grad_norm"] = self.steps[-1].grad_norm
            metrics["learning_rate"] = self.steps[-1].learning_rate
        return metrics


def token_losses(
    scores: TokenScores, sampled: SampledTokens, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the loss of each sampled token, [N], and adds its metrics to `stats`."""
    student_N, teacher_N = scores.student_N, scores.teacher_N
    now_N = student_N.detach()
    sampler_logprobs_N, reward_advantages_N = (
        sampled.sampler_logprobs_N,
        sampled.reward_advantages_N,
    )
    stats.add_teacher_kl(sampler_logprobs_N - teacher_N, dataset=sampled.dataset)
    stats.entropy += scores.entropy_N.sum().item()
    stats.add_ratios((now_N - sampler_logprobs_N).exp())
    if not stats.steps:
        stats.logprob_gap += (now_N - sampler_logprobs_N).abs().sum().item()
        stats.num_fresh_tokens += len(sampler_logprobs_N)
    if algorithm.loss.is_policy_gradient:
        return _policy_gradient_losses(scores, sampled, algorithm, stats)
    losses_N = algorithm.kl_coef * zero_rounding(scores.divergence_N)
    if algorithm.reward_coef > 0:
        stats.add_advantages(reward_advantages_N)
        losses_N = losses_N + importance_sampling_losses(
            student_N, sampler_logprobs_N, reward_advantages_N
        )
    return losses_N


def row_losses(scores: TokenScores, algorithm: AlgorithmSection, stats: UpdateStats) -> Tensor:
    """Returns the losses of tokens that the student did not sample, [N]; counts them in `stats`."""
    losses_N = algorithm.kl_coef * zero_rounding(scores.divergence_N)
    stats.row_loss += losses_N.sum().item()
    stats.num_row_tokens += len(losses_N)
    return losses_N


def _policy_gradient_losses(
    scores: TokenScores, sampled: SampledTokens, algorithm: AlgorithmSection, stats: UpdateStats
) -> Tensor:
    """Returns the policy-gradient losses of the sampled tokens, [N].

    These losses use only the log-probabilities of the sampled tokens, not whole distributions.
    """
    student_N, cap, coef = scores.student_N, algorithm.importance_cap, algorithm.kl_coef
    sampler_logprobs_N = old_logprobs_N = sampled.sampler_logprobs_N
    weights_N = torch.ones_like(sampler_logprobs_N)
    if cap is not None:
        old_logprobs_N = (
            student_N.detach() if sampled.old_logprobs_N is None else sampled.old_logprobs_N
        )
        weights_N = truncated_ratios(old_logprobs_N, sampler_logprobs_N, cap=cap)
        stats.num_capped += int((weights_N >= cap).sum())
    advantages_N = reverse_kl_advantages(old_logprobs_N, scores.teacher_N, coef=coef)
    if algorithm.kl_baseline == "exact":
        expected_N = zero_rounding(scores.divergence_N.detach())
        advantages_N = subtract_expected_advantage(advantages_N, expected_N, coef=coef)
    advantages_N = advantages_N + sampled.reward_advantages_N
    stats.add_advantages(advantages_N)
    if "clip_ratio" in algorithm.loss.options:
        clip = algorithm.clip_ratio
        ratios_N = (student_N.detach() - old_logprobs_N).exp()
        is_clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + clip, ratios_N < 1 - clip)
        stats.num_clipped += int(is_clipped_N.sum())
        return weights_N * ppo_losses(student_N, old_logprobs_N, advantages_N, clip_ratio=clip)
    return weights_N * importance_sampling_losses(student_N, old_logprobs_N, advantages_N)


def update_student(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    sequences: Sequence[TrainingSequence],
    optimizer: Optimizer,
    config: DistillConfig,
    iteration: int,
) -> UpdateStats:
    """Takes an iteration's optimiser steps, each on a part of the rollouts; returns the stats.

    teachers: the teachers in this process, by dataset.
    """
    algorithm = config.algorithm
    stats = UpdateStats()
    # Not train(): dropout would make the trainer's probabilities differ from the sampler's.
    student.module.eval()
    special_ids = special_token_ids(student.loaded)
    sequences = prepare_sequences(sequences, algorithm, special_ids=special_ids)
    if algorithm.importance_cap is not None and algorithm.substeps > 1:
        # With one step, the weights do not change before these log-probabilities are needed.
        sequences = _with_trainer_logprobs(student, sequences)
    order = epoch_order(len(sequences), iteration, config.trainer.seed + 1)
    for part in (order[i :: algorithm.substeps] for i in range(algorithm.substeps)):
        accumulate_gradient(student, teachers, [sequences[i] for i in part], algorithm, stats)
        # Step even without sequences, so that the learning rate follows its schedule.
        stats.steps.append(optimizer.step())
    return stats.sum_over(student.peers)


@torch.no_grad()
def _with_trainer_logprobs(
    student: Student, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Returns the sequences with the tokens' log-probabilities under the current student."""
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
    own_indices = student.peers.share([len(sequence.tokens.ids) for sequence in sequences])
    for members in _passes(student, [sequences[i] for i in own_indices]):
        batch = student.collate([member.tokens for member in members])
        sampled = sampled_tokens(members, batch.targets_N.device)

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

        def losses(part: slice, scores: TokenScores, sampled: SampledTokens = sampled) -> Tensor:
            losses_n = token_losses(scores, sampled.part(part), algorithm, stats)
            stats.loss += losses_n.sum().item()
            return losses_n / num_tokens

        _add_gradient(student, teachers, members, batch, algorithm, losses)
        stats.num_tokens += batch.num_trained


def _passes(
    student: Student, sequences: Sequence[TrainingSequence]
) -> Iterator[list[TrainingSequence]]:
    """Yields the sequences of each forward pass: rows, or rollouts of one dataset.

    Sequences that are packed share the computation of their prompt; padded ones have similar
    lengths.
    """
    for kind in sorted({(sequence.is_row, sequence.dataset) for sequence in sequences}):
        same_kind = [one for one in sequences if (one.is_row, one.dataset) == kind]
        ids = [sequence.tokens.ids for sequence in same_kind]
        lengths = [len(one) for one in ids]
        groups = microbatches(lengths, max_tokens=student.max_microbatch_tokens)
        if student.head.can_pack:
            groups = group_by_prefix(ids, max_tokens=student.pack_tokens(max(lengths)))
        for group in groups:
            yield [same_kind[i] for i in group]


def _add_gradient(
    student: Student,
    teachers: Mapping[int, LocalTeacher],
    members: Sequence[TrainingSequence],
    batch: TokenBatch,
    algorithm: AlgorithmSection,
    losses: Losses,
) -> None:
    """Adds the gradient of the summed losses, with the scores of a server or a local teacher."""
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
            f"the teacher of dataset {dataset} (counted from 0 in data.train_file) did not score "
            f"{len(members) - len(scores)} rollouts",
            "check the run's log for the reply of the teacher's server, then resume the run",
        )
    if readings:
        add_gradient_by_bytes(student, teacher, batch, readings, losses)
        return
    for_teacher = teacher_batch(student, teacher, [member.tokens for member in members], batch)
    comparison = comparison_of(algorithm)
    add_gradient_with_teacher(student, teacher, batch, for_teacher, comparison, losses)
