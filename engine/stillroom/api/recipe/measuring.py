"""The stages of a recipe that measure students, and the right answers to measure them with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from stillroom import fences
from stillroom.api.evaluations import CompareEvaluations, compare_evaluations
from stillroom.api.recipe.rewording import (
    can_reword,
    final_answers,
    in_words,
    is_single,
    reworded_by_teacher,
)
from stillroom.api.recipe.session import PATTERN_FIELD, RecipeSession, ask_teacher
from stillroom.errors import RunError
from stillroom.evaluate.compare import Comparison
from stillroom.evaluate.files import RESULT_FILE, Evaluation, EvaluationResult
from stillroom.evaluate.intervals import Estimate, excludes_zero, share_estimate
from stillroom.evaluate.request import EvaluateModel
from stillroom.files import read_json
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
_NUM_REWORDED, _MIN_REWORDED = 60, 10
_CONCURRENCY = 16
_LONGEST_LABEL = 80
MIN_EVAL_PROMPTS = 5
_MEASURING_SHARE = 0.3
"""The most of the time that is left which an evaluation may take."""
_MIN_LAST_S, _SLOWER = 300.0, 3.0
"""What a trained student's evaluation may always take, and how much longer than it seemed."""
VALIDATION, TEST, TEST_EXAMPLES, _TEST_REWORDED = (
    "validation", "test", "test-examples", "test-reworded"
)  # fmt: skip
PROMPTS = {
    VALIDATION: "validation prompts",
    TEST: "test prompts",
    TEST_EXAMPLES: "test prompts",
    _TEST_REWORDED: "reworded test prompts",
}
"""What the files of prompts to measure with are called in the result."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation: its run and result."""

    name: str
    run_id: str
    result: EvaluationResult


def answers_to_measure_with(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with right answers: where none were given, the teacher's.

    Raises RunError if nothing could judge a student.
    """
    if session.plan.rewards != NO_FILE:
        return parts
    return _with_patterns(session, _answered(session, parts))


def _answered(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with right answers to all prompts to measure with."""
    session.form = form_of(session.plan.given_answers)
    parts = _in_form(session, parts)
    eval_prompts = [*parts.validation, *parts.test]
    _check_short(session, eval_prompts)
    if session.plan.logged is not None and session.request.labelled is None:
        session.caveats.append(
            "the right answers are the input's own, so accuracy is agreement with them; pass "
            "labelled to measure accuracy"
        )
    unanswered = [one for one in eval_prompts if not one.is_answered]
    if not unanswered:
        return parts
    # The teacher's stage names the prompts without the marks that measuring adds.
    plain = {one.task_id: _unmarked(one) for one in unanswered}
    if session.plan.logged is not None:
        session.caveats.append(
            f"{len(plain)} prompts to evaluate with have no right answer in the input, and are "
            "left out"
        )
        return _with_enough(parts, {})
    files = ask_teacher(
        session, REFERENCE, "reference", list(plain.values()), temperature=0, budget_share=0.4
    )
    given = final_answers(files)
    if session.form is None:
        texts = {prompt.task_id: prompt.text for prompt in plain.values()}
        # The files may also have answers to an earlier call's prompts.
        said = [(texts[one], answer) for one, answer in given.items() if one in texts]
        short = [(text, answer) for text, answer in said if len(answer) <= _LONGEST_LABEL]
        session.form = form_of(said, are_bare=False) or form_of(short, are_bare=False)
    if (form := session.form) is None:
        raise RunError(
            "the student cannot be evaluated: there are no labels, and the teacher's answers are "
            "free text",
            "pass labelled, or put a rewards.py next to the prompts",
        )
    session.is_teacher_right = True
    answers = {
        task_id: form.named(given.get(prompt.task_id, "")) for task_id, prompt in plain.items()
    }
    session.caveats.append(
        f"{len(answers)} evaluation prompts without a label got the teacher's answer as one "
        f"({sum(answer is None for answer in answers.values())} without a usable answer are left "
        "out), so accuracy there is agreement with the teacher; pass labelled to measure accuracy"
    )
    return _with_enough(parts, answers)


def _in_form(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with right answers written in the form of all, if they are objects."""
    form = session.form
    if not isinstance(form, ObjectAnswers):
        return parts
    named = {
        one.task_id: form.named(one.answer)
        for one in (*parts.validation, *parts.test)
        if one.answer is not None
    }
    if num_other := sum(answer is None for answer in named.values()):
        session.caveats.append(
            f"{num_other} right answers have other fields or values than the others: left out of "
            "the evaluations"
        )

    def rewritten(prompts: Sequence[RecipePrompt]) -> list[RecipePrompt]:
        pairs = [(one, named.get(one.task_id, "")) for one in prompts]
        return [
            one if one.answer is None else one.with_answer(answer)
            for one, answer in pairs
            if answer is not None
        ]

    return replace(parts, validation=rewritten(parts.validation), test=rewritten(parts.test))


def _with_patterns(session: RecipeSession, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with prompts to measure with that say the pattern of their answer."""
    if not isinstance(session.form, PatternAnswers):
        return parts

    def marked(prompt: RecipePrompt) -> RecipePrompt:
        pattern = pattern_of(prompt.answer or "")
        metadata = {**(prompt.row.get("metadata") or {}), PATTERN_FIELD: pattern}
        return replace(prompt, row={**prompt.row, "metadata": metadata})

    validation, test = ([marked(one) for one in those] for those in (parts.validation, parts.test))
    return replace(parts, validation=validation, test=test)


def _check_short(session: RecipeSession, eval_prompts: Sequence[RecipePrompt]) -> None:
    """Raises RunError if the input's answers are free text, which no student repeats exactly."""
    lengths = [len(one.answer) for one in eval_prompts if one.answer is not None]
    if session.plan.logged is None or session.form is not None or not lengths:
        return
    if median(lengths) > _LONGEST_LABEL:
        raise RunError(
            "the student cannot be evaluated: the input's answers are free text",
            "pass labelled, or put a rewards.py next to the input",
        )


def _with_enough(parts: PromptSplit, answers: Mapping[str, str | None]) -> PromptSplit:
    """Returns the parts with the prompts to measure with that have an answer, or get one.

    Raises RunError if there are too few.
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
            "pass labelled; if the teacher's answers are missing, a clearer system or a larger "
            "budget_usd",
        )
    return parts


def _unmarked(prompt: RecipePrompt) -> RecipePrompt:
    metadata = {**(prompt.row.get("metadata") or {})}
    metadata.pop(FORM_FIELD, None)
    return RecipePrompt({**prompt.row, "metadata": metadata}, prompt.text, prompt.answer)


def _with_answers(
    prompts: Sequence[RecipePrompt], answers: Mapping[str, str | None]
) -> list[RecipePrompt]:
    """Returns the prompts that are answered, or get one of `answers` by the id of their task."""
    answered = list[RecipePrompt]()
    for prompt in prompts:
        if prompt.is_answered:
            answered.append(prompt)
        elif (answer := answers.get(prompt.task_id)) is not None:
            answered.append(prompt.with_answer(answer))
    return answered


def measure_validation(
    session: RecipeSession, title: str, name: str, run_id: str, validation: Path, *, is_first: bool
) -> Evaluated:
    """Measures a student on the prompts that decide which student is kept.

    name: the student's. is_first: whether held-out forms were not trained; their accuracy is then
    a figure of its own.
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


def difference(session: RecipeSession, before: Evaluated, after: Evaluated) -> Comparison:
    """Compares two evaluations on the same prompts."""
    request = CompareEvaluations(baseline=before.run_id, candidates=(after.run_id,))
    [comparison] = compare_evaluations(session.workspace, request).comparisons
    return comparison


def measure_after(
    session: RecipeSession, run_id: str, before: Evaluated, parts: PromptSplit, test: Path
) -> Estimate:
    """Measures the chosen student on test prompts, also reworded; returns the gain.

    Raises RunError if the student has gained nothing (gate `gain`).
    """
    system = session.student_system
    after = evaluate(session, AFTER, run_id, test, "student", system=system)
    add_field_accuracies(session, after, parts)
    num_never = note_never_right(session, after)
    comparison = difference(session, before, after)
    gain = comparison.difference
    if not excludes_zero(gain) or gain.value < 0:
        session.stop_at(
            "gain",
            f"the student is right on {comparison.candidate_accuracy:.0%} of the test prompts, and "
            f"was on {comparison.baseline_accuracy:.0%} before training: no significant gain",
        )
    check_answers(session, after.result, num_never=num_never)
    left = session.stages.left_s
    if left is not None and left < _NUM_REWORDED * session.prompt_s:
        session.caveats.append("there was no time to measure accuracy on reworded prompts")
    elif reworded := _reworded(session, parts):
        prompts = session.files.write_prompts(_TEST_REWORDED, reworded)
        evaluate(session, REWORDED, run_id, prompts, "student", system=system)
    return gain


def note_never_right(session: RecipeSession, after: Evaluated) -> int:
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
            f"prompts with these answers: {', '.join(map(fences.name, never))}; by_group of "
            f"{after.run_id} has all"
        )
        session.caveats.append(caveat)
        session.stages.note(caveat)
    return num_never


def check_answers(session: RecipeSession, result: EvaluationResult, *, num_never: int) -> None:
    """Raises RunError (gate `gain`) if a student may have learnt no more than one answer.

    That is if it never gives the right one to most test prompts (num_never), or if always giving
    the commonest one is right as often.
    """
    accuracy, commonest = result.accuracy, result.commonest_answer
    if 2 * num_never > accuracy.n:
        session.stop_at(
            "gain",
            f"the student never gives the right answer to {num_never} of {accuracy.n} test prompts",
        )
    # Rewards may call other answers right.
    if commonest is None or session.plan.rewards != NO_FILE:
        return
    if accuracy.value <= commonest.value:
        session.stop_at(
            "gain",
            f"the student is right on {accuracy.value:.0%} of {accuracy.n} test prompts, and one "
            f"that always gives the commonest answer on {commonest.value:.0%}",
        )


def add_field_accuracies(session: RecipeSession, after: Evaluated, parts: PromptSplit) -> None:
    """Adds the accuracy in each field, if answers are objects."""
    form = session.form
    if not isinstance(form, ObjectAnswers):
        return
    said = final_answers([find_run(session.workspace, after.run_id).path / "rollouts.jsonl"])
    pairs = [
        (one.answer, said[one.task_id])
        for one in parts.test
        if one.answer is not None and one.task_id in said
    ]
    for field in form.fields if pairs else ():
        num_right = sum(has_same_value(given, field, expected=answer) for answer, given in pairs)
        session.add(
            Measured(
                name=f"student, field {fences.name(field)}",
                prompts=PROMPTS[TEST],
                accuracy=share_estimate(num_right, len(pairs)),
                run_id=after.run_id,
            )
        )


def _reworded(session: RecipeSession, parts: PromptSplit) -> list[RecipePrompt]:
    """Returns test prompts in other words: the teacher's, or by rules where it cannot.

    None are returned if rules might change words that an answer must repeat.
    """
    chosen, rng = parts.test[:_NUM_REWORDED], Random(session.request.seed)
    if can_reword(session, chosen):
        reworded = reworded_by_teacher(session, REWORD, "test-rewordings", chosen, budget_share=1)
        form = session.form
        usable = [
            one
            for one in reworded.prompts.values()
            if form is None or one.answer is None or form.is_grounded(one.answer, one.text)
        ]
        if len(usable) >= min(_MIN_REWORDED, len(chosen)):
            return usable
    if not session.has_labels or not is_single(chosen):
        session.caveats.append("accuracy on reworded prompts was not measured")
        return []
    session.caveats.append(
        "prompts were reworded by rules (greetings, case, typing errors), a weaker test than other "
        "people's words"
    )
    return [in_words(one, reword(one.text, rng)) for one in chosen]


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
) -> Evaluated:
    """Evaluates a model in this process, or the teacher (None), and adds what was measured.

    is_trained: of a student, whether it must give the bare answer. The teacher and the untrained
    student may say more, as long as that contains the answer. by_form: whether the student was not
    trained on the held-out forms, whose accuracy is then a figure of its own.
    """
    options: dict[str, Any] = {
        **session.acting,
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
            "concurrency": _CONCURRENCY,
            "max_tokens": session.max_tokens if is_trained else max(64, session.max_tokens),
            "system": system,
        }
    is_exact = session.form is not None and model is not None and is_trained
    if by_form:
        options["group_by"] = (FORM_FIELD,)
    elif is_exact and session.answer_field is not None:
        options["group_by"] = (session.answer_field,)
    options["answer_match"] = "exact" if is_exact else "contained"
    request = EvaluateModel.model_validate(options)
    left = session.stages.left_s
    limit_s = None if left is None else max(60.0, _MEASURING_SHARE * left)
    if limit_s is not None and model is not None and is_trained:
        # A student that has been trained is worth some minutes more.
        num = sum(1 for _ in read_lines(data))
        limit_s = max(limit_s, _MIN_LAST_S, _SLOWER * num * session.prompt_s)
    run = session.stages.run(title, "evaluate_model", request, limit_s=limit_s)
    session.note_gaps(title, [run.result or {}])
    file = find_run(session.workspace, run.run_id).path / RESULT_FILE
    result = read_json(file, Evaluation).result
    # An untrained student says more than a trained one, and reads examples.
    if model is not None and (is_trained or not session.prompt_s):
        session.prompt_s = result.seconds / max(1, result.accuracy.n)
    prompts = PROMPTS[data.stem]
    session.add(Measured(name=name, prompts=prompts, accuracy=result.accuracy, run_id=run.run_id))
    return Evaluated(name, run.run_id, result)
