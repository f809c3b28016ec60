"""The stages of a recipe that measure the teacher and the untrained student."""

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.api.recipe.measuring import (
    MIN_EVAL_PROMPTS,
    PROMPTS,
    TEST,
    TEST_EXAMPLES,
    Evaluated,
    evaluate,
)
from stillroom.api.recipe.session import RecipeSession
from stillroom.data.formats import decode_trajectory
from stillroom.files import file_sha256
from stillroom.lines import read_lines
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import Measured
from stillroom.recipe.selection import read_rollouts
from stillroom.recipe.splits import PromptSplit
from stillroom.rollout.request import NO_FILE
from stillroom.run_folder import find_run

TEACHER, UNTRAINED, EXAMPLES = "evaluate teacher", "evaluate untrained", "evaluate few-shot"
_NUM_EXAMPLES, _MIN_EXAMPLES, _MAX_OF_LABELS = 5, 2, 10
_ANSWER_LINE = "\nAnswer: "
_MIN_TEACHER = 0.5
_EXAMPLES_SHARE, _EXAMPLES_TIMES = 0.1, 3.0
"""The share of the time that is left for measuring with examples, which take so much longer."""
_MIN_TEACHER_TOKENS = 256
_USUAL_SHARE = 0.99
"""The share of logged turns that the student's may be as long as."""
_MAX_TOKENS_A_BYTE = 0.5
"""Nearly all answers have fewer tokens a byte."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """The evaluations that a trained student is compared with."""

    untrained: Evaluated
    """The untrained student's best, with or without examples, on the test prompts."""
    teacher: Evaluated | None
    """The teacher's, on the validation prompts; None without a teacher."""


def measure_baselines(
    session: RecipeSession, parts: PromptSplit, validation: Path, test: Path
) -> Baselines:
    """Measures the teacher and the untrained student.

    Raises RunError if the teacher is not good enough (gate `teacher`).
    """
    teacher = None
    if session.plan.teacher_at is not None:
        teacher = evaluate(session, TEACHER, None, validation, "teacher")
        _note_cost_of_asking(session, parts, teacher)
    _limit_turns(session, teacher)
    student = session.request.student
    untrained = evaluate(session, UNTRAINED, student, test, "untrained student", is_trained=False)
    if teacher is not None:
        # A trained student takes as many turns as its teacher.
        turns = teacher.result.mean_turns / max(1.0, untrained.result.mean_turns)
        session.prompt_s *= max(1.0, turns)
    best = untrained
    most = _MAX_OF_LABELS if session.has_labels else _NUM_EXAMPLES
    system = _few_shot(parts, most) if session.plan.rewards == NO_FILE else None
    shown_test = _test_in_time(session, parts, test) if system is not None else None
    if system is not None and shown_test is not None:
        name = f"untrained student, {system.count(_ANSWER_LINE)}-shot"
        shown = evaluate(
            session, EXAMPLES, student, shown_test, name, system=system, is_trained=False
        )
        if shown_test == test:
            best = max(untrained, shown, key=lambda one: one.result.accuracy.value)
    if (commonest := untrained.result.commonest_answer) is not None:
        session.add(Measured(name="majority baseline", prompts=PROMPTS[TEST], accuracy=commonest))
        if best.result.accuracy.value < commonest.value:
            session.caveats.append(
                "the untrained student does worse than always giving the commonest answer "
                f"({commonest.value:.0%}), as one that does not know the answers to choose from: "
                "compare with that figure, since gain is above the untrained student"
            )
    if teacher is None:
        return Baselines(best, None)
    accuracy = teacher.result.accuracy
    before = best.result.accuracy.value
    if (accuracy.high or accuracy.value) < max(_MIN_TEACHER, before):
        session.stop_at(
            "teacher",
            f"the teacher is right on {accuracy.value:.0%} of {accuracy.n} prompts "
            f"(the untrained student: {before:.0%}), and a student learns its mistakes too",
        )
    return Baselines(best, teacher)


def _note_cost_of_asking(session: RecipeSession, parts: PromptSplit, teacher: Evaluated) -> None:
    """Notes how many prompts can be paid for, if the budget does not suffice for all of them."""
    if (budget := session.request.budget_usd) is None:
        return
    # Not what earlier calls of the recipe spent after this stage.
    left = budget - sum(stage.usd for stage in session.stages.done)
    usd = find_run(session.workspace, teacher.run_id).read().calls_usd
    each_usd = usd / max(1, teacher.result.accuracy.n)
    prompts = [*parts.first_round, *parts.of_new_forms, *parts.second_round]
    if each_usd and len(prompts) * each_usd > left:
        session.stages.note(
            f"to ask the teacher about all {len(prompts)} texts costs about "
            f"${len(prompts) * each_usd:.2g}, and ${left:.2g} of budget_usd are left, enough for "
            f"about {left / each_usd:.0f}: a later call with a higher budget_usd pays for the rest"
        )


class _ExamplesMeasured(msgspec.Struct, frozen=True):
    """On how many prompts a student with examples is measured."""

    num: int


def _test_in_time(session: RecipeSession, parts: PromptSplit, test: Path) -> Path | None:
    """Returns the test prompts that a student with examples is measured on; None if none."""
    left, num_prompts = session.stages.left_s, len(parts.test)

    def chosen() -> _ExamplesMeasured:
        each_s = _EXAMPLES_TIMES * session.prompt_s
        num = num_prompts if left is None else int(_EXAMPLES_SHARE * left / max(1e-9, each_s))
        return _ExamplesMeasured(min(num, num_prompts))

    # It is kept, as the evaluation would else be another one after an interruption.
    key = {"test": file_sha256(test), "minutes": session.request.minutes}
    num = session.files.stored_document("examples", key, _ExamplesMeasured, chosen).num
    if num == num_prompts:
        return test
    if num < MIN_EVAL_PROMPTS:
        session.caveats.append("there was no time to measure the untrained student with examples")
        return None
    session.caveats.append(
        f"the untrained student with examples was measured on {num} of {num_prompts} test prompts"
    )
    return session.files.write_prompts(TEST_EXAMPLES, parts.test[:num])


def _limit_turns(session: RecipeSession, teacher: Evaluated | None) -> None:
    """Limits the tokens of the teacher's and the students' turns by those of the teacher so far.

    Without an evaluation of the teacher its turns are the input's.
    """
    if teacher is not None:
        folder = find_run(session.workspace, teacher.run_id).path
        rollouts = [decode_trajectory(line.data) for line in read_lines(folder / "rollouts.jsonl")]
        longest = max(one.usage.completion_tokens / max(1, one.turns) for one in rollouts)
    else:
        files = [session.plan.logged] if session.plan.logged is not None else []
        lengths = sorted(
            len(msgspec.json.encode([message.get("content"), message.get("tool_calls")]))
            for _, one in read_rollouts(files)
            for message in one.messages
            if message["role"] == "assistant"
        )
        longest = _MAX_TOKENS_A_BYTE * lengths[int(_USUAL_SHARE * (len(lengths) - 1))]
    # A power of two, so that it is seldom another one when the prompts change.
    session.teacher_tokens = max(_MIN_TEACHER_TOKENS, 2 ** math.ceil(math.log2(4 * longest + 1)))
    if "max_tokens" in session.plan.teacher.model_fields_set:
        return
    if session.form is not None and not session.has_tools:
        # A token is a byte or more. Other texts may need longer values in an object.
        longest = session.form.num_bytes
        session.max_tokens = 8 + (longest if session.has_labels else 2 * longest)
    else:
        session.max_tokens = 32 + math.ceil(1.5 * longest)


def _few_shot(parts: PromptSplit, most: int) -> str | None:
    """Returns a system message with examples of different answers; None if there are too few.

    most: how many examples it may have.
    """
    by_answer = {one.answer: one for one in parts.validation if one.answer is not None}
    chosen = list(by_answer.values())[:most]
    if len(chosen) < _MIN_EXAMPLES:
        return None
    systems = {_system_of(one) for one in (*parts.validation, *parts.test)}
    if len(systems) > 1:
        return None
    lines = [f"Input: {one.text}{_ANSWER_LINE}{one.answer}" for one in chosen]
    return "\n\n".join([*filter(None, systems), *lines])


def _system_of(prompt: RecipePrompt) -> str | None:
    first = prompt.row["messages"][0]
    return first["content"] if first["role"] == "system" else None
