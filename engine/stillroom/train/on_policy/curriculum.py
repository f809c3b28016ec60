"""The curriculum: the limits of rollouts, which change over a run (pure functions)."""

import random
from dataclasses import dataclass

from stillroom.files import content_hash
from stillroom.train.config.distill_sections import CurriculumSection


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the rollouts of one iteration."""

    max_turns: int
    prefix_tokens: int | None = None
    """The most tokens that the student may write over all its turns; None: no limit."""
    teacher_share: float = 0.0
    """The probability that the teacher writes a turn."""

    def teacher_turns(self, key: str, *, seed: int) -> frozenset[int]:
        """Returns the indices of the turns that the teacher writes, drawn from `key` and `seed`."""
        if not self.teacher_share:
            return frozenset()
        draws = random.Random(content_hash(["teacher turns", seed, key]))
        return frozenset(i for i in range(self.max_turns) if draws.random() < self.teacher_share)


def limits_at(section: CurriculumSection, iteration: int, *, max_turns: int) -> Limits:
    """Returns the limits of an iteration, counted from 0."""
    prefix = section.prefix_tokens
    if section.prefix_steps is not None and prefix is not None:
        is_over = iteration >= section.prefix_steps
        end = section.prefix_tokens_end or prefix
        grown = round(prefix + (end - prefix) * iteration / section.prefix_steps)
        prefix = None if is_over else grown
    turns = max_turns
    if section.first_turns is not None and section.turn_steps is not None:
        first_turns = min(section.first_turns, max_turns)
        done = min(1.0, iteration / section.turn_steps)
        turns = first_turns + int((max_turns - first_turns) * done)
    remaining = 1 - iteration / section.teacher_steps if section.teacher_steps else 0.0
    return Limits(turns, prefix, section.teacher_share * max(0.0, remaining))
