"""Supervised fine-tuning on assistant tokens, or on a teacher's probabilities of them.

On-policy distillation may start with it: the cold start.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import SftRow
from stillroom.data.instruction import UNINSTRUCTED, Instruction
from stillroom.data.row_notes import notes_on_rows
from stillroom.errors import ModelError
from stillroom.models.batches import TokenBatch, TokenSequence
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.schema import DistillConfig, SftConfig, TrainConfig
from stillroom.train.loop.rows import batches_of, encode_rows, hold_out
from stillroom.train.loop.session import Phase, Session, TrainResult
from stillroom.train.student.model import Student


@dataclass(frozen=True, slots=True)
class EncodedSft:
    """The usable rows as tokens, and the number of skipped rows by reason."""

    sequences: list[TokenSequence]
    """One sequence per row, or several if the template renders a turn differently once others
    follow it."""
    num_rows: int
    skipped: Counter[str]


def encode_sft(
    rows: Sequence[SftRow],
    renderer: ChatRenderer,
    *,
    max_length: int,
    instruction: Instruction = UNINSTRUCTED,
) -> EncodedSft:
    """Returns the rows as token sequences, without those that cannot be trained on.

    instruction: the teacher's system message and context, if it scores the rows.
    Raises DataError if no row is left.
    """

    def encode(row: SftRow) -> list[TokenSequence]:
        rendered = renderer.sequences(row.messages, row.tools)
        sequences = [TokenSequence(one.ids, one.trained) for one in rendered]
        messages = instruction.apply_to(row.messages)
        if messages == row.messages:
            return sequences
        instructed = renderer.sequences(messages, row.tools)
        for_teacher = [TokenSequence(one.ids, one.trained) for one in instructed]
        if [one.trained_ids for one in for_teacher] != [one.trained_ids for one in sequences]:
            raise ModelError(
                "with the teacher's system message or context, the chat template renders the "
                "answers as different tokens, so the teacher's scores cannot be matched to the "
                "student's",
                "leave teacher.system and teacher.context_file out",
            )
        pairs = zip(sequences, for_teacher, strict=True)
        return [replace(sequence, for_teacher=one) for sequence, one in pairs]

    kept, skipped = encode_rows(rows, encode, max_length)
    return EncodedSft([one for sequences in kept for one in sequences], len(kept), skipped)


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The mean loss of a batch over its trained tokens (nats), and their number."""

    loss: float
    num_tokens: int


class Targets(Protocol):
    """Soft targets: a teacher's probabilities at the rows' trained tokens."""

    def add_gradient(
        self,
        student: Student,
        sequences: Sequence[TokenSequence],
        batch: TokenBatch,
        *,
        scale: float,
    ) -> float:
        """Adds the gradient of `scale` × the batch's summed loss to the student's.

        Returns the unscaled sum.
        """
        ...

    def loss(
        self, student: Student, sequences: Sequence[TokenSequence], batch: TokenBatch
    ) -> float:
        """Returns the batch's summed loss (nats), without a gradient."""
        ...


class PrepareTargets(Protocol):
    """Prepares a teacher's soft targets for sequences before the first step."""

    def __call__(
        self,
        session: Session[TrainConfig],
        sequences: Sequence[TokenSequence],
        *,
        teacher: LocalTeacher | None = None,
    ) -> Targets:
        """Returns the targets. teacher: the teacher, if it is already loaded."""
        ...


def train_sft(
    session: Session[SftConfig],
    rows: Sequence[SftRow],
    *,
    max_length: int,
    prepare: PrepareTargets | None = None,
    instruction: Instruction = UNINSTRUCTED,
) -> TrainResult:
    """Trains on the rows and returns the result with the final checkpoint.

    prepare: returns soft targets; None: trains on the rows' own tokens.
    instruction: the teacher's system message and context for the rows.
    """
    config, student = session.config, session.student
    for note in notes_on_rows(rows):
        session.reporter.note(note)
    renderer = ChatRenderer(
        student.loaded.tokenizer, include_thinking=config.rollout.include_thinking
    )
    training_rows, held_out_rows = hold_out(rows, config.data.val_split, seed=config.trainer.seed)
    encode = partial(encode_sft, renderer=renderer, max_length=max_length, instruction=instruction)
    encoded = encode(training_rows)
    student.loaded.check_ids((one.ids for one in encoded.sequences), "a row")
    held_out = encode(held_out_rows).sequences if held_out_rows else []

    targets = prepare(session, [*encoded.sequences, *held_out]) if prepare else None

    def accumulate(indices: Sequence[int]) -> dict[str, float]:
        batch = accumulate_loss(student, [encoded.sequences[i] for i in indices], targets)
        session.trained_tokens += batch.num_tokens
        return {"loss": batch.loss}

    def validate() -> dict[str, float]:
        return {"val_loss": validation_loss(student, held_out, targets)} if held_out else {}

    student.module.train()
    num_steps = session.train_rows(len(encoded.sequences), accumulate, validate)
    return session.finish(num_steps, rows=encoded.num_rows, skipped=encoded.skipped)


def accumulate_loss(
    student: Student, sequences: Sequence[TokenSequence], targets: Targets | None = None
) -> BatchLoss:
    """Adds the gradient of the batch's mean token loss, and returns that loss.

    targets: the soft targets to train on; None: the rows' own tokens.

    The gradient does not depend on the split into microbatches. Each process adds the gradient of
    its share of the sequences; the loss is of the whole batch.
    """
    num_tokens = sum(sequence.num_trained for sequence in sequences)
    own_sequences = _share(student, sequences)
    total = 0.0
    for group in student.passes([len(sequence.ids) for sequence in own_sequences]):
        members = [own_sequences[i] for i in group]
        batch, scale = student.collate(members), 1 / num_tokens
        if targets is None:
            total += student.add_nll_gradient(batch, scale=scale)
        else:
            total += targets.add_gradient(student, members, batch, scale=scale)
    [total] = student.peers.sums(total)
    return BatchLoss(total / num_tokens, num_tokens)


@torch.no_grad()
def validation_loss(
    student: Student, sequences: Sequence[TokenSequence], targets: Targets | None = None
) -> float:
    """Returns the mean loss (nats) over all trained tokens of held-out rows."""
    student.module.eval()
    own_sequences, total = _share(student, sequences), 0.0
    for group in student.passes([len(sequence.ids) for sequence in own_sequences]):
        members = [own_sequences[i] for i in group]
        batch = student.collate(members)
        if targets is None:
            total -= student.logprobs(batch).sum().item()
        else:
            total += targets.loss(student, members, batch)
    student.module.train()
    [total] = student.peers.sums(total)
    return total / sum(sequence.num_trained for sequence in sequences)


def _share(student: Student, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Returns this process's share of the sequences."""
    lengths = [len(sequence.ids) for sequence in sequences]
    return [sequences[i] for i in student.peers.share(lengths)]


_PHASE = "cold_start"


def encode_supervised_rows(
    session: Session[DistillConfig], rows: Sequence[SftRow], instruction: Instruction = UNINSTRUCTED
) -> EncodedSft:
    """Returns supervised rows as tokens; rows that are too long are skipped and counted.

    instruction: the teacher's system message and context, if the rows have soft targets.
    """
    config, loaded = session.config, session.student.loaded
    for note in notes_on_rows(rows):
        session.reporter.note(note)
    renderer = ChatRenderer(loaded.tokenizer, include_thinking=config.rollout.include_thinking)
    context = min(loaded.max_context, config.rollout.max_context_window)
    length = config.model.max_row_length(context)
    encoded = encode_sft(rows, renderer, max_length=length, instruction=instruction)
    loaded.check_ids((one.ids for one in encoded.sequences), "a supervised row")
    return encoded


def cold_start_steps(config: DistillConfig, num_rows: int) -> int:
    """Returns the number of steps of a cold start on `num_rows` rows; 0 without a cold start."""
    if (section := config.cold_start) is None:
        return 0
    per_epoch = len(batches_of(range(num_rows), section.batch_size or config.data.batch_size))
    return per_epoch * section.num_epochs


def train_cold_start(
    session: Session[DistillConfig],
    encoded: EncodedSft,
    total_steps: int,
    prepare: PrepareTargets | None = None,
    teacher: LocalTeacher | None = None,
) -> None:
    """Takes the remaining supervised steps of the cold start.

    total_steps: the number of steps of the whole run. prepare: returns soft targets from
    `teacher`, or from one that it loads; None: trains on the rows' own tokens. The last supervised
    step always writes a checkpoint, to compare the distilled student with.
    """
    config, sequences = session.config, encoded.sequences
    num_steps = cold_start_steps(config, len(sequences))
    point, section = session.resumed, config.cold_start
    if section is None or (point is not None and point.state.step >= num_steps):
        return
    targets = prepare(session, sequences, teacher=teacher) if prepare else None
    settings = config.trainer.model_copy(
        update={"learning_rate": section.learning_rate or config.trainer.learning_rate}
    )
    optimizer = session.student.optimizer(settings, total_steps=num_steps)
    session.begin(optimizer)
    session.student.module.train()
    phase = Phase(_PHASE, 0, num_steps)
    for indices in session.batches(
        len(sequences), size=section.batch_size, num_epochs=section.num_epochs
    ):
        batch = accumulate_loss(session.student, [sequences[i] for i in indices], targets)
        metrics = {"cold_start_loss": batch.loss, **optimizer.step().metrics}
        session.trained_tokens += batch.num_tokens
        session.after_step(optimizer.num_steps, total_steps, metrics, phase=phase)
