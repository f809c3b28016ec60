"""Tries two steps of a run to measure their time and memory; their result is thrown away."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.models.batches import TokenSequence
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.schema import DpoConfig, TrainConfig
from stillroom.train.config.sections import DpoSection
from stillroom.train.methods.dpo import accumulate_preference, add_reference
from stillroom.train.methods.sft import Targets, accumulate_nll
from stillroom.train.on_policy.teachers import load_local_teacher
from stillroom.train.planning.forecast import Speed
from stillroom.train.soft_targets.scoring import as_read
from stillroom.train.soft_targets.targets import SoftTargets
from stillroom.train.student.encode import TokenPair
from stillroom.train.student.memory import peak_memory_gb
from stillroom.train.student.model import Student, load_student
from stillroom.train.student.optimizer import Optimizer

Unit = TokenSequence | TokenPair
"""One item of a batch: a sequence or a pair."""

# The most floating-point operations of one tried step: a few seconds on the slowest machine that is
# useful for training.
MOST_OPERATIONS = {"cpu": 1e12, "mps": 1e13, "cuda": 3e14}


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of the tried steps."""

    speed: Speed
    memory_gb: float
    """The most memory (GB) of the whole process (on CUDA: on the GPU)."""
    is_partial: bool
    """Whether the tried steps had fewer rows than a batch."""
    load_s: float
    """The seconds that loading the student took."""
    notes: list[str]
    """The notes of the student's head on how rows run."""
    reading_token_s: float = 0.0
    """The seconds in which a teacher reads a token once, before the first step; 0 for none."""


def try_steps(workspace: Workspace, config: TrainConfig, units: Sequence[Unit]) -> Trial:
    """Measures the memory of a step on the longest rows and the time of one on the first rows."""
    started = time.monotonic()
    student = load_student(workspace, config.model, seed=config.trainer.seed)
    teacher = _teacher(workspace, config, student)
    load_s = time.monotonic() - started
    num_parameters = sum(p.numel() for p in student.module.parameters())
    # Forward and backward pass take about 6 operations for each parameter and token.
    max_tokens = int(MOST_OPERATIONS[student.loaded.device.type] / (6 * num_parameters))
    size = config.data.batch_size
    longest = sorted(units, key=num_tokens)[-size:][::-1]
    optimizer = student.optimizer(config.trainer, total_steps=2)
    heavy, light = _within(longest, max_tokens), _within(units[:size], max_tokens)
    settings, targets, reading_s = config.soft_targets, None, 0.0
    if settings is not None and teacher is not None:
        if settings.top_k is None:
            targets = SoftTargets(settings, teacher=teacher)
        else:
            reading_s = _reading_s(teacher, light)
    _step(student, config, heavy, optimizer, targets)
    accumulate_s, step_s = _step(student, config, light, optimizer, targets)
    num_light = sum(map(num_tokens, light))
    speed = Speed(token_s=accumulate_s / num_light, step_s=step_s)
    return Trial(
        speed,
        memory_gb=peak_memory_gb(student.loaded.device),
        is_partial=len(heavy) < len(longest) or len(light) < len(units[:size]),
        load_s=load_s,
        notes=student.head.notes,
        reading_token_s=reading_s / num_light,
    )


def _teacher(workspace: Workspace, config: TrainConfig, student: Student) -> LocalTeacher | None:
    """Loads the teacher of soft targets; None without one in this process."""
    if config.soft_targets is None or config.teachers[0].section.is_served:
        return None
    return load_local_teacher(workspace, config.teachers[0], student.loaded)


def _reading_s(teacher: LocalTeacher, units: Sequence[Unit]) -> float:
    """Returns the seconds in which the teacher reads the sequences."""
    sequences = as_read([unit for unit in units if isinstance(unit, TokenSequence)])
    teacher.score_tokens(sequences[:1])
    started = time.monotonic()
    teacher.score_tokens(sequences)
    return time.monotonic() - started


def num_tokens(unit: Unit) -> int:
    """Returns the number of tokens of a sequence, or of both sides of a pair."""
    if isinstance(unit, TokenPair):
        return len(unit.chosen.ids) + len(unit.rejected.ids)
    return len(unit.ids)


def _within(units: Sequence[Unit], max_tokens: int) -> list[Unit]:
    """Returns the first units that together have at most `max_tokens`; at least one unit."""
    chosen, total = [units[0]], num_tokens(units[0])
    for unit in units[1:]:
        if (total := total + num_tokens(unit)) > max_tokens:
            break
        chosen.append(unit)
    return chosen


def _step(
    student: Student,
    config: TrainConfig,
    units: Sequence[Unit],
    optimizer: Optimizer,
    targets: Targets | None,
) -> tuple[float, float]:
    """Takes one step and returns the seconds of its passes and of its optimiser."""
    pairs = [unit for unit in units if isinstance(unit, TokenPair)]
    dpo = config.dpo if isinstance(config, DpoConfig) else DpoSection()
    referenced = add_reference(student, pairs, is_mean=dpo.loss == "ipo") if pairs else []
    started = time.monotonic()
    if referenced:
        accumulate_preference(student, referenced, dpo)
    else:
        rows = [unit for unit in units if isinstance(unit, TokenSequence)]
        accumulate_nll(student, rows, targets)
    passed = time.monotonic()
    optimizer.step()
    return passed - started, time.monotonic() - passed
