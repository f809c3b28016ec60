"""The token sequences that an on-policy update trains on, with per-token values.

`student_rollouts.training_sequences_of` makes them from rollouts, `prepare_sequences` adds each
token's advantage from rewards, and `policy_update` trains on them.
Shapes: N sampled tokens of a microbatch.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from stillroom.errors import DataError
from stillroom.models.batches import TokenSequence
from stillroom.models.load import LoadedModel
from stillroom.models.reread.rereading import ByteReading
from stillroom.serving.scoring import TeacherScores
from stillroom.train.config.distill_sections import AdvantageEstimator, AlgorithmSection


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One rollout of the student as tokens; each list has one value per sampled token.

    Or a row that the student did not sample, which is compared in the same way.
    """

    tokens: TokenSequence
    """The tokens in the student's context, prompt included."""
    sampler_logprobs: list[float]
    """The log-probabilities (nats) with which the tokens were sampled."""
    teacher: TeacherScores | None = None
    """A served teacher's scores of the sampled tokens, or of the `reading`'s tokens; None: a
    teacher in this process scores the tokens in the update."""
    reading: ByteReading | None = None
    """The rollout in the tokens of a teacher with another tokenizer; None: the student's."""
    dataset: int = 0
    """The index of its prompt's file in `data.train_file`, which determines its teacher."""
    reward: float | None = None
    prompt: str = ""
    """The id of its task; the rollouts of one prompt form a group."""
    advantages: list[float] | None = None
    """The part of each token's advantage that comes from the reward; None: rewards are not used."""
    trainer_logprobs: list[float] | None = None
    """The log-probabilities (nats) under the weights before the iteration's first step; None if not
    needed."""
    is_row: bool = False
    """Whether it is a row of `rollout.rows_file`; its `sampler_logprobs` are then meaningless."""


def prepare_sequences(
    sequences: Sequence[TrainingSequence],
    algorithm: AlgorithmSection,
    *,
    special_ids: AbstractSet[int] = frozenset(),
) -> list[TrainingSequence]:
    """Returns the sequences with the advantages from rewards, if the loss uses rewards.

    If the algorithm masks special tokens, tokens in `special_ids` are not trained on, and sequences
    without any other sampled token are dropped. Raises DataError if the loss uses rewards and no
    rollout has one.
    """
    advantages: list[float] | None = None
    if algorithm.reward_coef > 0:
        rewards = [sequence.reward for sequence in sequences]
        if all(reward is None for reward in rewards):
            raise DataError(
                "algorithm.reward_coef is set, but no rollout of the iteration has a reward",
                "give the prompts metadata.expected_answer or write rewards.py next to config.yml; "
                "or leave algorithm.reward_coef out",
            )
        prompts = [(sequence.dataset, sequence.prompt) for sequence in sequences]
        advantages = reward_advantages(rewards, prompts, estimator=algorithm.adv_estimator)
    prepared: list[TrainingSequence] = []
    for index, sequence in enumerate(sequences):
        if advantages is not None:
            # Before special tokens are masked: they count among the following tokens.
            token_advantages = decay_advantage(
                algorithm.reward_coef * advantages[index],
                sequence.tokens.num_trained,
                gae_lambda=algorithm.gae_lambda,
            )
            sequence = replace(sequence, advantages=token_advantages)  # noqa: PLW2901
        if algorithm.mask_special_tokens:
            sequence = _mask_tokens(special_ids, sequence)  # noqa: PLW2901
        if sequence.tokens.num_trained:
            prepared.append(sequence)
    return prepared


def special_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Returns the ids of tokens that are not text: template markers and ends of turns."""
    added = loaded.tokenizer.added_tokens_decoder.items()
    marks = {token_id for token_id, token in added if token.special}
    return frozenset(marks | set(loaded.tokenizer.all_special_ids) | set(loaded.stop_ids))


def _mask_tokens(special_ids: AbstractSet[int], sequence: TrainingSequence) -> TrainingSequence:
    """Returns the sequence with the tokens in `special_ids` excluded from training."""
    tokens = sequence.tokens
    sampled = [i for i in range(1, len(tokens.ids)) if tokens.trained[i]]
    # Indices into the lists that have one value per sampled token.
    kept = [n for n, i in enumerate(sampled) if tokens.ids[i] not in special_ids]
    teacher = sequence.teacher
    if teacher is not None and sequence.reading is None:
        teacher = TeacherScores(
            [teacher.logprobs[n] for n in kept],
            teacher.top_ids and [teacher.top_ids[n] for n in kept],
            teacher.top_logprobs and [teacher.top_logprobs[n] for n in kept],
        )
    return replace(
        sequence,
        tokens=_mask_ids(tokens, special_ids),
        sampler_logprobs=[sequence.sampler_logprobs[n] for n in kept],
        teacher=teacher,
        reading=sequence.reading and sequence.reading.keep_tokens(kept),
        advantages=sequence.advantages and [sequence.advantages[n] for n in kept],
    )


def _mask_ids(tokens: TokenSequence, special_ids: AbstractSet[int]) -> TokenSequence:
    pairs = zip(tokens.ids, tokens.trained, strict=True)
    is_kept = [is_trained and token not in special_ids for token, is_trained in pairs]
    for_teacher = tokens.for_teacher and _mask_ids(tokens.for_teacher, special_ids)
    return replace(tokens, trained=is_kept, for_teacher=for_teacher)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The losses' inputs for each sampled token that are known before the models score it."""

    sampler_logprobs_N: Tensor
    """The log-probabilities (nats) with which the tokens were sampled."""
    reward_advantages_N: Tensor
    """The part of the tokens' advantages that comes from rewards."""
    old_logprobs_N: Tensor | None
    """The log-probabilities (nats) under the weights before the iteration's first step; None: those
    are the current weights."""
    dataset: int
    """The index of the dataset whose teacher scores the tokens."""

    def part(self, part: slice) -> "SampledTokens":
        """Returns the values of a slice of the tokens."""
        old_logprobs_N = None if self.old_logprobs_N is None else self.old_logprobs_N[part]
        return SampledTokens(
            self.sampler_logprobs_N[part],
            self.reward_advantages_N[part],
            old_logprobs_N,
            self.dataset,
        )


def sampled_tokens(sequences: Sequence[TrainingSequence], device: torch.device) -> SampledTokens:
    """Returns the `SampledTokens` of the sequences, in order."""

    def joined(lists: Iterable[list[float]]) -> Tensor:
        return torch.tensor([number for one in lists for number in one], device=device)

    old = [one.trainer_logprobs for one in sequences if one.trainer_logprobs is not None]
    return SampledTokens(
        joined(one.sampler_logprobs for one in sequences),
        joined(one.advantages or [0.0] * one.tokens.num_trained for one in sequences),
        joined(old) if old else None,
        sequences[0].dataset,
    )


def reward_advantages(
    rewards: Sequence[float | None],
    prompts: Sequence[Hashable],
    *,
    estimator: AdvantageEstimator,
) -> list[float]:
    """Returns each rollout's advantage: its reward minus a baseline.

    grpo: the baseline is the mean of the prompt's rollouts (Shao et al. 2024, arXiv 2402.03300).
    The difference is not divided by their deviation, which would give more weight to prompts that
    are nearly solved or nearly hopeless (Liu et al. 2025, arXiv 2503.20783). reinforce: the
    baseline is the mean of all other rollouts of the iteration, whatever their prompt (Williams
    1992: a baseline that does not depend on the rollout keeps the gradient unbiased). gae: the
    baseline is the mean of the prompt's other rollouts, used as the value of every state since
    there is no critic; see `decay_advantage`. A rollout without others to compare with has
    advantage 0.
    """
    groups: dict[Hashable, list[float]] = defaultdict(list)
    keys = [None if estimator == "reinforce" else prompt for prompt in prompts]
    for key, reward in zip(keys, rewards, strict=True):
        if reward is not None:
            groups[key].append(reward)
    advantages: list[float] = []
    for key, reward in zip(keys, rewards, strict=True):
        group = groups[key]
        if reward is None or len(group) < 2:
            advantages.append(0.0)
        elif estimator == "grpo":
            advantages.append(reward - fmean(group))
        else:
            advantages.append(reward - (sum(group) - reward) / (len(group) - 1))
    return advantages


def decay_advantage(advantage: float, num_tokens: int, *, gae_lambda: float) -> list[float]:
    """Returns each sampled token's advantage: λ^(number of following tokens) × `advantage`.

    Source: Schulman et al. 2015 (arXiv 1506.02438), eq. 16 with no discount, the reward at the end
    and one value for all states before it: only the last step's TD error is not 0.
    """
    return [advantage * gae_lambda ** (num_tokens - 1 - i) for i in range(num_tokens)]
