"""What the latest recipe of a workspace made: the student, how to use it, and how good it is."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stillroom.evaluate.intervals import Estimate
from stillroom.report.folders import Run
from stillroom.report.wording import interval_text, plural, points
from stillroom.types import RunKind, RunStatus


class RecipeOutcome(msgspec.Struct, frozen=True):
    """The fields of a recipe's result that the report shows; older results have fewer."""

    folder: str | None = None
    gguf: str | None = None
    system: str | None = None
    gain: Estimate | None = None
    gain_over: str | None = None
    above_teacher: Estimate | None = None
    caveats: list[str] = []

    @property
    def system_advice(self) -> str:
        """Whether to send a system message."""
        if self.system is None:
            return "Send complete prompts, with their system messages as in the data."
        if self.system:
            return f"Send this system message, with which the student was trained: {self.system}"
        return "Send no system message: the student was trained without one."

    @property
    def commands(self) -> Iterator[str]:
        """The commands to try the student with."""
        if self.folder is not None:
            yield shlex.join(["stillroom", "chat", self.folder])
        if self.gguf is not None:
            yield shlex.join(["llama-server", "-m", self.gguf, "--jinja"])

    @property
    def comparisons(self) -> Iterator[str]:
        """One sentence per comparison of the student with another model."""
        if self.gain is not None:
            before = self.gain_over or "untrained student, with or without examples"
            yield f"Compared with the {before}, on {_points(self.gain, 'test prompt')}."
        if self.above_teacher is not None:
            prompts = _points(self.above_teacher, "validation prompt")
            yield (
                f"Compared with the teacher, on {prompts}. The student was chosen by its result on "
                "these prompts, which favours it a little."
            )


@dataclass(frozen=True, slots=True)
class RunningRecipe:
    """The recipe that is writing the report, as the last of its stages."""

    run_id: str
    outcome: RecipeOutcome


def latest_outcome(runs: Sequence[Run], running: RunningRecipe | None) -> RecipeOutcome | None:
    """Returns what the latest recipe made; None if none has succeeded.

    running: the recipe that is writing this report, which counts as the latest although its run
    has not ended.
    """
    if running is not None:
        return running.outcome
    done = [
        run.state.result
        for run in runs
        if run.state.kind is RunKind.RECIPE and run.state.status is RunStatus.SUCCEEDED
    ]
    try:
        return msgspec.convert(done[-1], RecipeOutcome) if done else None
    except msgspec.ValidationError:
        return None  # the run's files were edited


def _points(difference: Estimate, prompt: str) -> str:
    """Returns a difference in points with its interval, and the prompts that it was measured on."""
    value = points(difference.value, is_signed=True)
    return f"{plural(difference.n, prompt)}: {value} points ({interval_text(difference)})"
