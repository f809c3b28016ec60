"""Student and teacher scores of each sampled token, as far as the loss needs them.

The teacher is a model in this process, or its scores come from a server. The student's gradient is
hand-written where its head supports it (models/cpu), else autograd's; `add_gradient` decides.
Shapes: N sampled tokens of a microbatch, n of a tile, H hidden size, V vocabulary, K top tokens of
the teacher, C numbers of each token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.errors import TeacherError
from stillroom.models.batches import TokenBatch
from stillroom.models.cpu.gradients import HandGradients, TeacherTile
from stillroom.models.divergence import (
    TokenScores,
    TopTokens,
    differentiable,
    entropy,
    reverse_kl,
    top_k_forward_kl,
    with_bucket,
)
from stillroom.models.lm_head import compute_in_tiles, token_logprobs
from stillroom.models.reread.byte_chain import (
    ListedTokens,
    NextSymbols,
    SortedSums,
    SummedSymbols,
    TrieNodes,
)
from stillroom.models.reread.rereading import ByteReading
from stillroom.models.reread.tile_divergence import ByteDivergences, NextSymbolsFunction
from stillroom.serving.scoring import TeacherScores
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.methods.losses import DivergenceFunction, loss_functions
from stillroom.train.student.model import Student

Losses = Callable[[slice, TokenScores], Tensor]
"""Takes a slice of a microbatch's tokens and their scores, and returns their losses, [n]."""


@dataclass(frozen=True, slots=True)
class DistributionComparison:
    """How a loss compares the student's distributions with those of a teacher in this process."""

    divergence: DivergenceFunction | None
    """None: only the sampled tokens' probabilities are used."""
    is_baseline: bool = False
    """Whether the divergence is a constant of the loss, without a gradient of its own."""
    has_entropy: bool = False
    """Whether the student's exact entropy is computed too."""


def comparison_of(algorithm: AlgorithmSection) -> DistributionComparison:
    """Returns the comparison that the configured loss needs."""
    if algorithm.loss.is_policy_gradient:
        is_exact = algorithm.kl_baseline == "exact"
        return DistributionComparison(
            reverse_kl if is_exact else None, is_baseline=True, has_entropy=is_exact
        )
    divergence = loss_functions(algorithm).divergence(algorithm)
    return DistributionComparison(divergence, has_entropy=algorithm.needs_distribution)


class Scorer(ABC):
    """A teacher that scores the tokens of one batch, tile by tile."""

    needs_distribution: bool = True
    """Whether `compare` uses the student's full distributions."""
    is_baseline: bool = False
    """Whether the divergence is a constant of the loss, without a gradient of its own."""

    def num_columns(self, vocab_size: int) -> int:
        """Returns the number of columns of the student's logits, [n, V], that are compared."""
        return vocab_size

    @abstractmethod
    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        """Returns the teacher's scores of a tile, given the student's log-probabilities for it."""


def add_gradient_with_teacher(
    student: Student,
    teacher: LocalTeacher,
    batch: TokenBatch,
    teacher_batch: TokenBatch,
    comparison: DistributionComparison,
    losses: Losses,
) -> None:
    """Adds the gradient of the summed losses, with a teacher in this process.

    teacher_batch: the same sequences, collated for the teacher.
    """
    hand_gradients, teacher_gradients = student.hand_gradients, teacher.head.hand_gradients
    if (
        hand_gradients is not None
        and teacher_gradients is not None
        and hand_gradients.matrix.vocab_size == teacher_gradients.matrix.vocab_size
    ):
        scorer = _LocalScorer(teacher, batch, teacher_batch, comparison, teacher_gradients)
        hand_gradients.add_loss_gradient(batch, scorer.compare, losses)
        return
    scores = score_with_teacher(student, teacher, batch, teacher_batch, comparison)
    losses(slice(0, batch.num_trained), scores).sum().backward()


def add_gradient(
    student: Student,
    scorer: Scorer,
    batch: TokenBatch,
    losses: Losses,
    *,
    tile_size: int | None = None,
) -> None:
    """Adds the gradient of the summed losses.

    tile_size: the number of tokens scored at a time; None: the maximum of the student's head.
    """
    if (hand_gradients := student.hand_gradients) is not None:
        hand_gradients.add_loss_gradient(batch, scorer.compare, losses)
        return
    scores = score_by_autograd(student, scorer, batch, tile_size or student.head.max_positions)
    losses(slice(0, batch.num_trained), scores).sum().backward()


def score_with_teacher(
    student: Student,
    teacher: LocalTeacher,
    batch: TokenBatch,
    teacher_batch: TokenBatch,
    comparison: DistributionComparison,
) -> TokenScores:
    """Returns the scores of the batch's trained tokens, with autograd's gradient.

    teacher_batch: the same sequences, collated for the teacher.
    """
    scorer = _LocalScorer(teacher, batch, teacher_batch, comparison)
    tile_size = min(student.head.max_positions, teacher.head.max_positions)
    return score_by_autograd(student, scorer, batch, tile_size)


def score_by_autograd(
    student: Student, scorer: Scorer, batch: TokenBatch, tile_size: int
) -> TokenScores:
    """Returns the scores, without holding either model's logits for all tokens at once."""

    def score(hidden_nH: Tensor, part: slice) -> Tensor:
        with student.autocast():
            student_nV = student.head.logits(hidden_nH)
        student_n = token_logprobs(student_nV, batch.targets_N[part])
        shared_nV = student_nV[:, : scorer.num_columns(student_nV.shape[1])]
        with torch.no_grad():
            # Buffers as large as the logits are allocated only if the scorer needs them.
            logprobs_nV = shared_nV.detach()
            if scorer.needs_distribution:
                logprobs_nV = torch.log_softmax(logprobs_nV, dim=-1)
            probabilities_nV = logprobs_nV.exp() if scorer.needs_distribution else logprobs_nV
            teacher = scorer.compare(part, logprobs_nV, probabilities_nV)
        divergence_n = torch.zeros_like(teacher.logprobs_n)
        if teacher.divergence is not None:
            divergence_n = (
                teacher.divergence.value_N
                if scorer.is_baseline
                else differentiable(shared_nV, teacher.divergence)
            )
        entropy_n = -student_n.detach() if teacher.entropy_n is None else teacher.entropy_n
        return torch.stack([student_n, teacher.logprobs_n, divergence_n, entropy_n], dim=1)

    with student.autocast():
        hidden_NH = student.head.batch_hidden(batch)
    numbers_NC = compute_in_tiles(score, hidden_NH, tile_size=tile_size)
    student_N, teacher_N, divergence_N, entropy_N = numbers_NC.unbind(dim=1)
    return TokenScores(student_N, teacher_N.detach(), divergence_N, entropy_N.detach())


class _LocalScorer(Scorer):
    """A teacher in this process."""

    def __init__(
        self,
        teacher: LocalTeacher,
        batch: TokenBatch,
        teacher_batch: TokenBatch,
        comparison: DistributionComparison,
        hand_gradients: HandGradients | None = None,
    ) -> None:
        """hand_gradients: the teacher without autograd, if the student has such gradients too."""
        self._head, self._hand_gradients = teacher.head, hand_gradients
        self._targets_N, self._comparison = batch.targets_N, comparison
        self.needs_distribution = comparison.divergence is not None
        self.is_baseline = comparison.is_baseline
        with torch.no_grad():
            self._hidden_NH = self._head.batch_hidden(teacher_batch)

    def num_columns(self, vocab_size: int) -> int:
        return min(vocab_size, self._head.vocab_size)

    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        targets_n, divergence_of = self._targets_N[part], self._comparison.divergence
        if self._hand_gradients is not None:
            teacher_nV = self._hand_gradients.logprobs_of_tile(self._hidden_NH[part])
            # Gathered before the divergence overwrites them.
            teacher_n = teacher_nV.gather(1, targets_n[:, None])[:, 0]
        else:
            teacher_nV = self._head.logits(self._hidden_NH[part])
            teacher_n = token_logprobs(teacher_nV, targets_n)
            if divergence_of is not None:
                teacher_nV = torch.log_softmax(teacher_nV[:, : student_nV.shape[1]], dim=-1)
        if divergence_of is None:
            return TeacherTile(teacher_n)
        return TeacherTile(
            teacher_n,
            divergence_of(student_nV, teacher_nV, probabilities_nV),
            entropy(student_nV, probabilities_nV) if self._comparison.has_entropy else None,
        )


class ServedScorer(Scorer):
    """A server's scores of each sequence's tokens."""

    def __init__(
        self,
        teacher_scores: Sequence[TeacherScores],
        algorithm: AlgorithmSection,
        device: torch.device,
    ) -> None:
        logprobs = [logprob for scores in teacher_scores for logprob in scores.logprobs]
        self._teacher_N = torch.tensor(logprobs, device=device)
        self.needs_distribution = algorithm.loss.needs_top_tokens
        if self.needs_distribution:
            self._divergence = loss_functions(algorithm).listed_divergence
            ids, tops = top_tokens_of(teacher_scores, algorithm.top_k, option="algorithm.top_k")
            self._ids_NK = torch.tensor(ids, device=device)
            self._tops_NK = torch.tensor(tops, dtype=torch.float32, device=device)

    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        """Returns the scores of a tile, with the divergence where the server listed tokens."""
        if not self.needs_distribution:
            return TeacherTile(self._teacher_N[part])
        teacher_nB = with_bucket(self._tops_NK[part])
        divergence = self._divergence(student_nV, teacher_nB, probabilities_nV, self._ids_NK[part])
        return TeacherTile(self._teacher_N[part], divergence)


class TopTokensScorer(Scorer):
    """A teacher whose top tokens were stored."""

    def __init__(self, top: TopTokens, *, temperature: float) -> None:
        self._top, self._temperature = top, temperature

    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        """Returns the scores of a tile, with the divergence over the stored tokens."""
        divergence = top_k_forward_kl(
            student_nV, self._top[part], probabilities_nV, temperature=self._temperature
        )
        # The losses on stored tokens do not use the teacher's probability of the target token.
        return TeacherTile(torch.zeros_like(divergence.value_N), divergence)


def top_tokens_of(
    teacher_scores: Sequence[TeacherScores], k: int, *, option: str
) -> tuple[list[list[int]], list[list[float]]]:
    """Returns a served teacher's top k tokens at each position, and their logprobs.

    Raises TeacherError, whose fix names the option that sets k, if some are missing.
    """
    ids = [row[:k] for scores in teacher_scores for row in scores.top_ids or []]
    logprobs = [row[:k] for scores in teacher_scores for row in scores.top_logprobs or []]
    num_tokens = sum(len(scores.logprobs) for scores in teacher_scores)
    if len(ids) != num_tokens or any(len(row) < k for row in (*ids, *logprobs)):
        raise TeacherError(
            f"the teacher's server did not return the top {k} tokens at each position",
            f"raise the server's limit (vLLM: --max-logprobs), or lower {option}",
        )
    return ids, logprobs


def add_gradient_by_bytes(
    student: Student,
    teacher: LocalTeacher,
    batch: TokenBatch,
    readings: Sequence[ByteReading],
    losses: Losses,
) -> None:
    """Adds the gradient of the summed losses, where a token's divergence is summed over its bytes.

    readings: the batch's sequences, in order, in the teacher's tokens.
    """
    symbols = _LocalSymbols(teacher, readings, batch.targets_N.device)
    tile_size = min(student.head.max_positions, teacher.head.max_positions)
    scorer = _ByteScorer(batch, readings, symbols)
    add_gradient(student, scorer, batch, losses, tile_size=tile_size)


def add_gradient_with_listed_tokens(
    student: Student,
    teacher_scores: Sequence[TeacherScores],
    batch: TokenBatch,
    readings: Sequence[ByteReading],
    losses: Losses,
) -> None:
    """Adds the gradient of the summed losses, from the top tokens that a server returned.

    teacher_scores: the scores of each reading's trained tokens.
    """
    listed = listed_tokens(teacher_scores, readings, batch.targets_N.device)

    def symbols(part: slice, _: Sequence[TrieNodes]) -> NextSymbols:
        return listed[part]

    add_gradient(student, _ByteScorer(batch, readings, symbols), batch, losses)


def listed_tokens(
    teacher_scores: Sequence[TeacherScores], readings: Sequence[ByteReading], device: torch.device
) -> ListedTokens:
    """Returns the tokens that a server listed at each trained token of the readings, in order."""
    listed: list[tuple[list[int], list[float]]] = []
    trained: list[tuple[int, float]] = []
    for scores, reading in zip(teacher_scores, readings, strict=True):
        tokens = reading.tokens
        ids = [i for i, is_trained in zip(tokens.ids, tokens.trained, strict=True) if is_trained]
        trained += zip(ids, scores.logprobs, strict=True)
        listed += zip(scores.top_ids or [], scores.top_logprobs or [], strict=True)
    return ListedTokens.from_logprobs(listed, trained, readings[0].pair.teacher_trie, device)


class _ByteScorer(Scorer):
    """A teacher with another tokenizer or chat template."""

    def __init__(
        self,
        batch: TokenBatch,
        readings: Sequence[ByteReading],
        next_symbols: NextSymbolsFunction,
    ) -> None:
        """next_symbols: returns the teacher's predictions at some of the readings' tokens."""
        self._targets_N, self._next_symbols = batch.targets_N, next_symbols
        counts = torch.bincount(batch.rows_N, minlength=len(readings)).tolist()
        self._divergences = ByteDivergences(readings, counts, batch.targets_N.device)

    def compare(self, part: slice, student_nV: Tensor, probabilities_nV: Tensor) -> TeacherTile:
        divergence, gap_n = self._divergences.compute_tile(
            part, student_nV, probabilities_nV, self._next_symbols
        )
        student_n = student_nV.gather(1, self._targets_N[part, None])[:, 0]
        return TeacherTile(student_n - gap_n, divergence, entropy(student_nV, probabilities_nV))


class _LocalSymbols:
    """The next-symbol probabilities of a teacher in this process."""

    def __init__(
        self, teacher: LocalTeacher, readings: Sequence[ByteReading], device: torch.device
    ) -> None:
        self._head = teacher.head
        self._order_P = torch.from_numpy(readings[0].pair.teacher_trie.order).to(device)
        with torch.no_grad():
            teacher_batch = teacher.collate([reading.tokens for reading in readings])
            self._hidden_KH = teacher.head.batch_hidden(teacher_batch).to(device)

    def __call__(self, part: slice, cuts: Sequence[TrieNodes]) -> NextSymbols:
        """Returns the next-symbol probabilities at some of the teacher's positions."""
        hidden_kH = self._hidden_KH[part]
        if (hand_gradients := self._head.hand_gradients) is not None:
            probabilities_kV = hand_gradients.probabilities_of_tile(hidden_kH)
        else:
            probabilities_kV = self._head.logits(hidden_kH).softmax(dim=-1)
        return SummedSymbols(SortedSums(probabilities_kV, self._order_P, cuts))
