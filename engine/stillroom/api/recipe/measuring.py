"""The stages of a recipe that measure students, and the right answers to measure them with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from stillroom import fences
from stillroom.api.evaluations import read_evaluation
from stillroom.api.recipe.rewording import (
    can_reword,
    final_answers,
    have_one_message,
    reworded_by_teacher,
    with_text,
    without_trained,
)
from stillroom.api.recipe.session import PATTERN_FIELD, RecipeSession, ask_teacher
from stillroom.errors import RunError
from stillroom.evaluate.compare import compare, shared_scores
from stillroom.evaluate.files import EvaluationResult
from stillroom.evaluate.intervals import Estimate, excludes_zero, share_estimate
from stillroom.evaluate.request import EvaluateModel
from stillroom.lines import read_lines
from stillroom.recipe.answers import (
    ObjectAnswers,
    PatternAnswers,
    form_of,
    has_same_value,
    pattern_of,
)
from stillroom.recipe.forms import reword
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import Measured
from stillroom.recipe.splits import FORM_FIELD, NEW_FORM, PromptSplit
from stillroom.rollout.request import NO_FILE
from stillroom.run_folder import find_run

REFERENCE, REWORD, AFTER, REWORDED = (
    "reference answers",
    "reword prompts",
    "evaluate student",
    "evaluate reworded",
)
MAX_REWORDED, _MIN_REWORDED = 60, 10
CONCURRENCY = 16
"""The prompts that a student answers at a time."""
_LONGEST_LABEL = 80
MIN_EVAL_PROMPTS = 5
MEASURING_SHARE = 0.3
"""The largest share of the remaining time that an evaluation may take."""
_MIN_LIMIT_S, _TIME_FACTOR = 300.0, 3.0
"""The minimum time limit of a trained student's evaluation, and its multiple of the estimate."""
VALIDATION, VALIDATION_PART, TEST, TEST_EXAMPLES, TEST_STUDENT, _TEST_REWORDED = (
    "validation", "validation-part", "test", "test-examples", "test-student", "test-reworded"
)  # fmt: skip
PROMPTS = {
    VALIDATION: "validation prompts",
    VALIDATION_PART: "validation prompts",
    TEST: "test prompts",
    TEST_EXAMPLES: "test prompts",
    TEST_STUDENT: "test prompts",
    _TEST_REWORDED: "reworded test prompts",
}
"""How the result names each file's prompts; it leaves out evaluations on other files."""


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """The finished evaluation of a model: its run and result."""

    name: str
    run_id: str
    result: EvaluationResult


def with_right_answers(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with an answer to each evaluation prompt: a right one, else the teacher's.

    Raises RunError if students could not be evaluated.
    """
    if session.plan.rewards != NO_FILE:
        return parts
    return _with_patterns(session, _with_reference_answers(session, parts))


def _with_reference_answers(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with an answer to each evaluation prompt, and sets the session's form."""
    session.form = form_of(session.plan.right_answers)
    parts = _in_common_form(session, parts)
    eval_prompts = [*parts.validation, *parts.test]
    _check_not_free_text(session, eval_prompts)
    if session.plan.logged_file is not None and session.request.labelled is None:
        session.caveats.append(
            "the right answers are the input's own, so accuracy is agreement with them; pass "
            "labelled=<file> to measure accuracy"
        )
    unanswered = [prompt for prompt in eval_prompts if not prompt.is_answered]
    if not unanswered:
        return parts
    # The teacher is asked without the metadata that measuring adds.
    plain = {prompt.task_id: _without_form_field(prompt) for prompt in unanswered}
    if session.plan.logged_file is not None:
        session.caveats.append(
            f"{len(plain)} evaluation prompts have no right answer in the input, and are left out"
        )
        return _drop_unanswered(parts, {})
    files = ask_teacher(
        session, REFERENCE, "reference", list(plain.values()), temperature=0, budget_share=0.4
    )
    replies = final_answers(files)
    if session.form is None:
        texts = {prompt.task_id: prompt.text for prompt in plain.values()}
        # The files may also have answers to an earlier call's prompts.
        pairs = [(texts[task_id], reply) for task_id, reply in replies.items() if task_id in texts]
        short = [(text, reply) for text, reply in pairs if len(reply) <= _LONGEST_LABEL]
        session.form = form_of(pairs, are_bare=False) or form_of(short, are_bare=False)
    if (form := session.form) is None:
        raise RunError(
            "the student cannot be evaluated: there are no labels, and the teacher's answers are "
            "free text",
            "pass labelled=<file>, or put a rewards.py next to the prompts",
        )
    session.is_teacher_right = True
    answers = {
        task_id: form.named(replies.get(prompt.task_id, "")) for task_id, prompt in plain.items()
    }
    session.caveats.append(
        f"{len(answers)} evaluation prompts without a label got the teacher's answer as a label "
        f"({sum(answer is None for answer in answers.values())} without a usable answer are left "
        "out), so accuracy on them is agreement with the teacher; pass labelled=<file> to measure "
        "accuracy"
    )
    return _drop_unanswered(parts, answers)


def _in_common_form(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with right answers that are objects written in their common form."""
    form = session.form
    if not isinstance(form, ObjectAnswers):
        return parts
    named = {
        prompt.task_id: form.named(prompt.answer)
        for prompt in (*parts.validation, *parts.test)
        if prompt.answer is not None
    }
    if num_other := sum(answer is None for answer in named.values()):
        session.caveats.append(
            f"{num_other} right answers have other fields or values than the rest: left out of "
            "the evaluations"
        )

    def rewritten(prompts: Sequence[RecipePrompt]) -> list[RecipePrompt]:
        pairs = [(prompt, named.get(prompt.task_id, "")) for prompt in prompts]
        return [
            prompt if prompt.answer is None else prompt.with_answer(answer)
            for prompt, answer in pairs
            if answer is not None
        ]

    return replace(parts, validation=rewritten(parts.validation), test=rewritten(parts.test))


def _with_patterns(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with the pattern of each right answer as metadata of its prompt."""
    if not isinstance(session.form, PatternAnswers):
        return parts

    def marked(prompt: RecipePrompt) -> RecipePrompt:
        pattern = pattern_of(prompt.answer or "")
        metadata = {**(prompt.row.get("metadata") or {}), PATTERN_FIELD: pattern}
        return replace(prompt, row={**prompt.row, "metadata": metadata})

    validation, test = (
        [marked(prompt) for prompt in part] for part in (parts.validation, parts.test)
    )
    return replace(parts, validation=validation, test=test)


def _check_not_free_text(session: RecipeSession, eval_prompts: Sequence[RecipePrompt]) -> None:
    """Raises RunError if the input's answers are free text, which no student repeats exactly."""
    lengths = [len(prompt.answer) for prompt in eval_prompts if prompt.answer is not None]
    if session.plan.logged_file is None or session.form is not None or not lengths:
        return
    if median(lengths) > _LONGEST_LABEL:
        raise RunError(
            "the student cannot be evaluated: the input's answers are free text",
            "pass labelled=<file>, or put a rewards.py next to the input",
        )


def _drop_unanswered(parts: PromptSplit, answers: Mapping[str, str | None]) -> PromptSplit:
    """Returns the parts without evaluation prompts that neither have an answer nor get one.

    Raises RunError if too few prompts are left.
    """
    parts = replace(
        parts,
        validation=_with_answers(parts.validation, answers),
        test=_with_answers(parts.test, answers),
    )
    if len(parts.validation) < MIN_EVAL_PROMPTS or len(parts.test) < MIN_EVAL_PROMPTS:
        raise RunError(
            f"there are usable answers to {len(parts.validation)} validation and "
            f"{len(parts.test)} test prompts, and {MIN_EVAL_PROMPTS} each are needed",
            "pass labelled=<file>; if the teacher's answers are missing, try a clearer system or a "
            "larger budget_usd",
        )
    return parts


def _without_form_field(prompt: RecipePrompt) -> RecipePrompt:
    metadata = {**(prompt.row.get("metadata") or {})}
    metadata.pop(FORM_FIELD, None)
    return RecipePrompt({**prompt.row, "metadata": metadata}, prompt.text, prompt.answer)


def _with_answers(
    prompts: Sequence[RecipePrompt], answers: Mapping[str, str | None]
) -> list[RecipePrompt]:
    """Returns the prompts that have an answer, or get one of `answers`, which are by task id."""
    answered = list[RecipePrompt]()
    for prompt in prompts:
        if prompt.is_answered:
            answered.append(prompt)
        elif (answer := answers.get(prompt.task_id)) is not None:
            answered.append(prompt.with_answer(answer))
    return answered


def measure_validation(
    session: RecipeSession, title: str, name: str, run_id: str, validation: Path, *, is_first: bool
) -> ModelEvaluation:
    """Measures a student on the prompts that decide which student is kept.

    name: the student's name. is_first: whether the student was not trained on the held-out
    templates, whose accuracy is then also reported on its own.
    """
    system = session.student_system
    measured = evaluate(session, title, run_id, validation, name, system=system, by_form=is_first)
    forms = measured.result.by_group.get(FORM_FIELD, {})
    if NEW_FORM in forms:
        prompts = "validation prompts of templates that it was not trained on"
        session.add(
            Measured(name=name, prompts=prompts, accuracy=forms[NEW_FORM], run_id=measured.run_id)
        )
    return measured


def above_teacher(
    session: RecipeSession, teacher: ModelEvaluation, student: ModelEvaluation
) -> Estimate | None:
    """Returns a student's accuracy less its teacher's; None if they share too few prompts.

    A limit may have ended the teacher's evaluation after a few prompts.
    """
    baseline, candidate = (
        read_evaluation(session.workspace, evaluation.run_id) for evaluation in (teacher, student)
    )
    if len(shared_scores(baseline.tasks, candidate.tasks)) < MIN_EVAL_PROMPTS:
        return None
    return compare(baseline, candidate).difference


def measure_chosen_student(
    session: RecipeSession,
    run_id: str,
    before: ModelEvaluation,
    parts: PromptSplit,
    test: Path,
    *,
    train_file: Path,
) -> Estimate:
    """Measures the chosen student on test prompts, also reworded; returns the gain.

    train_file: the rows that it was trained on, with which no reworded prompt is shared.
    Raises RunError if the student has gained nothing (gate `gain`).
    """
    system = session.student_system
    after = evaluate(session, AFTER, run_id, test, "student", system=system)
    add_field_accuracies(session, after, parts)
    num_never = note_never_right(session, after)
    comparison = compare(
        *(read_evaluation(session.workspace, evaluation.run_id) for evaluation in (before, after))
    )
    gain = comparison.difference
    if not excludes_zero(gain) or gain.value < 0:
        session.stop_at(
            "gain",
            f"the student is right on {comparison.candidate_accuracy:.0%} of the test prompts, and "
            f"was on {comparison.baseline_accuracy:.0%} before training: no significant gain",
        )
    check_not_one_answer(session, after.result, num_never=num_never)
    left = session.stages.remaining_s
    if left is not None and left < MAX_REWORDED * session.prompt_s:
        session.caveats.append("there was no time to measure accuracy on reworded prompts")
    elif reworded := _reworded(session, parts, train_file):
        prompts = session.files.write_prompts(_TEST_REWORDED, reworded)
        evaluate(session, REWORDED, run_id, prompts, "student", system=system)
    return gain


def note_never_right(session: RecipeSession, after: ModelEvaluation) -> int:
    """Returns how many test prompts have answers that a student never gets right; adds a caveat."""
    never = {
        name: accuracy.n
        for name, accuracy in after.result.by_group.get(session.answer_field or "", {}).items()
        if accuracy.n >= MIN_EVAL_PROMPTS and not accuracy.value
    }
    num_never = sum(never.values())
    if never:
        caveat = (
            f"the student is right on none of the {num_never} (of {after.result.accuracy.n}) test "
            f"prompts with these answers: {', '.join(map(fences.safe_name, never))}; by_group of "
            f"{after.run_id} has all answers"
        )
        session.caveats.append(caveat)
        session.stages.note(caveat)
    return num_never


def check_not_one_answer(
    session: RecipeSession, result: EvaluationResult, *, num_never: int
) -> None:
    """Raises RunError (gate `gain`) if a student may have learnt to give only one answer.

    This is assumed if it is never right on most test prompts (num_never), or right no more often
    than if it always gave the commonest answer.
    """
    accuracy, commonest = result.accuracy, result.commonest_answer
    if 2 * num_never > accuracy.n:
        session.stop_at(
            "gain",
            f"the student never gives the right answer to {num_never} of {accuracy.n} test prompts",
        )
    # A reward may accept other answers, too.
    if commonest is None or session.plan.rewards != NO_FILE:
        return
    if accuracy.value <= commonest.value:
        session.stop_at(
            "gain",
            f"the student is right on {accuracy.value:.0%} of {accuracy.n} test prompts, and "
            f"always giving the commonest answer is right on {commonest.value:.0%}",
        )


def add_field_accuracies(
    session: RecipeSession, after: ModelEvaluation, parts: PromptSplit
) -> None:
    """Adds the accuracy in each field, if answers are objects."""
    form = session.form
    if not isinstance(form, ObjectAnswers):
        return
    outputs = final_answers([find_run(session.workspace, after.run_id).path / "rollouts.jsonl"])
    pairs = [
        (prompt.answer, outputs[prompt.task_id])
        for prompt in parts.test
        if prompt.answer is not None and prompt.task_id in outputs
    ]
    for field in form.fields if pairs else ():
        num_right = sum(has_same_value(output, field, expected=answer) for answer, output in pairs)
        session.add(
            Measured(
                name=f"student, field {fences.safe_name(field)}",
                prompts=PROMPTS[TEST],
                accuracy=share_estimate(num_right, len(pairs)),
                run_id=after.run_id,
            )
        )


def _reworded(session: RecipeSession, parts: PromptSplit, train_file: Path) -> list[RecipePrompt]:
    """Returns test prompts, reworded by the teacher, or by rules if it cannot.

    Returns none if the rules might change words that an answer must repeat, or if too few of the
    reworded texts are not in the training file.
    """
    chosen, rng = parts.test[:MAX_REWORDED], Random(session.request.seed)
    least, by_rules = min(_MIN_REWORDED, len(chosen)), list[RecipePrompt]()
    if can_reword(session, chosen):
        reworded = reworded_by_teacher(session, REWORD, "test-rewordings", chosen, budget_share=1)
        form = session.form
        usable = [
            prompt
            for prompt in reworded.prompts.values()
            if form is None or prompt.answer is None or form.is_grounded(prompt.answer, prompt.text)
        ]
        if len(usable := without_trained(usable, train_file)) >= least:
            return usable
    if session.has_labels and have_one_message(chosen):
        by_rules = [with_text(prompt, reword(prompt.text, rng)) for prompt in chosen]
    if len(by_rules := without_trained(by_rules, train_file)) < least:
        session.caveats.append("accuracy on reworded prompts was not measured")
        return []
    session.caveats.append(
        "prompts were reworded by rules (greetings, case, typing errors), a weaker test than "
        "texts by other people"
    )
    return by_rules


def evaluate(
    session: RecipeSession,
    title: str,
    model: str | None,
    data: Path,
    name: str,
    *,
    system: str | None = None,
    is_trained: bool = True,
    by_form: bool = False,
) -> ModelEvaluation:
    """Evaluates a local model, or the teacher (None), and adds the accuracy to the result.

    is_trained: whether a student must give the bare answer. The answers of the teacher and of the
    untrained student only need to contain it. by_form: whether to measure the accuracy on held-out
    templates separately.
    """
    options: dict[str, Any] = {
        **session.episode_options,
        "rewards": session.plan.rewards,
        "data": session.workspace.shown(data),
        "name": name,
    }
    if model is None:
        options |= session.plan.teacher_options | session.share_of_budget(0.2)
    else:
        options |= {
            "model": model,
            "provider": "hf",
            "concurrency": CONCURRENCY,
            "max_tokens": session.max_tokens if is_trained else max(64, session.max_tokens),
            "system": system,
        }
    if model == session.request.student:
        # Trained students have recorded the template that they were trained with.
        options["chat_template"] = session.chat_template
    is_exact = session.form is not None and model is not None and is_trained
    if by_form:
        options["group_by"] = (FORM_FIELD,)
    elif is_exact and session.answer_field is not None:
        options["group_by"] = (session.answer_field,)
    options["answer_match"] = "exact" if is_exact else "contained"
    request = EvaluateModel.model_validate(options)
    left = session.stages.remaining_s
    limit_s = None if left is None else max(60.0, MEASURING_SHARE * left)
    if limit_s is not None and model is not None and is_trained:
        # Training took time and money, so its evaluation may take some minutes more.
        num_prompts = sum(1 for _ in read_lines(data))
        limit_s = max(limit_s, _MIN_LIMIT_S, _TIME_FACTOR * num_prompts * session.prompt_s)
    run = session.stages.run(title, "evaluate_model", request, limit_s=limit_s)
    session.note_gaps(title, [run.result or {}])
    result = read_evaluation(session.workspace, run.run_id).result
    # An evaluation with examples takes longer, so it does not count.
    if model is not None and (is_trained or system is None):
        session.prompt_s = prompt_seconds(result)
    if (prompts := PROMPTS.get(data.stem)) is not None:
        accuracy = result.accuracy
        session.add(Measured(name=name, prompts=prompts, accuracy=accuracy, run_id=run.run_id))
    return ModelEvaluation(name, run.run_id, result)


def prompt_seconds(result: EvaluationResult) -> float:
    """Returns how long an evaluation took for a prompt, with loading the model, in seconds.

    If it reused answers, its own time is too short, so the time of the rollouts counts.
    """
    rollout_s = result.per_task.machine_seconds if result.per_task is not None else 0.0
    return max(result.seconds / max(1, result.accuracy.n), rollout_s)
