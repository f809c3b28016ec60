"""On-policy distillation: the student answers, the teacher scores every token, the student learns.

Each iteration samples rollouts from the student as it is now, with tools; the update lowers the
reverse KL to the teacher on exactly the tokens that were sampled.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import anyio

from stillroom.data.formats import Task
from stillroom.train.optimizer import Optimizer
from stillroom.train.policy_update import update_student
from stillroom.train.session import Session, TrainResult
from stillroom.train.student_rollouts import (
    SampledRollout,
    nothing_sampled,
    prompt_batches,
    sample_rollouts,
    sequences_of,
)
from stillroom.train.student_stage import StudentStage
from stillroom.train.teachers import Teachers
from stillroom.types import StopReason, Trajectory


async def train_on_policy(
    session: Session,
    tasks: Sequence[Task],
    teachers: Teachers,
    stage: AbstractAsyncContextManager[StudentStage],
) -> TrainResult:
    """Trains for the configured iterations and returns the result with the final checkpoint."""
    config = session.config
    prompts = prompt_batches(tasks, config)
    algorithm = config.algorithm
    optimizer = Optimizer(
        session.student.trainable(), config.trainer, total_steps=len(prompts) * algorithm.substeps
    )
    session.begin(optimizer, substeps=algorithm.substeps)
    async with teachers, stage as opened:
        for note in opened.notes:
            session.reporter.note(note)
        for iteration in range(session.step, len(prompts)):
            chosen = prompts[iteration]
            clock = time.monotonic()
            sampled = await sample_rollouts(session, opened, teachers, chosen, iteration)
            sampled_s, clock = time.monotonic() - clock, time.monotonic()
            metrics = await _learn(session, sampled, teachers, optimizer, iteration)
            metrics |= {"sample_s": sampled_s, "update_s": time.monotonic() - clock}
            session.after_step(iteration + 1, len(prompts), metrics)
    num_prompts = min(len(tasks), sum(map(len, prompts)))
    return session.finish(len(prompts), rows=num_prompts, skipped={})


async def _learn(
    session: Session,
    sampled: Sequence[SampledRollout],
    teachers: Teachers,
    optimizer: Optimizer,
    iteration: int,
) -> dict[str, float]:
    """Updates the student on an iteration's rollouts and returns its metrics."""
    outcomes = [one.outcome for one in sampled]
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    sequences = sequences_of(sampled)
    if not sequences:
        raise nothing_sampled(outcomes, iteration)
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
    sampled_tokens = sum(sequence.tokens.num_trained for sequence in sequences)
    algorithm = session.config.algorithm
    return {
        **stats.metrics(
            is_clipped=algorithm.loss_fn == "ppo",
            is_capped=algorithm.importance_cap is not None,
        ),
        **_metrics(rollouts, sampled_tokens),
        "failed": (len(outcomes) - len(rollouts)) / len(outcomes),
    }


def _metrics(rollouts: Sequence[Trajectory], sampled_tokens: int) -> dict[str, float]:
    num = max(1, len(rollouts))
    metrics = {
        "response_tokens": sampled_tokens / num,
        "turns": sum(rollout.turns for rollout in rollouts) / num,
        "truncated": sum(rollout.truncated for rollout in rollouts) / num,
        "out_of_turns": sum(r.stop_reason is StopReason.MAX_TURNS for r in rollouts) / num,
        "tool_errors": sum(rollout.tool_errors for rollout in rollouts) / num,
    }
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    return metrics
