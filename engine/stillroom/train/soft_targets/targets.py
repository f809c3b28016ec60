"""The teacher's probabilities as the targets of supervised rows: read live, or once into a store.

Shapes: N trained tokens of a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stillroom.errors import RunError
from stillroom.lineage import ModelRecord, record_file
from stillroom.models.batches import TokenBatch, TokenSequence
from stillroom.models.divergence import TokenScores, jensen_shannon, reverse_kl
from stillroom.models.load import load_tokenizer
from stillroom.models.pairing import check_tokenizers
from stillroom.models.resolve import locate_model
from stillroom.models.soft_targets import at_temperature
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import SoftTargetsSection
from stillroom.train.config.schema import DistillConfig, SftConfig, TrainConfig
from stillroom.train.loop.session import Session
from stillroom.train.methods.losses import DivergenceForm, beyond_rounding
from stillroom.train.on_policy.teachers import load_local_teacher
from stillroom.train.on_policy.token_scores import (
    DistributionComparison,
    TopTokensScorer,
    add_gradient,
    add_gradient_with_teacher,
    score_by_autograd,
    score_with_teacher,
)
from stillroom.train.soft_targets.scoring import Scoring, as_read, check_room
from stillroom.train.soft_targets.store import TopTokenStore
from stillroom.train.student.model import Student

_DIVERGENCES: Mapping[str, DivergenceForm] = {
    "forward_kl": partial(jensen_shannon, beta=0.0),
    "jsd": partial(jensen_shannon, beta=0.5),
    "reverse_kl": reverse_kl,
}
"""The divergence of each loss that `soft_targets.loss` may name."""


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """The targets of rows: from a teacher that reads each step's rows, or from a store."""

    settings: SoftTargetsSection
    teacher: LocalTeacher | None = None
    store: TopTokenStore | None = None

    def add_gradient(
        self,
        student: Student,
        sequences: Sequence[TokenSequence],
        batch: TokenBatch,
        *,
        scale: float,
    ) -> float:
        """Adds the gradient of `scale` × the summed loss of a pass; returns the sum (nats)."""
        total = 0.0

        def losses(_: slice, scores: TokenScores) -> Tensor:
            nonlocal total
            losses_n = self._losses(scores)
            total += losses_n.sum().item()
            return losses_n * scale

        if (teacher := self.teacher) is not None:
            other = _teacher_batch(student, teacher, sequences, batch)
            add_gradient_with_teacher(student, teacher, batch, other, self._comparison, losses)
        else:
            add_gradient(student, self._scorer(sequences, batch), batch, losses)
        return total

    @torch.no_grad()
    def loss(
        self, student: Student, sequences: Sequence[TokenSequence], batch: TokenBatch
    ) -> float:
        """Returns the summed loss of a pass (nats), without forming a gradient."""
        if (teacher := self.teacher) is not None:
            other = _teacher_batch(student, teacher, sequences, batch)
            scores = score_with_teacher(student, teacher, batch, other, self._comparison)
        else:
            scorer = self._scorer(sequences, batch)
            scores = score_by_autograd(student, scorer, batch, student.head.max_positions)
        return self._losses(scores).sum().item()

    def _losses(self, scores: TokenScores) -> Tensor:
        losses_N = beyond_rounding(scores.divergence_N)
        if self.settings.label_coef > 0:
            losses_N = losses_N - self.settings.label_coef * scores.student_N
        return losses_N

    @property
    def _comparison(self) -> DistributionComparison:
        form = _DIVERGENCES[self.settings.loss]
        return DistributionComparison(
            partial(at_temperature, form, temperature=self.settings.temperature)
        )

    def _scorer(self, sequences: Sequence[TokenSequence], batch: TokenBatch) -> TopTokensScorer:
        if self.store is None or self.settings.top_k is None:
            raise RunError("the teacher has not read the rows yet", "report this as a bug")
        device = batch.targets_N.device
        top = self.store.read(as_read(sequences), k=self.settings.top_k, device=device)
        return TopTokensScorer(top, temperature=self.settings.temperature)


def prepare_targets(
    workspace: Workspace,
    config: SftConfig | DistillConfig,
    record: ModelRecord,
    rows_file: Path,
    session: Session[TrainConfig],
    sequences: Sequence[TokenSequence],
    *,
    teacher: LocalTeacher | None = None,
) -> SoftTargets:
    """Loads the teacher; with `top_k` only if some of the sequences are in no store yet.

    record: the teacher's identity. teacher: the teacher, if it is loaded already.
    Raises ModelError if the teacher does not read text as the student does.
    """
    settings = config.soft_targets or SoftTargetsSection()
    chosen, student = config.teachers[0], session.student.loaded
    # Loading a model draws random numbers, on which the student's dropout must not depend.
    with torch.random.fork_rng():
        if settings.top_k is None:
            teacher = teacher or load_local_teacher(workspace, chosen, student)
            check_room(teacher.loaded.max_context, as_read(sequences))
            return SoftTargets(settings, teacher=teacher)
        if not chosen.section.is_served:
            names = f"student {student.location.name!r} and teacher {chosen.path!r}"
            tokenizer = load_tokenizer(locate_model(workspace, chosen.path))
            check_tokenizers(names, student.tokenizer, tokenizer)
        scoring = Scoring(workspace, config, settings, record, rows_file, teacher)
        store = scoring.score_once(session, as_read(sequences))
    if session.sources is not None:
        session.sources.made.append(record_file(store.path))
    return SoftTargets(settings, store=store)


def _teacher_batch(
    student: Student,
    teacher: LocalTeacher,
    sequences: Sequence[TokenSequence],
    batch: TokenBatch,
) -> TokenBatch:
    """Returns the sequences as a batch that the teacher can run."""
    if any(one.for_teacher is not None for one in sequences):
        return teacher.collate_long(as_read(sequences))
    if teacher.head.rules == student.head.rules:
        return batch
    return teacher.collate(sequences)
