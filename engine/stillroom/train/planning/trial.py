"""Two steps of a run that are lost, to see how long they take and how much memory they hold."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.models.batches import TokenSequence
from stillroom.settings import Workspace
from stillroom.train.config.schema import TrainConfig
from stillroom.train.methods.dpo import accumulate_preference, add_reference
from stillroom.train.methods.sft import accumulate_nll
from stillroom.train.planning.forecast import Speed
from stillroom.train.student.encode import TokenPair
from stillroom.train.student.memory import peak_memory_gb
from stillroom.train.student.model import Student, load_student
from stillroom.train.student.optimizer import Optimizer

Unit = TokenSequence | TokenPair
"""What a batch is made of."""

# Arithmetic of one tried step: some seconds on the slowest machine that trains at all.
MOST_OPERATIONS = {"cpu": 1e12, "cuda": 3e14}


@dataclass(frozen=True, slots=True)
class Trial:
    """What the tried steps came to."""

    speed: Speed
    memory_gb: float
    """Held at most, by the whole process (on CUDA: by the GPU)."""
    is_partial: bool
    """Whether they had fewer rows than a batch."""


def try_steps(workspace: Workspace, config: TrainConfig, units: Sequence[Unit]) -> Trial:
    """Takes a step on the longest rows (the memory) and one on the first ones (the time)."""
    student = load_student(workspace, config.model, seed=config.trainer.seed)
    num_parameters = sum(p.numel() for p in student.module.parameters())
    most = int(MOST_OPERATIONS[student.loaded.device.type] / (6 * num_parameters))
    size = config.data.batch_size
    longest = sorted(units, key=num_tokens)[-size:][::-1]
    optimizer = Optimizer(student.trainable(), config.trainer, total_steps=2)
    heavy, light = _within(longest, most), _within(units[:size], most)
    _step(student, config, heavy, optimizer)
    accumulate_s, step_s = _step(student, config, light, optimizer)
    speed = Speed(token_s=accumulate_s / sum(map(num_tokens, light)), step_s=step_s)
    return Trial(
        speed,
        memory_gb=peak_memory_gb(student.loaded.device),
        is_partial=len(heavy) < len(longest) or len(light) < len(units[:size]),
    )


def num_tokens(unit: Unit) -> int:
    """Returns how long a sequence or a pair is."""
    if isinstance(unit, TokenPair):
        return len(unit.chosen.ids) + len(unit.rejected.ids)
    return len(unit.ids)


def _within(units: Sequence[Unit], most: int) -> list[Unit]:
    """Returns the first of the units that have no more tokens together; at least one."""
    chosen, total = [units[0]], num_tokens(units[0])
    for unit in units[1:]:
        if (total := total + num_tokens(unit)) > most:
            break
        chosen.append(unit)
    return chosen


def _step(
    student: Student, config: TrainConfig, units: Sequence[Unit], optimizer: Optimizer
) -> tuple[float, float]:
    """Returns the seconds of the passes and of the optimiser."""
    pairs = [unit for unit in units if isinstance(unit, TokenPair)]
    referenced = add_reference(student, pairs, is_mean=config.dpo.loss == "ipo") if pairs else []
    started = time.monotonic()
    if referenced:
        accumulate_preference(student, referenced, config.dpo)
    else:
        accumulate_nll(student, [unit for unit in units if isinstance(unit, TokenSequence)])
    passed = time.monotonic()
    optimizer.step()
    return passed - started, time.monotonic() - passed
