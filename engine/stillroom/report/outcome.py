"""What the latest recipe of a workspace made: the student, how to use it, and how good it is."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stillroom.evaluate.intervals import Estimate
from stillroom.report.folders import Run
from stillroom.report.request import RecipeOutcome, RunningRecipe
from stillroom.report.wording import interval_text, plural, points
from stillroom.types import RunKind, RunStatus


@dataclass(frozen=True, slots=True)
class Outcome:
    """The student of a recipe, as the report shows it."""

    folder: str | None
    gguf: str | None
    system: str
    """What to do about a system message."""
    commands: Sequence[str]
    """The commands to try it with."""
    comparisons: Sequence[str]
    """Sentences about what it was compared with."""
    caveats: Sequence[str]


def latest_outcome(runs: Sequence[Run], running: RunningRecipe | None) -> Outcome | None:
    """Returns what the latest recipe made; None if none has succeeded.

    running: the recipe that is writing this report, which counts as the latest although its run
    has not ended.
    """
    done = [
        run.state.result
        for run in runs
        if run.state.kind is RunKind.RECIPE and run.state.status is RunStatus.SUCCEEDED
    ]
    if running is not None:
        result = running.outcome
    elif not done:
        return None
    else:
        try:
            result = msgspec.convert(done[-1], RecipeOutcome)
        except msgspec.ValidationError:
            return None  # the run's files were edited
    return Outcome(
        folder=result.folder,
        gguf=result.gguf,
        system=_system_advice(result.system),
        commands=list(_commands(result)),
        comparisons=list(_comparisons(result)),
        caveats=result.caveats,
    )


def _system_advice(system: str | None) -> str:
    if system is None:
        return "Give it complete prompts, with the system messages that they have in the data."
    return "Give it the text alone: it was trained without a system message."


def _commands(result: RecipeOutcome) -> Iterator[str]:
    if result.folder is not None:
        yield shlex.join(["stillroom", "chat", result.folder])
    if result.gguf is not None:
        yield shlex.join(["llama-server", "-m", result.gguf, "--jinja"])


def _comparisons(result: RecipeOutcome) -> Iterator[str]:
    if result.gain is not None:
        before = result.gain_over or "untrained student, with or without examples"
        yield f"Compared with the {before}, on {_points(result.gain, 'test prompt')}."
    if result.above_teacher is not None:
        prompts = _points(result.above_teacher, "validation prompt")
        yield (
            f"Compared with the teacher, on {prompts}. The student was chosen by its result on "
            "these prompts, which favours it a little."
        )


def _points(difference: Estimate, prompt: str) -> str:
    """Returns a difference in points with its interval, and the prompts that it was measured on."""
    value = points(difference.value, is_signed=True)
    return f"{plural(difference.n, prompt)}: {value} points ({interval_text(difference)})"
