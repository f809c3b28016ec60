"""What the student is shown when: limits of its rollouts that change over a run. Pure."""

import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.files import content_hash


class CurriculumSection(BaseModel):
    """Easier rollouts first (distill). Iterations are counted after a cold start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_tokens: Annotated[int, Field(ge=1)] | None = None
    """A rollout ends once the student has written so many tokens in all its turns.

    Source: arXiv 2602.15260, 2605.27028: the beginnings teach most, and cost least.
    """
    prefix_tokens_end: Annotated[int, Field(ge=1)] | None = None
    """The limit grows to this by iteration prefix_steps, and then there is none."""
    prefix_steps: Annotated[int, Field(ge=1)] | None = None
    first_turns: Annotated[int, Field(ge=1)] | None = None
    """Turns of the first rollouts; they grow to rollout.max_turns by iteration turn_steps.

    Source: arXiv 2604.24005: errors add up over turns and lead where the teacher knows nothing.
    """
    turn_steps: Annotated[int, Field(ge=1)] | None = None
    teacher_share: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of turns that the teacher writes; they are read and not trained.

    Falls to 0 by iteration teacher_steps. Source: arXiv 2606.15912.
    """
    teacher_steps: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _every_ramp_has_an_end(self) -> "CurriculumSection":
        ramps = (
            ("prefix_steps", self.prefix_steps, "prefix_tokens_end", self.prefix_tokens_end),
            ("turn_steps", self.turn_steps, "first_turns", self.first_turns),
            ("teacher_steps", self.teacher_steps, "teacher_share", self.teacher_share or None),
        )
        for steps_name, steps, name, value in ramps:
            if (steps is None) != (value is None):
                raise ValueError(
                    f"{name} and {steps_name} (the iteration by which it is over) go together"
                )
        if self.prefix_tokens_end is not None and (
            self.prefix_tokens is None or self.prefix_tokens_end < self.prefix_tokens
        ):
            raise ValueError("prefix_tokens_end is what prefix_tokens grows to: set the lower one")
        return self


class ColdStartSection(BaseModel):
    """Supervised steps before the first rollout (distill): the student learns to play at all.

    Source: arXiv 2604.13016, 2604.13010.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_file: str
    """Supervised rows (convert_rollouts), relative to the folder of config.yml."""
    num_epochs: Annotated[int, Field(ge=1)] = 1
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Default: the trainer's."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rows per step; default: data.batch_size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for the rollouts of one iteration."""

    max_turns: int
    prefix_tokens: int | None = None
    teacher_share: float = 0.0

    def teacher_turns(self, key: str, *, seed: int) -> frozenset[int]:
        """Returns the turns of a rollout that the teacher writes; they follow from its key."""
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
        first = min(section.first_turns, max_turns)
        done = min(1.0, iteration / section.turn_steps)
        turns = first + int((max_turns - first) * done)
    left = 1 - iteration / section.teacher_steps if section.teacher_steps else 0.0
    return Limits(turns, prefix, section.teacher_share * max(0.0, left))
