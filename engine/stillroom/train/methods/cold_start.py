"""The cold start of on-policy distillation: supervised steps, then rollouts, in one run."""

from collections.abc import Sequence

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import SftRow
from stillroom.data.instruction import UNINSTRUCTED, Instruction
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.schema import DistillConfig
from stillroom.train.loop.row_batches import batches_of
from stillroom.train.loop.session import Phase, Session
from stillroom.train.methods.sft import PrepareTargets, accumulate_nll
from stillroom.train.student.encode import EncodedSft, encode_sft

_PHASE = "cold_start"


def encode_cold_start(
    session: Session[DistillConfig], rows: Sequence[SftRow], teacher: Instruction = UNINSTRUCTED
) -> EncodedSft:
    """Returns the cold start's rows as tokens; rows that are too long are left out and counted.

    teacher: what the teacher reads before the rows, if they are trained on its probabilities.
    """
    config, loaded = session.config, session.student.loaded
    renderer = ChatRenderer(loaded.tokenizer, include_thinking=config.rollout.include_thinking)
    context = min(loaded.max_context, config.rollout.max_context_window)
    length = config.model.row_length(context)
    encoded = encode_sft(rows, renderer, max_length=length, teacher=teacher)
    loaded.check_ids((one.ids for one in encoded.sequences), "a row of the cold start")
    return encoded


def cold_start_steps(config: DistillConfig, num_rows: int) -> int:
    """Returns the number of steps of a cold start on `num_rows` rows; 0 if none is configured."""
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
    """Takes those supervised steps of the cold start that a resumed run has not taken yet.

    total_steps: the number of steps of the whole run. prepare: returns the probabilities of
    `teacher`, or of one that it loads, to learn from; None: the rows' own tokens. A checkpoint of
    the last supervised step is always written, to compare the distilled student with.
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
    for _, chosen in session.batches(
        len(sequences), size=section.batch_size, num_epochs=section.num_epochs
    ):
        batch = accumulate_nll(session.student, [sequences[i] for i in chosen], targets)
        metrics = {"cold_start_loss": batch.loss, **optimizer.step().metrics}
        session.trained_tokens += batch.num_tokens
        session.after_step(optimizer.num_steps, total_steps, metrics, phase=phase)
