"""Checks a recipe's request, and looks up what its stages share, before anything is spent."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom import fences
from stillroom.api.prompts_folder import complete_evaluation, complete_rollouts
from stillroom.api.spending import is_paid
from stillroom.curate.sources import has_answers
from stillroom.errors import DataError, InputError
from stillroom.evaluate.request import EvaluateModel
from stillroom.importing.input_files import input_files
from stillroom.models.resolve import ModelLocation, check_available, locate_model
from stillroom.recipe.answers import label_set, usual_spellings
from stillroom.recipe.inputs import PromptsRead, RecipePrompt, read_prompts
from stillroom.recipe.request import RunRecipe
from stillroom.rollout.request import NO_FILE, GenerateRollouts
from stillroom.settings import Workspace
from stillroom.teachers.providers import Endpoint

_MIN_OF_A_LABEL = 3


@dataclass(frozen=True, slots=True)
class RecipePlan:
    """A checked request, with the options that all of its rollouts share."""

    request: RunRecipe
    folder: Path
    teacher: GenerateRollouts
    """How the teacher answers: a request without its prompts and output. Without a teacher its
    options for tools and turns are the student's alone."""
    rewards: str
    """The project's rewards.py; `none` without one."""
    teacher_at: Endpoint | ModelLocation | None
    """None if there is no teacher, only the input's answers."""
    inputs: list[Path]
    prompts: list[RecipePrompt]
    labelled: list[RecipePrompt]
    notes: list[str]
    """What the user should know of the rows that were read."""
    are_logs: bool
    """Whether the input has conversations with answers."""
    has_answers: bool
    """Whether the input has answers, which a stage imports. `prompts` are then those of a table or
    a prompts file, with right answers; none of conversations."""
    logged: Path | None = None
    """The rollouts with the input's answers, one for each prompt, once they are imported."""

    @property
    def lock_name(self) -> Path:
        """The name whose lock a run of the recipe holds, so that there is one run at a time."""
        return self.folder / "recipe"

    @property
    def given_answers(self) -> list[tuple[str, str]]:
        """All texts whose right answers are known; the input's only where no labels are given."""
        own = [] if self.are_logs and self.labelled else self.prompts
        every = (*self.labelled, *own)
        return [(prompt.text, prompt.answer) for prompt in every if prompt.answer is not None]

    @property
    def key_names(self) -> list[str | None]:
        """The environment variables with the keys that the stages need."""
        return [self.teacher_at.api_key_env if isinstance(self.teacher_at, Endpoint) else None]

    @property
    def teacher_options(self) -> dict[str, Any]:
        """The options of the teacher's rollouts, as fields of a request."""
        return self.teacher.model_dump(exclude={"input", "output"}, exclude_unset=True)


def plan_recipe(workspace: Workspace, request: RunRecipe) -> RecipePlan:
    """Returns the plan. Raises EngineError for all that can be found wrong before the run."""
    source = workspace.existing(request.input, label="input")
    folder = workspace.writable(request.output, label="output")
    if folder.is_file():
        raise InputError(f"output {request.output!r} is a file", "give the name of a folder")
    check_available(locate_model(workspace, request.student))
    given = {
        name: value
        for name in ("provider", "base_url", "api_key_env")
        if (value := getattr(request, name)) is not None
    }
    # Its own output, so that no other one's settings are taken over.
    output = workspace.shown(folder / "teacher.jsonl")
    model = request.teacher or request.student
    unplaced = GenerateRollouts(input=request.input, output=output, model=model, **given)
    teacher = complete_rollouts(workspace, unplaced).request
    place = teacher.locate(workspace) if request.teacher is not None else None
    if place is not None and is_paid(place) and request.budget_usd is None:
        raise InputError(
            f"the teacher {request.teacher!r} may be billed, and budget_usd is not set",
            "set budget_usd to the most to pay, in US dollars",
        )
    if place is not None:
        teacher.price(workspace, is_needed=request.budget_usd is not None)
    evaluation = EvaluateModel(data=request.input, model=request.student, provider="hf")
    rewards = complete_evaluation(workspace, evaluation).request.rewards
    are_logs = has_answers(workspace, request.input)
    is_answered = are_logs or request.teacher is None
    _check_answered(workspace, request, folder, is_answered=is_answered)
    read, labelled = PromptsRead(), PromptsRead()
    if not are_logs:
        read = _read_texts(source, request, rewards)
    files = list(input_files(workspace, [request.input])) if are_logs else [source]
    if request.labelled is not None:
        files.append(workspace.existing(request.labelled, label="labelled"))
        is_labelled = rewards == NO_FILE
        labelled = read_prompts(files[-1], system=request.system, is_labelled=is_labelled)
    if rewards == NO_FILE:
        _read_objects(labelled)
    notes = [*read.notes, *labelled.notes, *_unify_spellings(read, labelled)]
    return RecipePlan(
        request=request,
        folder=folder,
        teacher=teacher,
        rewards=rewards,
        teacher_at=place,
        inputs=files,
        prompts=read.prompts,
        labelled=labelled.prompts,
        notes=notes,
        are_logs=are_logs,
        has_answers=is_answered,
    )


def _check_answered(
    workspace: Workspace, request: RunRecipe, folder: Path, *, is_answered: bool
) -> None:
    """Raises InputError for options that an input with answers cannot have."""
    if not is_answered:
        return
    if request.system is not None:
        raise InputError(
            "system is the teacher's message, and the answers are the input's own",
            "leave system out, or name a teacher for texts without answers",
        )
    if folder.is_relative_to(workspace.path(request.input)):
        raise InputError(
            f"output {request.output!r} is inside input {request.input!r}, all of which is read",
            "give a folder with the logs alone, or another output",
        )


def _read_texts(source: Path, request: RunRecipe, rewards: str) -> PromptsRead:
    """Returns the texts of a table or a prompts file; without a teacher, each with its answer."""
    if request.teacher is not None:
        return read_prompts(source, system=request.system)
    try:
        read = read_prompts(source, system=None, is_labelled=True)
    except DataError as error:
        raise InputError(
            f"teacher is not given, and not every text has an answer: {error.problem}",
            f"name a teacher, or {error.fix}",
        ) from error
    if rewards == NO_FILE:
        _read_objects(read)
    if (other := next((one for one in read.prompts if one.answer is None), None)) is not None:
        raise InputError(
            f"the right answer of {other.text[:80]!r} is not a text, so it cannot be trained on",
            "name a teacher, whose answers a rewards.py judges",
        )
    return read


def _read_objects(read: PromptsRead) -> None:
    """Makes objects of right answers that are JSON, so that their parts are compared."""
    read.prompts = [prompt.with_object() for prompt in read.prompts]


def _unify_spellings(trained: PromptsRead, measured: PromptsRead) -> Iterator[str]:
    """Gives each label its commonest spelling in both files; yields notes, also on rare labels."""
    files = (trained, measured)
    answers = [one.answer for file in files for one in file.prompts if one.answer is not None]
    usual = usual_spellings(answers)
    if usual:
        counts = Counter(answers)
        first = max(usual, key=lambda answer: (counts[answer], answer))
        yield (
            f"{sum(counts[answer] for answer in usual)} labels were respelt to their commonest "
            f"spelling, such as {fences.name(first)!r} to {fences.name(usual[first])!r}"
        )
    for file in files:
        file.prompts = [
            one if one.answer not in usual else one.with_answer(usual[one.answer])
            for one in file.prompts
        ]
    unified = [one.answer for one in trained.prompts if one.answer is not None]
    if label_set(unified) is not None:
        rare = [label for label, count in Counter(unified).items() if count < _MIN_OF_A_LABEL]
        if rare:
            yield (
                f"{len(rare)} labels have fewer than {_MIN_OF_A_LABEL} texts, too few to learn, "
                f"such as {fences.name(rare[0])!r}: misspelt?"
            )
