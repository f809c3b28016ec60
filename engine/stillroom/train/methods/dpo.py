"""Direct preference optimisation; the reference is the student before training."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import DpoRow
from stillroom.data.row_notes import notes_on_rows
from stillroom.models.batches import TokenSequence
from stillroom.models.placement import to_float64
from stillroom.train.config.schema import DpoConfig
from stillroom.train.config.sections import DpoSection
from stillroom.train.loop.rows import encode_rows, hold_out
from stillroom.train.loop.session import Session, TrainResult
from stillroom.train.methods.losses import preference_loss, sum_by_sequence
from stillroom.train.student.collective import Collective
from stillroom.train.student.model import Student


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A preference pair as tokens; only the assistant turns of the answers are trained on."""

    chosen: TokenSequence
    rejected: TokenSequence


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """The usable pairs as tokens, and the number of skipped pairs by reason."""

    pairs: list[TokenPair]
    skipped: Counter[str]


def encode_pairs(
    rows: Sequence[DpoRow], renderer: ChatRenderer, *, max_length: int
) -> EncodedPairs:
    """Returns the preference rows as token pairs, without those that cannot be trained on.

    Raises DataError if no row is left.
    """
    kept, skipped = encode_rows(rows, lambda row: _encode_answers(row, renderer), max_length)
    return EncodedPairs([TokenPair(*answers) for answers in kept], skipped)


def _encode_answers(row: DpoRow, renderer: ChatRenderer) -> list[TokenSequence]:
    """Returns the chosen and the rejected conversation; prompt turns are not trained on."""
    num_given_turns = sum(message["role"] == "assistant" for message in row.prompt)
    rendered = [
        renderer.conversation([*row.prompt, *answer], row.tools, num_given_turns=num_given_turns)
        for answer in (row.chosen, row.rejected)
    ]
    return [TokenSequence(one.ids, one.trained) for one in rendered]


@dataclass(frozen=True, slots=True)
class ReferencedPair:
    """A pair with the reference log-probabilities (nats) of both answers."""

    pair: TokenPair
    chosen: float
    rejected: float


@dataclass(frozen=True, slots=True)
class PairBatchStats:
    """The mean metrics over the pairs of one batch."""

    loss: float
    margin: float
    accuracy: float
    """The share of pairs whose margin is positive."""


def train_dpo(
    session: Session[DpoConfig], rows: Sequence[DpoRow], *, max_length: int
) -> TrainResult:
    """Trains on the pairs and returns the result with the final checkpoint."""
    config, student = session.config, session.student
    for note in notes_on_rows(rows):
        session.reporter.note(note)
    renderer = ChatRenderer(
        student.loaded.tokenizer, include_thinking=config.rollout.include_thinking
    )
    is_mean = config.dpo.loss == "ipo"
    training_rows, held_out_rows = hold_out(rows, config.data.val_split, seed=config.trainer.seed)
    encoded = encode_pairs(training_rows, renderer, max_length=max_length)
    for pair in encoded.pairs:
        student.loaded.check_ids([pair.chosen.ids, pair.rejected.ids], "a pair")
    pairs = add_reference(student, encoded.pairs, is_mean=is_mean)
    held_out_pairs = (
        encode_pairs(held_out_rows, renderer, max_length=max_length).pairs if held_out_rows else []
    )
    held_out = add_reference(student, held_out_pairs, is_mean=is_mean)

    def accumulate(indices: Sequence[int]) -> dict[str, float]:
        batch = [pairs[i] for i in indices]
        stats = accumulate_preference(student, batch, config.dpo)
        session.trained_tokens += sum(_num_trained(item.pair) for item in batch)
        return {"loss": stats.loss, "margin": stats.margin, "pair_accuracy": stats.accuracy}

    def validate() -> dict[str, float]:
        if not held_out:
            return {}
        stats = validate_preference(student, held_out, config.dpo)
        return {"val_loss": stats.loss, "val_pair_accuracy": stats.accuracy}

    # Not train(): dropout would make the policy differ from its reference at random.
    student.module.eval()
    num_steps = session.train_rows(len(pairs), accumulate, validate)
    return session.finish(num_steps, rows=len(pairs), skipped=encoded.skipped)


@torch.no_grad()
def add_reference(
    student: Student, pairs: Sequence[TokenPair], *, is_mean: bool
) -> list[ReferencedPair]:
    """Returns the pairs with the log-probabilities of both answers under the current student."""
    student.module.eval()
    own_indices = student.peers.share(_pair_lengths(pairs))
    own_scores: dict[int, tuple[float, float]] = {}
    for group in student.passes(_pair_lengths([pairs[i] for i in own_indices])):
        indices = [own_indices[i] for i in group]
        members = [pairs[i] for i in indices]
        chosen_P, rejected_P = _pair_logprobs(student, members, is_mean=is_mean)
        both = zip(chosen_P.tolist(), rejected_P.tolist(), strict=True)
        own_scores.update(zip(indices, both, strict=True))
    # Each process has scored its share of the pairs; together these are all pairs.
    scores: dict[int, tuple[float, float]] = {}
    for part in student.peers.gathered(own_scores):
        scores |= part
    return [ReferencedPair(pair, *scores[index]) for index, pair in enumerate(pairs)]


def accumulate_preference(
    student: Student, batch: Sequence[ReferencedPair], settings: DpoSection
) -> PairBatchStats:
    """Adds the gradient of the batch's mean loss, and returns the batch's metrics.

    The gradient does not depend on the split into microbatches. Each process adds the gradient of
    its share of the pairs; the metrics are of the whole batch.
    """
    totals = _Totals()
    for items in _pairs_by_pass(student, batch):
        losses_P = _pair_losses(student, items, settings, totals)
        (losses_P.sum() / len(batch)).backward()
    return totals.means(student.peers, len(batch))


@torch.no_grad()
def validate_preference(
    student: Student, pairs: Sequence[ReferencedPair], settings: DpoSection
) -> PairBatchStats:
    """Returns the mean loss, margin and accuracy over held-out pairs."""
    totals = _Totals()
    for items in _pairs_by_pass(student, pairs):
        _pair_losses(student, items, settings, totals)
    return totals.means(student.peers, len(pairs))


@dataclass(slots=True)
class _Totals:
    """Running sums over this process's pairs."""

    loss: float = 0.0
    margin: float = 0.0
    num_right: int = 0

    def means(self, peers: Collective, num_pairs: int) -> PairBatchStats:
        """Returns the means over all processes' pairs."""
        sums = peers.sums(self.loss, self.margin, self.num_right)
        loss, margin, accuracy = (total / num_pairs for total in sums)
        return PairBatchStats(loss, margin, accuracy)


def _pair_losses(
    student: Student, items: Sequence[ReferencedPair], settings: DpoSection, totals: _Totals
) -> Tensor:
    """Returns the loss of each pair, [P], and adds the pairs' metrics to `totals`."""
    is_mean = settings.loss == "ipo"
    pairs = [item.pair for item in items]
    chosen_P, rejected_P = _pair_logprobs(student, pairs, is_mean=is_mean)
    result = preference_loss(
        chosen_P,
        rejected_P,
        chosen_P.new_tensor([item.chosen for item in items]),
        chosen_P.new_tensor([item.rejected for item in items]),
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        kind=settings.loss,
    )
    losses_P = result.losses_P
    if settings.nll_coef > 0:
        scale_P = chosen_P.new_ones(len(pairs)) if is_mean else _chosen_lengths(chosen_P, pairs)
        losses_P = losses_P - settings.nll_coef * chosen_P / scale_P
    totals.loss += losses_P.sum().item()
    totals.margin += result.margins_P.sum().item()
    totals.num_right += int((result.margins_P > 0).sum().item())
    return losses_P


def _pairs_by_pass(
    student: Student, batch: Sequence[ReferencedPair]
) -> Iterator[list[ReferencedPair]]:
    """Yields this process's share of the pairs, one list per forward pass."""
    own_indices = student.peers.share(_pair_lengths([item.pair for item in batch]))
    for group in student.passes(_pair_lengths([batch[i].pair for i in own_indices])):
        yield [batch[own_indices[i]] for i in group]


def _chosen_lengths(like: Tensor, pairs: Sequence[TokenPair]) -> Tensor:
    return like.new_tensor([pair.chosen.num_trained for pair in pairs])


def _num_trained(pair: TokenPair) -> int:
    return pair.chosen.num_trained + pair.rejected.num_trained


def _pair_lengths(pairs: Sequence[TokenPair]) -> list[int]:
    """Returns the number of tokens of each pair in a padded batch."""
    return [2 * max(len(p.chosen.ids), len(p.rejected.ids)) for p in pairs]


def _pair_logprobs(
    student: Student, pairs: Sequence[TokenPair], *, is_mean: bool
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the chosen and the rejected answers, [P]: sums or means."""
    sequences: list[TokenSequence] = [pair.chosen for pair in pairs]
    sequences += [pair.rejected for pair in pairs]
    batch = student.collate(sequences)
    # In float64, since differences far below 1 between sums of a thousand nats matter.
    logprobs_N = to_float64(student.logprobs(batch))
    sums = sum_by_sequence(logprobs_N, batch.rows_N.to(logprobs_N.device), len(sequences))
    if is_mean:
        sums = sums / sums.new_tensor([sequence.num_trained for sequence in sequences])
    return sums[: len(pairs)], sums[len(pairs) :]
