"""The stages of a recipe that measure: the teacher, the untrained student, and what was learnt."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
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
from stillroom.api.recipe.session import RecipeSession, ask_teacher
from stillroom.data.formats import decode_trajectory
from stillroom.errors import RunError
from stillroom.evaluate.files import RESULT_FILE, Evaluation, EvaluationResult
from stillroom.evaluate.intervals import Estimate, excludes_zero, share_estimate
from stillroom.evaluate.request import EvaluateModel
from stillroom.files import read_json
from stillroom.lines import read_lines
from stillroom.recipe.answers import known_answers, named_answer
from stillroom.recipe.forms import reword
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import Measured
from stillroom.recipe.splits import FORM_FIELD, NEW_FORM, Parts
from stillroom.rollout.request import NO_FILE
from stillroom.run_folder import find_run

REFERENCE, TEACHER, BEFORE, EXAMPLES, REWORD, AFTER, REWORDED = (
    "reference answers",
    "evaluate teacher",
    "evaluate untrained",
    "evaluate few-shot",
    "reword prompts",
    "evaluate student",
    "evaluate reworded",
)
_NUM_EXAMPLES, _MIN_EXAMPLES = 5, 2
_NUM_REWORDED, _MIN_REWORDED = 60, 10
_CONCURRENCY = 16
_LONGEST_KNOWN = 80
_MIN_TEACHER = 0.5
_MIN_TEACHER_TOKENS = 256
_CHOICE, _TEST, _REWORDED_PROMPTS = "prompts for choosing", "test prompts", "reworded test prompts"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation: its run and result."""

    run_id: str
    result: EvaluationResult


def answers_to_measure_with(session: RecipeSession, parts: Parts) -> Parts:
    """Returns the parts with right answers: where none were given, the teacher's.

    Raises RunError if nothing could judge a student.
    """
    judges = {one.text: one for one in (*parts.choice, *parts.test)}
    answers = {one.text: one.answer for one in judges.values() if one.answer is not None}
    session.known = known_answers(list(answers.values()))
    if len(answers) == len(judges) or session.plan.rewards != NO_FILE:
        return parts
    prompts = session.files.prompts(
        "unanswered", [one for one in judges.values() if not one.answer]
    )
    given = _answer_with_teacher(session, prompts)
    if session.known is None:
        short = [answer for answer in given.values() if len(answer) <= _LONGEST_KNOWN]
        session.known = known_answers(short)
    if session.known is None:
        raise RunError(
            "nothing can judge a student here: there are no right answers, and the teacher's are "
            "free texts",
            "give labelled (texts with right answers), or a rewards.py next to the prompts",
        )
    session.caveats.append(
        "some or all right answers are the teacher's own, so accuracy is agreement with it, and "
        "its mistakes count as right: give labelled to know more"
    )
    for text, answer in given.items():
        if (named := named_answer(answer, session.known)) is not None:
            answers.setdefault(text, named)
    return replace(
        parts, choice=_with_answers(parts.choice, answers), test=_with_answers(parts.test, answers)
    )


def _answer_with_teacher(session: RecipeSession, prompts: Path) -> dict[str, str]:
    """Returns the teacher's final answer to each prompt, by the prompt's text."""
    return final_answers(
        ask_teacher(session, REFERENCE, prompts, "reference", temperature=0, budget_share=0.4)
    )


def _with_answers(examples: Sequence[RecipePrompt], answers: dict[str, str]) -> list[RecipePrompt]:
    answered = list[RecipePrompt]()
    for example in examples:
        if (answer := answers.get(example.text)) is not None:
            metadata = {**(example.row.get("metadata") or {}), "expected_answer": answer}
            row = {**example.row, "metadata": metadata}
            answered.append(replace(example, row=row, answer=answer))
    return answered


def measure_before(session: RecipeSession, parts: Parts, choice: Path, test: Path) -> str:
    """Measures the teacher and the untrained student; returns the student's evaluation.

    Raises RunError if the teacher is not good enough (gate `teacher`).
    """
    teacher = evaluate(session, TEACHER, None, choice, "teacher", _CHOICE)
    _limit_turns(session, teacher)
    before = evaluate(session, BEFORE, session.request.student, test, "untrained student", _TEST)
    best = before.result.accuracy.value
    if session.plan.rewards == NO_FILE and (system := _few_shot(session, parts)) is not None:
        name = f"untrained student with {_NUM_EXAMPLES} examples"
        student = session.request.student
        shown = evaluate(session, EXAMPLES, student, test, name, _TEST, system=system)
        best = max(best, shown.result.accuracy.value)
    if session.known is not None:
        session.add(_commonest(parts))
    accuracy = teacher.result.accuracy
    if (accuracy.high or accuracy.value) < max(_MIN_TEACHER, best):
        session.stop_at(
            "teacher",
            f"the teacher is right on {accuracy.value:.0%} of {accuracy.n} prompts "
            f"(the untrained student: {best:.0%}), and a student learns its mistakes too",
        )
    return before.run_id


def _limit_turns(session: RecipeSession, teacher: "Evaluated") -> None:
    """Limits the tokens of the teacher's and the students' turns by those of the teacher so far."""
    folder = find_run(session.workspace, teacher.run_id).path
    rollouts = [decode_trajectory(line.data) for line in read_lines(folder / "rollouts.jsonl")]
    longest = max(one.usage.completion_tokens / max(1, one.turns) for one in rollouts)
    session.teacher_tokens = max(_MIN_TEACHER_TOKENS, math.ceil(4 * longest))
    if "max_tokens" in session.plan.teacher.model_fields_set:
        return
    if session.known is not None:
        # A token is a byte or more.
        session.max_tokens = 8 + max(len(answer.encode()) for answer in session.known)
    else:
        session.max_tokens = 32 + math.ceil(1.5 * longest)


def _few_shot(session: RecipeSession, parts: Parts) -> str | None:
    """Returns a system message with examples of different answers; None if there are too few."""
    by_answer = {one.answer: one for one in parts.choice if one.answer is not None}
    chosen = list(by_answer.values())[:_NUM_EXAMPLES]
    if len(chosen) < _MIN_EXAMPLES:
        return None
    lines = [f"Input: {one.text}\nAnswer: {one.answer}" for one in chosen]
    return "\n\n".join([*([session.request.system] if session.request.system else []), *lines])


def _commonest(parts: Parts) -> Measured:
    """Returns the accuracy of always giving the answer that is the commonest elsewhere."""
    answer = Counter(one.answer for one in parts.choice).most_common(1)[0][0]
    num_right = sum(one.answer == answer for one in parts.test)
    return Measured(
        model=f"always {fences.name(str(answer))!r}",
        prompts=_TEST,
        accuracy=share_estimate(num_right, len(parts.test)),
    )


def measure_choice(
    session: RecipeSession, title: str, name: str, run_id: str, choice: Path, *, is_first: bool
) -> float:
    """Measures a student on the prompts that decide which student is kept; returns the accuracy.

    name: the student's. is_first: whether held-out forms were not trained; their accuracy is then
    a figure of its own.
    """
    system = session.student_system
    measured = evaluate(session, title, run_id, choice, name, _CHOICE, system=system)
    forms = measured.result.by_group.get(FORM_FIELD, {})
    if is_first and NEW_FORM in forms:
        prompts = "prompts of forms that it was not trained on"
        session.add(
            Measured(model=name, prompts=prompts, accuracy=forms[NEW_FORM], run_id=measured.run_id)
        )
    return measured.result.accuracy.value


def measure_after(
    session: RecipeSession, run_id: str, before: str, parts: Parts, test: Path
) -> Estimate:
    """Measures the chosen student on test prompts, also reworded; returns the gain.

    Raises RunError if the student has gained nothing (gate `gain`).
    """
    system = session.student_system
    after = evaluate(session, AFTER, run_id, test, "student", _TEST, system=system)
    compared = CompareEvaluations(baseline=before, candidates=(after.run_id,))
    [comparison] = compare_evaluations(session.workspace, compared).comparisons
    gain = comparison.difference
    if not excludes_zero(gain) or gain.value < 0:
        session.stop_at(
            "gain",
            f"the student is right on {comparison.candidate_accuracy:.0%} of the test prompts, and "
            f"was on {comparison.baseline_accuracy:.0%} before: no gain is shown",
        )
    if reworded := _reworded(session, parts):
        prompts, name = session.files.prompts("test-reworded", reworded), _REWORDED_PROMPTS
        evaluate(session, REWORDED, run_id, prompts, "student", name, system=system)
    return gain


def _reworded(session: RecipeSession, parts: Parts) -> list[RecipePrompt]:
    """Returns test prompts in other words: the teacher's, or by rules where it cannot.

    None are returned if rules might change words that an answer must repeat.
    """
    chosen, rng = parts.test[:_NUM_REWORDED], Random(session.request.seed)
    if can_reword(session, chosen):
        said = reworded_by_teacher(session, REWORD, "test-rewordings", chosen, budget_share=1)
        usable = [in_words(one, said[one.text]) for one in chosen if one.text in said]
        if len(usable) >= min(_MIN_REWORDED, len(chosen)):
            return usable
    if session.known is None or not is_single(chosen):
        session.caveats.append("how it answers reworded prompts was not measured")
        return []
    session.caveats.append(
        "the reworded prompts were made by rules (greetings, case, typing errors), which is less "
        "than other people's words"
    )
    return [in_words(one, reword(one.text, rng)) for one in chosen]


def evaluate(
    session: RecipeSession,
    title: str,
    model: str | None,
    data: Path,
    name: str,
    prompts: str,
    *,
    system: str | None = None,
) -> Evaluated:
    """Evaluates a model in this process, or the teacher (None), and adds what was measured."""
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
            "max_tokens": session.max_tokens,
            "system": system,
        }
    # A teacher may talk; a student is taught to give the answer alone.
    is_exact = session.known is not None and model is not None
    if prompts == _CHOICE:
        options["group_by"] = (FORM_FIELD,)
    options["answer_match"] = "exact" if is_exact else "contained"
    request = EvaluateModel.model_validate(options)
    run = session.stages.run(title, "evaluate_model", request)
    file = find_run(session.workspace, run.run_id).path / RESULT_FILE
    result = read_json(file, Evaluation).result
    if model is not None:
        session.prompt_s = max(session.prompt_s, result.seconds / max(1, result.accuracy.n))
    session.add(Measured(model=name, prompts=prompts, accuracy=result.accuracy, run_id=run.run_id))
    return Evaluated(run.run_id, result)
