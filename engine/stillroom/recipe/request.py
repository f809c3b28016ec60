"""The request and the result of run_recipe, which takes data to a measured student in one run."""

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stillroom.evaluate.intervals import Estimate
from stillroom.teachers.providers import ProviderName
from stillroom.types import OthersText, OwnText
from stillroom.validation import StrictModel

Gate = Literal["teacher", "answers", "gain"]
"""A check at which a recipe stops for a decision: the teacher is not good enough, too many of its
answers look wrong, or the student is not better than before."""


class RunRecipe(StrictModel):
    """The request of `run_recipe`: data, teacher and student, and limits of money and time."""

    input: Annotated[str, Field(description="CSV, .txt or prompts.jsonl of texts, or logs")]
    labelled: Annotated[
        str | None,
        Field(
            description="Texts with right answers (column label), to evaluate; else part of input"
        ),
    ] = None
    teacher: Annotated[str | None, Field(description="If input has no answers")] = None
    student: Annotated[str, Field(description="Hub id, folder or GGUF file")]
    chat_template: str | None = None
    output: Annotated[str, Field(description="Folder for data, model and report")] = "student"
    provider: Annotated[ProviderName | None, Field(description="The teacher's")] = None
    base_url: str | None = None
    api_key_env: str | None = None
    system: Annotated[
        str | None,
        Field(description="The teacher's; the student trains without it"),
    ] = None
    budget_usd: Annotated[
        float | None, Field(gt=0, description="Cap on the teacher's cost over all calls")
    ] = None
    minutes: Annotated[float | None, Field(gt=0, description="Time limit over all calls")] = None
    accept: Annotated[tuple[Gate, ...], Field(description="Failed checks to continue after")] = ()
    seed: int = 0


class AnswerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many answers are trained on: prompts = trained + the sum of left_out."""

    prompts: int
    """The number of prompts that were selected for training."""
    trained: int
    left_out: dict[OwnText, int]
    doubtful: int | None = None
    """The number of answers that contradict those to similar texts; None if answers were not
    compared, because neither they nor their fields are from a small set."""
    are_labels: bool = False
    """Whether the answers, or their patterns, are from a small set."""
    reworded: int = 0
    """The number of additional rows, whose texts the teacher has reworded."""
    corrected: int = 0
    """The number of doubtful answers that were replaced when the teacher was asked again."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The accuracy of a model on one set of held-out prompts."""

    name: OwnText
    prompts: OwnText
    accuracy: Estimate
    run_id: str | None = None
    """The evaluation run; None for a figure without one, e.g. of always giving one answer."""


class StageRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that the recipe started, or reused from an earlier call."""

    stage: str
    run_id: str
    seconds: float
    usd: float


class RecipeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a recipe: the student, what it is worth, and what it cost."""

    training_run: str
    folder: str
    """The exported student."""
    gguf: str | None
    """The GGUF file of the student; None if it could not be written."""
    report: str
    system: OthersText | None
    """The system message that the student needs: "" for none, None for that of each prompt."""
    gain: Estimate
    """The student's accuracy on test prompts minus the untrained model's, with or without examples,
    whichever is higher; with its 95 % interval, paired by prompt."""
    gain_over: OwnText | None = None
    """The untrained model that the gain is measured against, named as in `accuracy`; None in
    results of earlier versions."""
    above_teacher: Estimate | None = None
    """The student's accuracy minus the teacher's on the validation prompts, paired. The student
    was chosen by them, which favours it a little; the teacher may say more than the answer alone,
    which favours the teacher. None if the teacher was not, or hardly, evaluated, or if answers of
    its own counted as right."""
    accuracy: list[Measured]
    answers: AnswerCounts
    spent_usd: float
    """What the teacher has billed, or may still bill, over all calls."""
    minutes: float
    stages: list[StageRun]
    caveats: list[OwnText]
    """Notes for the user on what the figures do not show and on skipped steps."""
    problems: list[OthersText] = []
    """The messages of the errors that made the recipe skip a step."""
