"""Soft targets of supervised rows: scored live by the teacher, or once into a store.

Shapes: N trained tokens of a pass.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import torch
from torch import Tensor

from stillroom.errors import CallFailedError, RunError, TeacherError
from stillroom.files import FileLock
from stillroom.lineage import ModelRecord, record_file, write_manifest
from stillroom.models.batches import TokenBatch, TokenSequence, microbatches
from stillroom.models.divergence import (
    TokenScores,
    TopTokens,
    at_temperature,
    jensen_shannon,
    reverse_kl,
    top_tokens,
    with_bucket,
)
from stillroom.models.load import load_tokenizer
from stillroom.models.pairing import check_tokenizers
from stillroom.models.resolve import locate_model
from stillroom.reporting import stop_if_cancelled
from stillroom.serving.scoring import TeacherScores
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import (
    DatasetTeacher,
    SoftTargetsSection,
    served_teacher,
)
from stillroom.train.config.schema import DistillConfig, SftConfig, TrainConfig
from stillroom.train.loop.session import Session
from stillroom.train.methods.losses import DivergenceFunction, zero_rounding
from stillroom.train.on_policy.preflight import check_teacher_server
from stillroom.train.on_policy.teachers import (
    check_teacher_context,
    load_local_teacher,
    teacher_batch,
    teacher_sequences,
)
from stillroom.train.on_policy.token_scores import (
    DistributionComparison,
    TopTokensScorer,
    add_gradient,
    add_gradient_with_teacher,
    score_by_autograd,
    score_with_teacher,
    top_tokens_of,
)
from stillroom.train.soft_targets.store import (
    StoreHeader,
    StoreWriter,
    TopTokenStore,
    find_store,
    open_store,
    open_writer,
    sequence_key,
    store_name,
)
from stillroom.train.student.model import Student
from stillroom.types import TokenTrace

_PHASE = "teacher"
_MAX_BATCH_TOKENS = 16384
_LOCK_POLL_S = 0.5
_CANCEL_POLL_S = 0.2

Unscored = Mapping[bytes, TokenSequence]
"""The sequences that the teacher has not scored yet, by key."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scoring of a run's rows by its teacher, which is done once."""

    workspace: Workspace
    config: SftConfig | DistillConfig
    settings: SoftTargetsSection
    record: ModelRecord
    """The teacher's identity."""
    rows_file: Path
    teacher: LocalTeacher | None = None
    """The teacher, if it is already loaded."""

    def score_once(
        self, session: Session[TrainConfig], sequences: Sequence[TokenSequence]
    ) -> TopTokenStore:
        """Returns a store with the teacher's top tokens for all sequences.

        The teacher is loaded, or called, only if no store has them.
        """
        peers = session.student.peers
        store = self._find_or_write(session, sequences) if peers.is_first else None
        # Other processes wait here; those on another disk score the rows themselves.
        peers.is_any(False)
        return store or self._find_or_write(session, sequences)

    def _find_or_write(
        self, session: Session[TrainConfig], sequences: Sequence[TokenSequence]
    ) -> TopTokenStore:
        """Returns the first store that has all sequences; if none has, writes one."""
        student, reporter = session.student, session.reporter
        folder = self.workspace.writable(self.settings.store, label="soft_targets.store")
        by_key = {sequence_key(sequence): sequence for sequence in sequences}
        vocab_size = min(len(student.loaded.tokenizer), student.head.vocab_size)
        k, teacher = self.settings.top_k or 1, self.config.teachers[0]
        header = store_header(teacher, self.record, k=k, vocab_size=vocab_size)
        lock = FileLock(folder / ".lock")
        while not lock.try_acquire():
            stop_if_cancelled(reporter)
            time.sleep(_LOCK_POLL_S)
        try:
            if (store := find_store(folder, header, set(by_key))) is not None:
                reporter.note(
                    f"{_describe_store(self.workspace, store)}, so the teacher is not loaded"
                )
                return store
            path = folder / store_name(header, by_key)
            with open_writer(path, header) as writer:
                missing = {key: one for key, one in by_key.items() if key not in writer.done}
                if missing:
                    self._score(session, missing, writer, header)
            store = open_store(path)
            write_manifest(
                path,
                operation="start_training",
                inputs=[self.rows_file, self.record],
                request={"top_k": header.k, "teacher": teacher.path},
                counts={"sequences": len(by_key), "tokens": store.num_tokens},
            )
        finally:
            lock.release()
        reporter.note(f"the teacher has scored all rows: {_describe_store(self.workspace, store)}")
        return store

    def _score(
        self,
        session: Session[TrainConfig],
        missing: Unscored,
        writer: StoreWriter,
        header: StoreHeader,
    ) -> None:
        """Scores the missing sequences, in this process or on the teacher's server."""
        teacher = self.config.teachers[0]
        if teacher.section.is_served:
            _score_on_server(self.workspace, self.config, session, missing, writer, header)
            return
        local = self.teacher
        if local is None:
            local = load_local_teacher(self.workspace, teacher, session.student.loaded)
        check_teacher_context(local.loaded.max_context, list(missing.values()))
        _score_locally(local, session, missing, writer, header)


def store_header(
    teacher: DatasetTeacher, record: ModelRecord, *, k: int, vocab_size: int
) -> StoreHeader:
    """Returns the header of a store of this teacher's top `k` tokens."""
    section = teacher.section
    content = record.sha256 or record.revision
    identity: dict[str, str | bool | None] = {
        "content": content,
        "name": None if content else record.name,
        "location": None if content else record.location,
        "provider": section.provider,
        "precision": section.precision,
        "quantization": section.quantization,
    }
    return StoreHeader(teacher=identity, k=min(k, vocab_size), vocab_size=vocab_size)


def _describe_store(workspace: Workspace, store: TopTokenStore) -> str:
    size = store.path.stat().st_size / 1e6
    return (
        f"{workspace.shown(store.path)} has the teacher's top {store.header.k} of "
        f"{store.header.vocab_size} tokens at {store.num_tokens} positions ({size:.1f} MB, "
        f"{store.header.token_bytes} bytes per position)"
    )


@torch.no_grad()
def _score_locally(
    teacher: LocalTeacher,
    session: Session[TrainConfig],
    missing: Unscored,
    writer: StoreWriter,
    header: StoreHeader,
) -> None:
    """Writes the top tokens of a teacher in this process for the missing sequences."""
    keys, total = list(missing), len(writer.done) + len(missing)
    lengths = [len(missing[key].ids) for key in keys]
    teacher.loaded.model.eval()
    for group in microbatches(lengths, max_tokens=_MAX_BATCH_TOKENS):
        stop_if_cancelled(session.reporter)
        members = [missing[keys[i]] for i in group]
        hidden_NH = teacher.head.batch_hidden(teacher.collate(members))
        tiles = [
            top_tokens(teacher.head.logits(hidden_nH)[:, : header.vocab_size], header.k)
            for hidden_nH in hidden_NH.split(teacher.head.max_positions)
        ]
        sizes = [member.num_trained for member in members]
        ids, logprobs, rest = (
            torch.cat(parts).cpu().split(sizes)
            for parts in (
                [tile.ids_NK for tile in tiles],
                [tile.logprobs_NK for tile in tiles],
                [tile.rest_N for tile in tiles],
            )
        )
        for index, i in enumerate(group):
            writer.add(keys[i], TopTokens(ids[index], logprobs[index], rest[index]))
        session.reporter.progress(len(writer.done), total, unit="rows", phase=_PHASE)


def _score_on_server(
    workspace: Workspace,
    config: SftConfig | DistillConfig,
    session: Session[TrainConfig],
    missing: Unscored,
    writer: StoreWriter,
    header: StoreHeader,
) -> None:
    """Writes the top tokens that the teacher's server returns for the missing sequences.

    Raises TeacherError if scoring a sequence fails; those already written are kept.
    """
    student, teacher = session.student.loaded, config.teachers[0]
    for note in check_teacher_server(
        workspace, config, student.tokenizer, max_context=student.max_context
    ):
        session.reporter.note(note)
    served = served_teacher(workspace, teacher, top_k=header.k)
    served.server.note = session.reporter.note
    total, failures = len(writer.done) + len(missing), list[CallFailedError]()

    async def score_all() -> None:
        limit = anyio.CapacityLimiter(served.concurrency)
        async with served.server, anyio.create_task_group() as tasks:

            async def score(key: bytes, sequence: TokenSequence) -> None:
                trace = TokenTrace(ids=sequence.ids, sampled=sequence.trained, logprobs=[])
                try:
                    async with limit:
                        scores = await served.score(trace)
                except CallFailedError as error:
                    # Collected instead of raised, since the task group would wrap it.
                    failures.append(error)
                    tasks.cancel_scope.cancel()
                    return
                writer.add(key, _top_tokens(scores, header))
                session.reporter.progress(len(writer.done), total, unit="rows", phase=_PHASE)

            for key, sequence in missing.items():
                tasks.start_soon(score, key, sequence)
            while len(writer.done) < total and not failures:
                if session.reporter.is_cancelled():
                    tasks.cancel_scope.cancel()
                await anyio.sleep(_CANCEL_POLL_S)

    anyio.run(score_all)
    stop_if_cancelled(session.reporter)
    if failures:
        raise TeacherError(
            f"{teacher.path} at {served.server.root} failed to score a row: {failures[0].message}",
            "check the server's log, then start again: rows that were scored are kept",
        ) from failures[0]


def _top_tokens(scores: TeacherScores, header: StoreHeader) -> TopTokens:
    """Returns a server's top tokens of one sequence. Raises TeacherError if some are missing."""
    ids, logprobs = top_tokens_of([scores], header.k, option="soft_targets.top_k")
    if (largest := max(max(row) for row in ids)) >= header.vocab_size:
        raise TeacherError(
            f"the teacher's server returned token id {largest}, outside the student's vocabulary "
            f"of {header.vocab_size} tokens",
            "serve a teacher with the student's tokenizer",
        )
    with_rest = with_bucket(torch.tensor(logprobs, dtype=torch.float32))
    return TopTokens(torch.tensor(ids), with_rest[:, :-1], with_rest[:, -1])


_DIVERGENCES: Mapping[str, DivergenceFunction] = {
    "forward_kl": partial(jensen_shannon, beta=0.0),
    "jsd": partial(jensen_shannon, beta=0.5),
    "reverse_kl": reverse_kl,
}
"""The divergence of each `soft_targets.loss`."""


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """The soft targets of rows: from a teacher that scores each step's rows, or from a store."""

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
        """Adds the gradient of `scale` × the batch's summed loss to the student's.

        Returns the unscaled sum.
        """
        total = 0.0

        def losses(_: slice, scores: TokenScores) -> Tensor:
            nonlocal total
            losses_n = self._losses(scores)
            total += losses_n.sum().item()
            return losses_n * scale

        if (teacher := self.teacher) is not None:
            for_teacher = teacher_batch(student, teacher, sequences, batch)
            add_gradient_with_teacher(
                student, teacher, batch, for_teacher, self._comparison, losses
            )
        else:
            add_gradient(student, self._scorer(sequences, batch), batch, losses)
        return total

    @torch.no_grad()
    def loss(
        self, student: Student, sequences: Sequence[TokenSequence], batch: TokenBatch
    ) -> float:
        """Returns the batch's summed loss (nats), without a gradient."""
        if (teacher := self.teacher) is not None:
            for_teacher = teacher_batch(student, teacher, sequences, batch)
            scores = score_with_teacher(student, teacher, batch, for_teacher, self._comparison)
        else:
            scorer = self._scorer(sequences, batch)
            scores = score_by_autograd(student, scorer, batch, student.head.max_positions)
        return self._losses(scores).sum().item()

    def _losses(self, scores: TokenScores) -> Tensor:
        """Returns the loss of each token, [N]: the divergence, and the weighted label loss."""
        losses_N = zero_rounding(scores.divergence_N)
        if self.settings.label_coef > 0:
            losses_N = losses_N - self.settings.label_coef * scores.student_N
        return losses_N

    @property
    def _comparison(self) -> DistributionComparison:
        divergence = _DIVERGENCES[self.settings.loss]
        return DistributionComparison(
            partial(at_temperature, divergence, temperature=self.settings.temperature)
        )

    def _scorer(self, sequences: Sequence[TokenSequence], batch: TokenBatch) -> TopTokensScorer:
        if self.store is None or self.settings.top_k is None:
            raise RunError(
                "the teacher has not scored the rows yet", "this is a bug in Stillroom: report it"
            )
        device = batch.targets_N.device
        top = self.store.read(teacher_sequences(sequences), k=self.settings.top_k, device=device)
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
    """Returns the soft targets of the sequences.

    Loads the teacher; with `top_k` only if some of the sequences are in no store yet.

    record: the teacher's identity. teacher: the teacher, if it is already loaded.
    Raises ModelError if the teacher's tokenizer differs from the student's.
    """
    settings = config.soft_targets or SoftTargetsSection()
    chosen, student = config.teachers[0], session.student.loaded
    # Loading a model draws random numbers, which must not affect the student's dropout.
    with torch.random.fork_rng():
        if settings.top_k is None:
            teacher = teacher or load_local_teacher(workspace, chosen, student)
            check_teacher_context(teacher.loaded.max_context, sequences)
            return SoftTargets(settings, teacher=teacher)
        if not chosen.section.is_served:
            names = f"student {student.location.name!r} and teacher {chosen.path!r}"
            tokenizer = load_tokenizer(locate_model(workspace, chosen.path))
            check_tokenizers(names, student.tokenizer, tokenizer)
        scoring = Scoring(workspace, config, settings, record, rows_file, teacher)
        store = scoring.score_once(session, teacher_sequences(sequences))
    if session.sources is not None:
        session.sources.derived.append(record_file(store.path))
    return SoftTargets(settings, store=store)
