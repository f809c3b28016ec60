"""On-policy distillation: the student samples, the teacher scores each token, the student learns.

Each iteration samples rollouts, with tools, from the student's current weights; the update then
lowers the reverse KL to the teacher on exactly the sampled tokens.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import anyio

from stillroom.data.formats import SftRow, Task
from stillroom.models.batches import TokenSequence
from stillroom.policy.check import check_decoding
from stillroom.policy.passes import set_row_by_row_mode
from stillroom.settings import Workspace
from stillroom.train.config.request import TrainingPlan
from stillroom.train.config.resume import CarriedRollout
from stillroom.train.config.schema import DistillConfig
from stillroom.train.loop.rows import epoch_order
from stillroom.train.loop.session import Phase, Session, TrainResult
from stillroom.train.loop.student_environment import StudentEnvironment, open_student_environment
from stillroom.train.methods.sft import (
    EncodedSft,
    PrepareTargets,
    cold_start_steps,
    encode_supervised_rows,
    train_cold_start,
)
from stillroom.train.on_policy.alarms import find_alarms
from stillroom.train.on_policy.policy_update import update_student
from stillroom.train.on_policy.preflight import check_before_rollouts, check_tool_calls
from stillroom.train.on_policy.rollout_metrics import cross_tokenizer_metrics, rollout_metrics
from stillroom.train.on_policy.student_rollouts import (
    IterationRollouts,
    failed_iteration_error,
    no_samples_error,
    prompt_batches,
    sample_rollouts,
    training_sequences_of,
)
from stillroom.train.on_policy.teachers import Teachers, check_teacher_context, load_teachers
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.model import Optimizer


@dataclass(slots=True)
class DistillProgress:
    """The state that distillation keeps between iterations."""

    config: DistillConfig
    is_trained: bool
    """Whether the student is a checkpoint of an earlier training, such as SFT."""
    carried: list[CarriedRollout] = field(default_factory=list[CarriedRollout])
    """The unfinished rollouts that continue in the next iteration."""
    history: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    """The metrics of all steps so far, including those before the run was resumed."""

    def alarms_after(self, metrics: Mapping[str, float]) -> list[str]:
        """Adds the metrics of one more step and returns the current alarms."""
        self.history.append(metrics)
        alarms = find_alarms(self.history, self.config, is_trained=self.is_trained)
        return [f"{alarm.name}: {alarm.text}" for alarm in alarms]


def distill(
    workspace: Workspace,
    session: Session[DistillConfig],
    plan: TrainingPlan,
    tasks: Sequence[Task],
    cold_rows: Sequence[SftRow],
    mixed_rows: Sequence[SftRow] = (),
    prepare: PrepareTargets | None = None,
) -> TrainResult:
    """Trains on the rows of a cold start, if any, and then on the student's own rollouts.

    mixed_rows: rows mixed into the rollouts, in the share set by rollout.on_policy_share.
    prepare: returns soft targets for the cold start; None: it trains on its rows' own tokens.

    Raises EngineError before the first rollout if student and teacher are incompatible.
    """
    config = session.config
    sampling_notes = check_decoding(session.student.loaded)
    teachers = load_teachers(workspace, config, session.student)
    check_tool_calls(plan, tasks, teachers.pairs)
    if config.curriculum.teacher_share:
        for teacher in teachers.local.values():
            sampling_notes += check_decoding(teacher.loaded)
    if config.rollout.deterministic:
        for loaded in (session.student.loaded, *(one.loaded for one in teachers.local.values())):
            set_row_by_row_mode(loaded.model)
    notes = [note for teacher in set(teachers.local.values()) for note in teacher.head.notes]
    notes += teachers.notes
    notes += check_before_rollouts(
        workspace,
        config,
        session.student,
        teachers.local,
        plan.views,
        tasks,
        cross_tokenizer_datasets=teachers.pairs,
    )
    for note in sampling_notes + notes:
        session.reporter.note(note)
    cold_start = (
        encode_supervised_rows(session, cold_rows, plan.rows_instruction) if cold_rows else None
    )
    environment = open_student_environment(
        workspace, plan, session.student, tasks, is_judge_optional=True
    )
    mixed = _encode_mixed_rows(session, teachers, plan, mixed_rows) if mixed_rows else []
    return anyio.run(
        train_on_policy, session, tasks, teachers, environment, cold_start, mixed, prepare
    )


async def train_on_policy(
    session: Session[DistillConfig],
    tasks: Sequence[Task],
    teachers: Teachers,
    environment_context: AbstractAsyncContextManager[StudentEnvironment],
    cold_start: EncodedSft | None = None,
    mixed: Sequence[TokenSequence] = (),
    prepare: PrepareTargets | None = None,
) -> TrainResult:
    """Trains for the configured iterations and returns the result with the final checkpoint.

    cold_start: the rows of a cold start, which is trained first; None: no cold start. mixed: the
    rows mixed into the rollouts.
    """
    config = session.config
    progress = DistillProgress(
        config, is_trained=session.student.loaded.location.record is not None
    )
    # Set before the first `begin`, which restores the carried rollouts of a resumed run.
    session.progress = progress
    batches = prompt_batches(tasks, config)
    first_step = cold_start_steps(config, len(cold_start.sequences)) if cold_start else 0
    last_step, substeps = first_step + len(batches), config.algorithm.substeps
    async with teachers, environment_context as environment:
        for note in environment.notes:
            session.reporter.note(note)
        for server in (environment.server, *(one.server for one in teachers.served.values())):
            if server is not None:
                server.note = session.reporter.note
        if cold_start is not None:
            await anyio.to_thread.run_sync(
                train_cold_start, session, cold_start, last_step, prepare, teachers.local.get(0)
            )
        num_prompts = min(len(tasks), sum(map(len, batches)))
        skipped = cold_start.skipped if cold_start else {}
        if session.stopped_by is not None:
            return session.finish(session.step, rows=num_prompts, skipped=skipped)
        optimizer = session.student.optimizer(config.trainer, total_steps=len(batches) * substeps)
        session.begin(optimizer, substeps=substeps, first_step=first_step)
        phase = Phase(config.dataset_type, first_step, last_step)
        for iteration in range(session.step - first_step, len(batches)):
            started = time.monotonic()
            sampled = await sample_rollouts(
                session, environment, teachers, batches, iteration, carried=progress.carried
            )
            sampled_at = time.monotonic()
            sequences = training_sequences_of(sampled.ended, teachers.pairs, environment.views)
            if not sequences:
                raise no_samples_error(sampled, iteration)
            if (error := failed_iteration_error(sampled, iteration)) is not None:
                raise error
            sequences += rows_of_iteration(mixed, config, iteration)
            metrics = await _update(session, sampled, sequences, teachers, optimizer, iteration)
            metrics |= {
                "sample_s": sampled_at - started,
                "update_s": time.monotonic() - sampled_at,
            }
            progress.carried = sampled.carried
            session.after_step(first_step + iteration + 1, last_step, metrics, phase=phase)
            if session.stopped_by is not None:
                break
    return session.finish(session.step, rows=num_prompts, skipped=skipped)


def _encode_mixed_rows(
    session: Session[DistillConfig], teachers: Teachers, plan: TrainingPlan, rows: Sequence[SftRow]
) -> list[TokenSequence]:
    """Returns the rows to mix into the rollouts, as tokens for the student and the teacher.

    Raises ConfigError if a row exceeds the teacher's context.
    """
    encoded = encode_supervised_rows(session, rows, plan.views.teacher)
    check_teacher_context(teachers.local[0].loaded.max_context, encoded.sequences)
    skipped = ", ".join(f"{count} {reason}" for reason, count in encoded.skipped.items())
    session.reporter.note(
        f"{len(encoded.sequences)} rows are mixed into the rollouts"
        + (f"; skipped: {skipped}" if skipped else "")
    )
    return encoded.sequences


def rows_of_iteration(
    mixed: Sequence[TokenSequence], config: DistillConfig, iteration: int
) -> list[TrainingSequence]:
    """Returns the rows mixed into an iteration's rollouts; each epoch uses every row once."""
    if not mixed:
        return []
    num = config.rollout.num_mixed_rows(config.data.batch_size * config.data.group_size)
    chosen: list[TrainingSequence] = []
    for position in range(iteration * num, (iteration + 1) * num):
        epoch, index = divmod(position, len(mixed))
        tokens = mixed[epoch_order(len(mixed), epoch, config.trainer.seed + 2)[index]]
        no_logprobs = [0.0] * tokens.num_trained
        chosen.append(TrainingSequence(tokens, no_logprobs, is_row=True))
    return chosen


async def _update(
    session: Session[DistillConfig],
    sampled: IterationRollouts,
    sequences: Sequence[TrainingSequence],
    teachers: Teachers,
    optimizer: Optimizer,
    iteration: int,
) -> dict[str, float]:
    """Updates the student on an iteration's rollouts and returns its metrics."""
    stats = await anyio.to_thread.run_sync(
        update_student,
        session.student,
        teachers.local,
        sequences,
        optimizer,
        session.config,
        iteration,
    )
    session.trained_tokens += stats.num_tokens + stats.num_row_tokens
    algorithm = session.config.algorithm
    metrics = rollout_metrics(session.config, sampled, iteration) | cross_tokenizer_metrics(
        sequences
    )
    return metrics | stats.metrics(
        is_clipped="clip_ratio" in algorithm.loss.options,
        is_capped=algorithm.importance_cap is not None,
    )
