"""The stages of a recipe that measure the teacher and the untrained student."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec

from stillroom.api.recipe.measuring import (
    CONCURRENCY,
    MAX_REWORDED,
    MEASURING_SHARE,
    MIN_EVAL_PROMPTS,
    PROMPTS,
    TEST,
    TEST_EXAMPLES,
    ModelEvaluation,
    evaluate,
)
from stillroom.api.recipe.session import RecipeSession
from stillroom.data.formats import decode_trajectory
from stillroom.errors import RunError
from stillroom.files import file_sha256
from stillroom.lines import read_lines
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import Measured
from stillroom.recipe.selection import read_rollouts
from stillroom.recipe.splits import PromptSplit
from stillroom.rollout.request import NO_FILE
from stillroom.run_folder import find_run
from stillroom.types import dollars

TEACHER, SPEED, UNTRAINED, EXAMPLES = (
    "evaluate teacher",
    "measure speed",
    "evaluate untrained",
    "evaluate few-shot",
)
_NUM_EXAMPLES, _MIN_EXAMPLES, _MAX_LABEL_EXAMPLES = 5, 2, 10
_ANSWER_LINE = "\nAnswer: "
_MIN_TEACHER_ACCURACY = 0.5
_EXAMPLES_SHARE, _EXAMPLES_SLOWDOWN = 0.1, 3.0
"""The share of the remaining time for the few-shot evaluation, whose prompts take longer."""
EXPORT_S, _SPARE_SHARE = 60.0, 0.5
"""The seconds for export and report, and the share of further spare time for more test prompts."""
_SLOWER = 1.5
"""How much slower than allowed a student must be before it is evaluated, since that varies."""
_MIN_TEACHER_TOKENS = 256
_LENGTH_QUANTILE = 0.99
"""The quantile of the logged turns' lengths that limits the student's turns."""
_MAX_TOKENS_PER_BYTE = 0.5
"""Nearly all answers have fewer tokens per byte."""


def measure_teacher(
    session: RecipeSession, parts: PromptSplit, validation: Path
) -> ModelEvaluation | None:
    """Returns the teacher's evaluation on the validation prompts; None without a teacher.

    Also limits the tokens per turn of later rollouts, based on the teacher's turns.
    """
    teacher = None
    if session.plan.teacher_location is not None:
        teacher = evaluate(session, TEACHER, None, validation, "teacher")
        _note_cost_of_asking(session, parts, teacher)
    _limit_turns(session, teacher)
    return teacher


class PromptCount(msgspec.Struct, frozen=True):
    """The number of prompts for an evaluation, stored so that a resumed recipe repeats it."""

    num: int


class _Speed(msgspec.Struct, frozen=True):
    """The time of a recipe's first call and the speed of its student, both in seconds."""

    recipe_s: float | None = None
    """None if there is no limit, or too few evaluation prompts to leave some out."""
    untrained_s: float = 0.0
    trained_s: float = 0.0
    """The seconds per prompt of the student before and, as an estimate, after training."""


def limit_eval_prompts(
    session: RecipeSession, parts: PromptSplit, teacher: ModelEvaluation | None
) -> PromptSplit:
    """Returns the parts, with fewer evaluation prompts if all would leave little time to train."""
    request = session.request

    def measure() -> _Speed:
        if request.minutes is None or not parts.may_evaluate_fewer:
            return _Speed()
        timed = session.files.write_prompts("speed", parts.test[:CONCURRENCY])
        name = f"untrained student, {CONCURRENCY} prompts"
        untrained = evaluate(session, SPEED, request.student, timed, name, is_trained=False)
        cost = untrained.result.per_task
        # Without the time to load the model, which does not depend on the number of prompts.
        each_s = session.prompt_s if cost is None else cost.machine_seconds
        return _Speed(60 * request.minutes, each_s, each_s * _turns_ratio(teacher, untrained))

    # Stored, so that later calls with more minutes can reuse the evaluations.
    key = [request.student, *(prompt.task_id for prompt in (*parts.test, *parts.validation))]
    speed = session.files.stored_document("speed", key, _Speed, measure)
    if speed.recipe_s is None:
        return parts
    fewer = parts.within(speed.recipe_s, untrained_s=speed.untrained_s, trained_s=speed.trained_s)
    if (len(fewer.test), len(fewer.validation)) == (len(parts.test), len(parts.validation)):
        return parts
    if not (session.files.folder / f"{TEST}.jsonl").exists():
        # Otherwise an earlier call has begun to evaluate, whose evaluations are reused.
        _check_minutes(session, fewer, speed)
    session.caveats.append(
        "to leave time to train, students are evaluated on at least "
        f"{len(fewer.test)} of {len(parts.test)} test prompts, and on "
        f"{len(fewer.validation)} of {len(parts.validation)} validation prompts (about "
        f"{speed.trained_s:.1f} s each); for narrower intervals begin again with more minutes and "
        "another output"
    )
    return fewer


def _check_minutes(session: RecipeSession, parts: PromptSplit, speed: _Speed) -> None:
    """Raises RunError if the untrained student clearly takes longer than an evaluation may."""
    minutes, left_s = session.request.minutes, session.stages.remaining_s
    needed_s = len(parts.test) * speed.untrained_s
    if minutes is None or left_s is None or needed_s <= _SLOWER * MEASURING_SHARE * left_s:
        return
    enough = math.ceil(minutes + (needed_s / MEASURING_SHARE - left_s) / 60)
    raise RunError(
        f"{minutes:g} minutes are too few: the untrained student takes about "
        f"{speed.untrained_s:.1f} s for each of {len(parts.test)} test prompts, which leaves no "
        "time to train it",
        f"give the recipe at least {enough} minutes, or a smaller student; on a busy machine, end "
        "other work first and begin again with another output",
    )


def _turns_ratio(teacher: ModelEvaluation | None, untrained: ModelEvaluation) -> float:
    """Returns the estimated ratio of a trained student's turns to an untrained student's.

    A trained student is assumed to take as many turns as its teacher.
    """
    turns = 0.0 if teacher is None else teacher.result.mean_turns
    return max(1.0, turns / max(1.0, untrained.result.mean_turns))


def with_more_test_prompts(session: RecipeSession, run_id: str, parts: PromptSplit) -> PromptSplit:
    """Returns the parts with as many test prompts as a trained student certainly has time for.

    Before its training, neither its speed nor the time that training takes was known.
    """
    left, each_s = session.stages.remaining_s, max(1e-9, session.prompt_s)

    def choose() -> PromptCount:
        if left is None:
            return PromptCount(len(parts.more_test))
        spare_s = left - EXPORT_S - (len(parts.test) + MAX_REWORDED) * each_s
        return PromptCount(max(0, int(_SPARE_SHARE * spare_s / each_s)))

    # Without the minutes, so that later calls with more minutes have the same figures.
    count = session.files.stored_document("more-test", run_id, PromptCount, choose)
    if not (more := parts.more_test[: count.num]):
        return parts
    session.caveats.append(
        f"there was time left after training, so the trained student is evaluated on {len(more)} "
        f"more test prompts; `gain` is on the {len(parts.test)} that the untrained one answered too"
    )
    return replace(parts, test=[*parts.test, *more], more_test=[])


def measure_untrained(
    session: RecipeSession, parts: PromptSplit, test: Path, teacher: ModelEvaluation | None
) -> ModelEvaluation:
    """Returns the untrained student's better evaluation on test prompts, with or without examples.

    Raises RunError if the teacher is not good enough (gate `teacher`).
    """
    student = session.request.student
    untrained = evaluate(session, UNTRAINED, student, test, "untrained student", is_trained=False)
    session.prompt_s *= _turns_ratio(teacher, untrained)
    best = untrained
    max_examples = _MAX_LABEL_EXAMPLES if session.has_labels else _NUM_EXAMPLES
    system = _few_shot(parts, max_examples) if session.plan.rewards == NO_FILE else None
    examples_test = _examples_test_file(session, parts, test) if system is not None else None
    if system is not None and examples_test is not None:
        name = f"untrained student, {system.count(_ANSWER_LINE)}-shot"
        with_examples = evaluate(
            session, EXAMPLES, student, examples_test, name, system=system, is_trained=False
        )
        if examples_test == test:
            best = max(
                untrained, with_examples, key=lambda evaluation: evaluation.result.accuracy.value
            )
    if (commonest := untrained.result.commonest_answer) is not None:
        session.add(Measured(name="majority baseline", prompts=PROMPTS[TEST], accuracy=commonest))
        if best.result.accuracy.value < commonest.value:
            session.caveats.append(
                "the untrained student does worse than always giving the commonest answer "
                f"({commonest.value:.0%}), since it does not know the possible answers: compare "
                "the student with that figure, since `gain` is relative to the untrained student"
            )
    if teacher is None:
        return best
    accuracy = teacher.result.accuracy
    untrained_accuracy = best.result.accuracy.value
    if (accuracy.high or accuracy.value) < max(_MIN_TEACHER_ACCURACY, untrained_accuracy):
        session.stop_at(
            "teacher",
            f"the teacher is right on {accuracy.value:.0%} of {accuracy.n} prompts "
            f"(the untrained student: {untrained_accuracy:.0%}), and a student learns its mistakes",
        )
    return best


def _note_cost_of_asking(
    session: RecipeSession, parts: PromptSplit, teacher: ModelEvaluation
) -> None:
    """Notes how many prompts can be paid for, if the budget does not suffice for all of them."""
    if (budget := session.request.budget_usd) is None:
        return
    # Leaves out what earlier calls of the recipe spent after this stage.
    usd_by_run = {stage.run_id: stage.usd for stage in session.stages.done}
    left = max(0.0, budget - sum(usd_by_run.values()))
    each_usd = usd_by_run[teacher.run_id] / max(1, teacher.result.accuracy.n)
    prompts = [*parts.first_round, *parts.of_new_forms, *parts.second_round]
    if each_usd and len(prompts) * each_usd > left:
        session.stages.note(
            f"asking the teacher about all {len(prompts)} texts costs about "
            f"{dollars(len(prompts) * each_usd)}, but only {dollars(left)} of budget_usd is left, "
            f"enough for about {left / each_usd:.0f}; for more, call again with a higher budget_usd"
        )


def _examples_test_file(session: RecipeSession, parts: PromptSplit, test: Path) -> Path | None:
    """Returns the file with the prompts of the few-shot evaluation; None if time is too short."""
    left, num_prompts = session.stages.remaining_s, len(parts.test)

    def choose() -> PromptCount:
        each_s = _EXAMPLES_SLOWDOWN * session.prompt_s
        num = num_prompts if left is None else int(_EXAMPLES_SHARE * left / max(1e-9, each_s))
        return PromptCount(min(num, num_prompts))

    key = {"test": file_sha256(test), "minutes": session.request.minutes}
    num = session.files.stored_document("examples", key, PromptCount, choose).num
    if num == num_prompts:
        return test
    if num < MIN_EVAL_PROMPTS:
        session.caveats.append("there was no time to measure the untrained student with examples")
        return None
    session.caveats.append(
        f"the untrained student with examples was measured on {num} of {num_prompts} test prompts"
    )
    return session.files.write_prompts(TEST_EXAMPLES, parts.test[:num])


def _limit_turns(session: RecipeSession, teacher: ModelEvaluation | None) -> None:
    """Limits the tokens per turn of teacher and students, based on the teacher's turns so far.

    Without an evaluation of the teacher, the turns in the input count.
    """
    if teacher is not None:
        folder = find_run(session.workspace, teacher.run_id).path
        rollouts = [decode_trajectory(line.data) for line in read_lines(folder / "rollouts.jsonl")]
        longest = max(
            rollout.usage.completion_tokens / max(1, rollout.turns) for rollout in rollouts
        )
    else:
        files = [session.plan.logged_file] if session.plan.logged_file is not None else []
        lengths = sorted(
            len(msgspec.json.encode([message.get("content"), message.get("tool_calls")]))
            for _, rollout in read_rollouts(files)
            for message in rollout.messages
            if message["role"] == "assistant"
        )
        longest = _MAX_TOKENS_PER_BYTE * lengths[int(_LENGTH_QUANTILE * (len(lengths) - 1))]
    # A power of two, so that it seldom changes when the prompts change.
    session.teacher_tokens = max(_MIN_TEACHER_TOKENS, 2 ** math.ceil(math.log2(4 * longest + 1)))
    if "max_tokens" in session.plan.teacher.model_fields_set:
        return
    if session.form is not None and not session.has_tools:
        # A token is a byte or more. Other texts may need longer values in an object.
        longest = session.form.num_bytes
        session.max_tokens = 8 + (longest if session.has_labels else 2 * longest)
    else:
        session.max_tokens = 32 + math.ceil(1.5 * longest)


def _few_shot(parts: PromptSplit, max_examples: int) -> str | None:
    """Returns a system message with examples of different answers; None if there are too few.

    max_examples: the maximum number of examples.
    """
    by_answer = {prompt.answer: prompt for prompt in parts.validation if prompt.answer is not None}
    chosen = list(by_answer.values())[:max_examples]
    if len(chosen) < _MIN_EXAMPLES:
        return None
    systems = {_system_of(prompt) for prompt in (*parts.validation, *parts.test)}
    if len(systems) > 1:
        return None
    lines = [f"Input: {prompt.text}{_ANSWER_LINE}{prompt.answer}" for prompt in chosen]
    return "\n\n".join([*filter(None, systems), *lines])


def _system_of(prompt: RecipePrompt) -> str | None:
    first = prompt.row["messages"][0]
    return first["content"] if first["role"] == "system" else None
