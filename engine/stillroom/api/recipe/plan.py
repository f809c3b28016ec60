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
from stillroom.models.chat_template import template_source
from stillroom.models.resolve import ModelLocation, check_available, locate_model
from stillroom.recipe.answers import label_set, usual_spellings
from stillroom.recipe.inputs import LoadedPrompts, RecipePrompt, read_prompts
from stillroom.recipe.request import RunRecipe
from stillroom.rollout.request import NO_FILE, GenerateRollouts
from stillroom.settings import Workspace
from stillroom.teachers.providers import Endpoint

_MIN_LABEL_TEXTS = 3


@dataclass(frozen=True, slots=True)
class RecipePlan:
    """A checked request, with the options that all of its rollouts share."""

    request: RunRecipe
    folder: Path
    teacher: GenerateRollouts
    """The options of the teacher's rollouts; each stage sets the prompts and the output. The
    student has the same options for tools and turns."""
    rewards: str
    """The project's rewards.py; `none` without one."""
    teacher_location: Endpoint | ModelLocation | None
    """Where the teacher is; None if the input's answers are used in place of a teacher."""
    inputs: list[Path]
    prompts: list[RecipePrompt]
    labelled: list[RecipePrompt]
    label_column: str | None
    """The column that the answers of `labelled` are from; None if that is not a table."""
    notes: list[str]
    """Notes for the user on the rows that were read."""
    are_logs: bool
    """Whether the input has conversations with answers."""
    has_answers: bool
    """Whether a stage imports the input's answers. `prompts` are then those of a table or prompts
    file, with right answers; empty if the input has conversations."""
    logged_file: Path | None = None
    """The rollouts with the input's answers, one for each prompt, once they are imported."""

    @property
    def locked_path(self) -> Path:
        """The path that a run of the recipe locks, so that there is one run at a time."""
        return self.folder / "recipe"

    @property
    def right_answers(self) -> list[tuple[str, str]]:
        """The texts with known right answers; those of logs only if no labelled texts are given."""
        from_input = [] if self.are_logs and self.labelled else self.prompts
        prompts = (*self.labelled, *from_input)
        return [(prompt.text, prompt.answer) for prompt in prompts if prompt.answer is not None]

    @property
    def key_names(self) -> list[str | None]:
        """The environment variables with the keys that the stages need."""
        location = self.teacher_location
        return [location.api_key_env if isinstance(location, Endpoint) else None]

    @property
    def teacher_options(self) -> dict[str, Any]:
        """The options of the teacher's rollouts, as fields of a request."""
        return self.teacher.model_dump(exclude={"input", "output"}, exclude_unset=True)


def plan_recipe(workspace: Workspace, request: RunRecipe) -> RecipePlan:
    """Returns the validated plan. Raises EngineError for any problem found in advance."""
    source = workspace.existing(request.input, label="input")
    folder = workspace.writable(request.output, label="output")
    if folder.is_file():
        raise InputError(f"output {request.output!r} is a file", "give the name of a folder")
    check_available(locate_model(workspace, request.student))
    template_source(workspace, request.chat_template)
    endpoint_options = {
        name: value
        for name in ("provider", "base_url", "api_key_env")
        if (value := getattr(request, name)) is not None
    }
    # An output of its own, so that the settings of an existing output do not apply.
    output = workspace.shown(folder / "teacher.jsonl")
    model = request.teacher or request.student
    base = GenerateRollouts(input=request.input, output=output, model=model, **endpoint_options)
    teacher = complete_rollouts(workspace, base).request
    location = teacher.locate(workspace) if request.teacher is not None else None
    if location is not None and is_paid(location) and request.budget_usd is None:
        raise InputError(
            f"the teacher {request.teacher!r} may be billed, and budget_usd is not set",
            "set budget_usd to the most that you will pay, in US dollars",
        )
    if location is not None:
        teacher.price(workspace, is_needed=request.budget_usd is not None)
    evaluation = EvaluateModel(data=request.input, model=request.student, provider="hf")
    rewards = complete_evaluation(workspace, evaluation).request.rewards
    are_logs = has_answers(workspace, request.input)
    is_answered = are_logs or request.teacher is None
    _check_no_teacher_options(workspace, request, folder, is_answered=is_answered)
    read, labelled = LoadedPrompts(), LoadedPrompts()
    if not are_logs:
        read = _read_texts(source, request, rewards)
    files = list(input_files(workspace, [request.input])) if are_logs else [source]
    if request.labelled is not None:
        files.append(workspace.existing(request.labelled, label="labelled"))
        is_labelled = rewards == NO_FILE
        labelled = read_prompts(files[-1], system=request.system, is_labelled=is_labelled)
    if rewards == NO_FILE:
        _parse_json_answers(labelled)
    notes = [*read.notes, *labelled.notes, *_unify_spellings(read, labelled)]
    return RecipePlan(
        request=request,
        folder=folder,
        teacher=teacher,
        rewards=rewards,
        teacher_location=location,
        inputs=files,
        prompts=read.prompts,
        labelled=labelled.prompts,
        label_column=labelled.answer_column,
        notes=notes,
        are_logs=are_logs,
        has_answers=is_answered,
    )


def _check_no_teacher_options(
    workspace: Workspace, request: RunRecipe, folder: Path, *, is_answered: bool
) -> None:
    """Raises InputError for options that do not apply to an input with answers."""
    if not is_answered:
        return
    if request.system is not None:
        raise InputError(
            "system is the teacher's system message, but the answers come from the input",
            "leave system out, or name a teacher for texts without answers",
        )
    if folder.is_relative_to(workspace.path(request.input)):
        raise InputError(
            f"output {request.output!r} is inside input {request.input!r}, which is read whole",
            "choose an output outside the input, or an input folder with only the logs",
        )


def _read_texts(source: Path, request: RunRecipe, rewards: str) -> LoadedPrompts:
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
        _parse_json_answers(read)
    if (
        other := next((prompt for prompt in read.prompts if prompt.answer is None), None)
    ) is not None:
        raise InputError(
            f"the right answer of {other.text[:80]!r} is not a text, so it cannot be trained on",
            "name a teacher, and judge its answers with a rewards.py",
        )
    return read


def _parse_json_answers(read: LoadedPrompts) -> None:
    """Parses right answers that are JSON objects, so that they are compared field by field."""
    read.prompts = [prompt.with_object() for prompt in read.prompts]


def _unify_spellings(trained: LoadedPrompts, measured: LoadedPrompts) -> Iterator[str]:
    """Gives each label its commonest spelling in both files; yields notes, also on rare labels."""
    files = (trained, measured)
    answers = [
        prompt.answer for file in files for prompt in file.prompts if prompt.answer is not None
    ]
    usual = usual_spellings(answers)
    if usual:
        counts = Counter(answers)
        first = max(usual, key=lambda answer: (counts[answer], answer))
        yield (
            f"{sum(counts[answer] for answer in usual)} labels were respelt to their commonest "
            f"spelling, such as {fences.safe_name(first)!r} to {fences.safe_name(usual[first])!r}"
        )
    for file in files:
        file.prompts = [
            prompt if prompt.answer not in usual else prompt.with_answer(usual[prompt.answer])
            for prompt in file.prompts
        ]
    unified = [prompt.answer for prompt in trained.prompts if prompt.answer is not None]
    if label_set(unified) is not None:
        rare = [label for label, count in Counter(unified).items() if count < _MIN_LABEL_TEXTS]
        if rare:
            yield (
                f"{len(rare)} labels have fewer than {_MIN_LABEL_TEXTS} texts, too few to learn, "
                f"such as {fences.safe_name(rare[0])!r}: check the spelling"
            )
