"""A recipe: from prompts and a teacher to a trained, measured and exported student, in one run.

Each stage is an operation that an agent could call by itself. In order: split the data by form;
measure the teacher and the untrained student; ask the teacher, check its answers, train, measure;
the same once more with all prompts; distil on-policy if the teacher is a local model; measure the
student that did best; export it; write the report.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.api.recipe import baselines, measuring, teaching, training
from stillroom.api.recipe.baselines import (
    limit_eval_prompts,
    measure_teacher,
    measure_untrained,
    with_more_test_prompts,
)
from stillroom.api.recipe.logged import IMPORT, SCORE, commonest_system, with_logged_answers
from stillroom.api.recipe.measuring import (
    measure_chosen_student,
    with_right_answers,
)
from stillroom.api.recipe.plan import RecipePlan, plan_recipe
from stillroom.api.recipe.rewording import can_reword
from stillroom.api.recipe.session import RecipeSession
from stillroom.api.recipe.stages import RecipeLimits, Stages
from stillroom.api.recipe.teaching import TaughtRows, Teaching
from stillroom.api.recipe.training import TrainedStudent, Trainer
from stillroom.api.reports import write_report
from stillroom.errors import DataError, EngineError
from stillroom.export.request import ExportModel
from stillroom.export.verify_plan import has_llama_server
from stillroom.lineage import now
from stillroom.models.resolve import ModelLocation
from stillroom.outputs import output_lock
from stillroom.recipe.files import RecipeFiles
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import AnswerCounts, RecipeResult, RunRecipe
from stillroom.recipe.splits import PromptSplit, split
from stillroom.report.outcome import RecipeOutcome, RunningRecipe
from stillroom.report.request import WriteReport
from stillroom.reporting import Reporter
from stillroom.rollout.request import NO_FILE
from stillroom.run_folder import RunRequest, all_runs
from stillroom.settings import Workspace
from stillroom.types import RunKind

_EXPORT, _GGUF = "export model", "write GGUF"
_TITLES = (
    IMPORT, SCORE, measuring.REFERENCE, baselines.TEACHER, baselines.SPEED, baselines.UNTRAINED,
    baselines.EXAMPLES, teaching.ASK, teaching.AGAIN, teaching.SELECT, training.PLAN,
    training.TRAIN, training.MEASURE[training.TRAIN],
    teaching.ASK_REST, teaching.AGAIN_REST, teaching.SELECT_REST, teaching.REWORD_MORE,
    training.TRAIN_ALL, training.MEASURE[training.TRAIN_ALL],
    training.DISTIL, training.MEASURE[training.DISTIL],
    measuring.AFTER, measuring.REWORD, measuring.REWORDED, _EXPORT, _GGUF,
)  # fmt: skip
_GOOD_ENOUGH_ACCURACY = 0.99
_FIRST_BUDGET, _REST_BUDGET = 0.5, 0.8
_MIN_USD_SHARE, _MOST = 0.05, 0.5
_SYSTEM_FILE = "system.txt"
_NUM_VERIFIED = 20
"""The number of prompts on which the GGUF file is compared with the trained student."""


def make_student(
    workspace: Workspace, request: RunRecipe, *, folder: Path, reporter: Reporter
) -> RecipeResult:
    """Runs all stages of a recipe and returns the result.

    Raises RunError if the recipe must stop for a decision, and EngineError if a stage fails.
    `folder` is the run's own; the recipe's files are in the folder that the request names.
    """
    plan = plan_recipe(workspace, request)
    files = RecipeFiles(plan.folder)
    with output_lock(plan.locked_path, "run_recipe", run_id=folder.name):
        return _run_stages(workspace, plan, files, reporter, run_id=folder.name)


def _run_stages(
    workspace: Workspace, plan: RecipePlan, files: RecipeFiles, reporter: Reporter, *, run_id: str
) -> RecipeResult:
    request = plan.request
    limits = RecipeLimits(plan.folder, request.minutes, since=_same_limits_since(workspace, plan))
    stages = Stages(workspace, reporter, _TITLES, limits)
    if plan.has_answers:
        plan = with_logged_answers(workspace, plan, stages, files)
    session = RecipeSession(workspace, plan, stages, files)
    session.choose_chat_template()
    session.max_tokens = plan.teacher.max_tokens
    session.caveats += plan.notes
    session.caveats += [
        f"the cost of {run_id} is unknown, as its run.json is damaged, so its full budget_usd is "
        "counted as spent"
        for run_id in stages.unreadable
    ]
    parts = split(plan.prompts, plan.labelled, seed=request.seed)
    parts = with_right_answers(session, parts)
    _note_forms(session, parts)
    system = system_to_send(session)
    validation = session.files.write_prompts(measuring.VALIDATION, parts.validation)
    teacher = measure_teacher(session, parts, validation)
    if (fewer := limit_eval_prompts(session, parts, teacher)) is not parts:
        parts = fewer
        validation = session.files.write_prompts(measuring.VALIDATION_PART, parts.validation)
    test = session.files.write_prompts(measuring.TEST, parts.test)
    untrained = measure_untrained(session, parts, test, teacher)
    taught, student = _teach(session, parts, validation)
    note_unanswered(session, parts, taught.counts)
    if taught.counts.doubtful is None and session.plan.rewards == NO_FILE:
        session.caveats.append(
            "the teacher's mistakes are trained on: its answers cannot be compared with those to "
            "similar texts, and no rewards.py judges them"
        )
    if taught.counts.doubtful is not None:
        session.files.write_rows(teaching.DOUBTFUL, taught.doubtful)
    if taught.counts.doubtful:
        session.caveats.append(
            f"{taught.counts.doubtful} answers contradict those to similar texts: they are listed "
            f"in {session.shown_path(f'{teaching.DOUBTFUL}.jsonl')}"
        )
    if (more := with_more_test_prompts(session, student.run_id, parts)) is not parts:
        parts, test = more, session.files.write_prompts(measuring.TEST_STUDENT, more.test)
    gain = measure_chosen_student(
        session, student.run_id, untrained, parts, test, train_file=taught.train_file
    )
    above_teacher = None
    if teacher is not None and not session.is_teacher_right:
        above_teacher = measuring.above_teacher(session, teacher, student.evaluation)
    folder, gguf = _export(session, student)
    page = WriteReport(output=session.shown_path("report.html"))
    result = RecipeResult(
        training_run=student.run_id,
        folder=folder,
        gguf=gguf,
        report=page.output,
        system=system,
        gain=gain,
        gain_over=untrained.name,
        above_teacher=above_teacher,
        accuracy=session.measured,
        answers=taught.counts,
        spent_usd=round(stages.spent_usd, 6),
        minutes=round(stages.elapsed_s / 60, 1),
        stages=stages.done,
        caveats=session.caveats,
        problems=session.problems,
    )
    outcome = msgspec.convert(result, RecipeOutcome, from_attributes=True)
    write_report(workspace, page, recipe=RunningRecipe(run_id, outcome))
    return result


def note_unanswered(session: RecipeSession, parts: PromptSplit, counts: AnswerCounts) -> None:
    """Adds a caveat on the texts that the teacher has not answered, if there are any."""
    if num_unanswered := counts.left_out.get(teaching.NO_ANSWER):
        session.caveats.append(
            f"{num_unanswered} of the {counts.prompts - parts.num_overlapping} texts to train on "
            "have no answer from the teacher: budget_usd or minutes ran out, or its calls failed"
        )


def _same_limits_since(workspace: Workspace, plan: RecipePlan) -> str:
    """Returns when a recipe in this folder first had at least this recipe's budget and minutes."""

    def is_enough(recorded: RunRequest) -> bool:
        pairs = [
            (recorded.request.get(name), getattr(plan.request, name))
            for name in ("budget_usd", "minutes")
        ]
        return all(old is None or (new is not None and old >= new) for old, new in pairs)

    times: list[str] = []
    for folder in all_runs(workspace):
        recorded = folder.try_read_request()
        if recorded is None or recorded.kind is not RunKind.RECIPE:
            continue
        is_here = workspace.path(str(recorded.request.get("output"))) == plan.folder
        if is_here and is_enough(recorded):
            # A recipe whose run.json is damaged is ignored.
            with suppress(DataError, OSError):
                times.append(folder.read().created_at)
    return min(times, default=now())


def _teach(
    session: RecipeSession, parts: PromptSplit, validation: Path
) -> tuple[TaughtRows, TrainedStudent]:
    """Asks the teacher, trains and measures until another round would not help.

    Returns the rows of the last training, and the student that did best.
    """
    teacher, trainer = Teaching(session, parts), Trainer(session, parts, validation)
    asked_at = time.monotonic()
    taught = teacher.ask(1, parts.first_round, budget_share=_FIRST_BUDGET)
    asked_s, others = time.monotonic() - asked_at, [*parts.of_new_forms, *parts.second_round]
    second_round = _second_round_prompts(session, parts)
    trainer.plan(taught)
    num_rows = taught.num_rows * (1 + len(others) / len(parts.first_round))
    if others and trainer.can_train_only_once(num_rows):
        taught = teacher.ask(2, others, budget_share=_REST_BUDGET)
        students = [trainer.train_once(taught)]
    else:
        asking_s = asked_s * len(second_round) / len(parts.first_round)
        students = [trainer.train_first(taught, asking_s=asking_s)]
        if _may_ask_more(session, parts, students[0]):
            more = _ask_more(session, teacher, parts, second_round, taught)
            if (
                more.num_rows > taught.num_rows
                and (student := trainer.train_all(students[0], more)) is not None
            ):
                taught, students = more, [*students, student]
    if isinstance(session.plan.teacher_location, ModelLocation):
        student = trainer.distil(students[-1])
        students += [student] if student is not None else []
    # Of equally good students, the one that was trained on most.
    return taught, max(reversed(students), key=lambda student: student.accuracy)


def _ask_more(
    session: RecipeSession,
    teacher: Teaching,
    parts: PromptSplit,
    second_round: Sequence[RecipePrompt],
    taught: TaughtRows,
) -> TaughtRows:
    """Asks the teacher the second round, and for rewordings; returns all rows to train on."""
    more = teacher.ask(2, second_round, budget_share=_REST_BUDGET) if second_round else taught
    more = teacher.with_rewordings(more)
    if num_left := len(parts.second_round) + len(parts.of_new_forms) - len(second_round):
        session.caveats.append(
            f"{num_left} texts of known templates were not sent to the teacher: what was left "
            f"of the budget went to {more.counts.reworded} rewordings"
        )
    return more


def _second_round_prompts(session: RecipeSession, parts: PromptSplit) -> list[RecipePrompt]:
    """Returns the prompts for the teacher's second round.

    Of texts made from templates, only those of new templates: for the same money, rewordings teach
    more than further texts of known templates.
    """
    second_round = [*parts.of_new_forms, *parts.second_round]
    if session.plan.logged_file is not None:
        return second_round
    can_add_rewordings = session.form is not None and not session.has_tools
    if not (can_add_rewordings and parts.are_templated and can_reword(session, second_round)):
        return second_round
    return parts.of_new_forms


def _may_ask_more(session: RecipeSession, parts: PromptSplit, student: TrainedStudent) -> bool:
    """Returns whether there are more prompts, money to ask about them, and something to gain."""
    # Accuracy on texts of known templates says little about other texts.
    if student.accuracy >= _GOOD_ENOUGH_ACCURACY and not parts.are_templated:
        session.caveats.append(
            "training stopped after the first round of teacher answers: the student was already "
            f"right on {student.accuracy:.0%} of {len(parts.validation)} validation prompts"
        )
        return False
    left, budget = session.remaining_usd, session.request.budget_usd
    is_free = session.plan.logged_file is not None
    if not is_free and left is not None and budget is not None and left < _MIN_USD_SHARE * budget:
        session.caveats.append("not enough budget left to ask about more prompts")
        return False
    return True


def _note_forms(session: RecipeSession, parts: PromptSplit) -> None:
    if parts.are_templated:
        session.caveats.append(
            f"{parts.num_texts} texts fall into {parts.num_forms} groups of similar wording "
            "(templates), so test prompts resemble training prompts: it may be right less often on "
            "texts in other words (see the accuracy on reworded prompts and on templates that were "
            "not trained on, if they were measured)"
        )


def system_to_send(session: RecipeSession) -> str | None:
    """Returns the system message that the student needs; a caveat says so if it is the prompts'.

    "" for none, None if most prompts have a message of their own.
    """
    if (system := session.student_system) is not None:
        return system
    system, share = commonest_system(session.plan.prompts)
    if share < _MOST:
        return None
    if not system:
        return ""
    session.files.write_text(_SYSTEM_FILE, system)
    whose = "" if share == 1 else f", which {share:.0%} of the input's prompts have"
    session.caveats.append(
        f"the student is trained and measured with the system message in `system`{whose}: send it "
        f"with each text, word for word as in {session.shown_path(_SYSTEM_FILE)}; without it the "
        "accuracy was not measured, and may be far lower"
    )
    return system


def _export(session: RecipeSession, student: TrainedStudent) -> tuple[str, str | None]:
    """Exports the student; returns the folder, and the GGUF file if it can be written."""
    request = ExportModel(model=student.run_id, output=session.shown_path("model"))
    session.stages.run(_EXPORT, "export_model", request)
    gguf = ExportModel(
        model=student.run_id,
        output=session.shown_path("gguf"),
        format="gguf",
        precision="q8_0",
        verify=_NUM_VERIFIED if has_llama_server() else None,
    )
    try:
        session.stages.run(_GGUF, "export_model", gguf)
    except EngineError as error:
        session.note_failure("no GGUF file was written", error.problem)
        return session.shown_path("model"), None
    written = next((session.files.folder / "gguf").glob("*.gguf"), None)
    return session.shown_path("model"), session.workspace.shown(written) if written else None
