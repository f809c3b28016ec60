"""Rollouts of a student by hand: an iteration's sampling without the training around it."""

import time
from pathlib import Path
from typing import Any

import anyio

from fakes.reporters import KeptReporter
from fakes.training import make_student
from stillroom.data.formats import load_tasks
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.tools.source import ToolSource
from stillroom.train.config.schema import DistillConfig
from stillroom.train.loop.session import Session
from stillroom.train.loop.student_environment import StudentEnvironment
from stillroom.train.on_policy.student_policy import StudentRollout
from stillroom.train.on_policy.student_rollouts import (
    IterationRollouts,
    prompt_batches,
    sample_rollouts,
)
from stillroom.train.on_policy.teachers import Teachers

PROMPTS = [{"prompt": f"Item {i}?"} for i in range(6)]


def make_session(models, folder: Path, root: Path, **sections) -> Session[DistillConfig]:
    """Returns the session of a distill run that has not taken a step."""
    config = DistillConfig.model_validate(
        {
            "dataset_type": "distill",
            "teacher": {"path": str(folder)},
            "model": {"path": str(folder), "qlora_rank": 0},
            **sections,
            "data": {"batch_size": 3, "group_size": 2, **sections.get("data", {})},
            "trainer": {"num_epochs": 1, **sections.get("trainer", {})},
        }
    )
    student = make_student(models, folder)
    return Session(config, student, root, KeptReporter(), time.monotonic())


def sample(
    session: Session,
    prompts: Path,
    iteration: int = 0,
    *,
    carried=(),
    teacher=None,
    tools: ToolSource | None = None,
) -> IterationRollouts:
    """Returns the rollouts of one iteration over a file of prompts."""
    batches = prompt_batches(load_tasks(prompts), session.config)
    environment = StudentEnvironment(
        session.student, session.config.rollout, tools, Rewarder(None), {}, None, ()
    )

    teachers = Teachers(local={} if teacher is None else {0: LocalTeacher(teacher)})

    async def work():
        return await sample_rollouts(
            session, environment, teachers, batches, iteration, carried=carried
        )

    return anyio.run(work)


def pairs(sampled: IterationRollouts) -> list[tuple[Any, StudentRollout]]:
    """Returns what became of each rollout, and how it was sampled."""
    return [(one.outcome, one.rollout) for one in sampled.ended]
