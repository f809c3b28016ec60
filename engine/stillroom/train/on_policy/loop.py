"""On-policy distillation: the student answers, the teacher scores every token, the student learns.

Each iteration samples rollouts from the student as it is now, with tools; the update lowers the
reverse KL to the teacher on exactly the tokens that were sampled.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import anyio

from stillroom.data.formats import Task
from stillroom.train.loop.session import Phase, Session, TrainResult
from stillroom.train.loop.student_stage import StudentStage
from stillroom.train.methods.cold_start import cold_start_steps, train_cold_start
from stillroom.train.on_policy.policy_update import update_student
from stillroom.train.on_policy.rollout_metrics import rollout_metrics
from stillroom.train.on_policy.student_rollouts import (
    IterationRollouts,
    nothing_sampled,
    prompt_batches,
    sample_rollouts,
    sequences_of,
)
from stillroom.train.on_policy.teachers import Teachers
from stillroom.train.student.encode import EncodedSft
from stillroom.train.student.optimizer import Optimizer


async def train_on_policy(
    session: Session,
    tasks: Sequence[Task],
    teachers: Teachers,
    stage: AbstractAsyncContextManager[StudentStage],
    first: EncodedSft | None = None,
) -> TrainResult:
    """Trains for the configured iterations and returns the result with the final checkpoint.

    Before them it takes a cold start's steps on the rows `first`.
    """
    config = session.config
    batches = prompt_batches(tasks, config)
    first_step = cold_start_steps(config, len(first.sequences)) if first else 0
    last_step, substeps = first_step + len(batches), config.algorithm.substeps
    async with teachers, stage as opened:
        for note in opened.notes:
            session.reporter.note(note)
        if first is not None:
            await anyio.to_thread.run_sync(train_cold_start, session, first, last_step)
        optimizer = Optimizer(
            session.student.trainable(),
            config.trainer,
            total_steps=len(batches) * substeps,
            peers=session.student.peers,
        )
        session.begin(optimizer, substeps=substeps, first_step=first_step)
        phase = Phase(config.dataset_type, first_step, last_step)
        for iteration in range(session.step - first_step, len(batches)):
            clock = time.monotonic()
            sampled = await sample_rollouts(session, opened, teachers, batches, iteration)
            sampled_s, clock = time.monotonic() - clock, time.monotonic()
            metrics = await _learn(session, sampled, teachers, optimizer, iteration)
            metrics |= {"sample_s": sampled_s, "update_s": time.monotonic() - clock}
            session.carried = sampled.carried
            session.after_step(first_step + iteration + 1, last_step, metrics, phase=phase)
    num_prompts = min(len(tasks), sum(map(len, batches)))
    return session.finish(last_step, rows=num_prompts, skipped=first.skipped if first else {})


async def _learn(
    session: Session,
    sampled: IterationRollouts,
    teachers: Teachers,
    optimizer: Optimizer,
    iteration: int,
) -> dict[str, float]:
    """Updates the student on an iteration's rollouts and returns its metrics."""
    sequences = sequences_of(sampled.ended)
    if not sequences:
        raise nothing_sampled(sampled.outcomes, iteration)
    stats = await anyio.to_thread.run_sync(
        update_student,
        session.student,
        teachers.local,
        sequences,
        optimizer,
        session.config,
        iteration,
    )
    session.trained_tokens += stats.num_tokens
    algorithm = session.config.algorithm
    return rollout_metrics(session.config, sampled, iteration) | stats.metrics(
        is_clipped=algorithm.loss_fn == "ppo", is_capped=algorithm.importance_cap is not None
    )
