"""Prompts in other words, by the teacher: to measure with, and as more rows to train on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stillroom.api.recipe.session import RecipeSession, ask_teacher
from stillroom.data.formats import decode_trajectory
from stillroom.data.words import final_answer, user_texts
from stillroom.lines import read_lines
from stillroom.recipe.inputs import RecipePrompt
from stillroom.rollout.request import NO_FILE
from stillroom.teachers.providers import Endpoint

_SYSTEM = (
    "Rewrite the user's message in other words, as another person would put it. Keep its meaning, "
    "its language and every name and number. TeacherAnswer with the rewritten message alone."
)
_MIN_LENGTH, _MAX_LENGTH = 0.3, 3
"""How long a rewording may be, as a share of the text."""


def can_reword(session: RecipeSession, examples: Sequence[RecipePrompt]) -> bool:
    """Returns whether the teacher can put prompts in other words: an API, and single messages."""
    return isinstance(session.plan.teacher_at, Endpoint) and is_single(examples)


def is_single(examples: Sequence[RecipePrompt]) -> bool:
    """Returns whether each prompt has one message of the user."""
    return all(len(user_texts(one.row["messages"])) == 1 for one in examples)


def reworded_by_teacher(
    session: RecipeSession,
    title: str,
    name: str,
    examples: Sequence[RecipePrompt],
    *,
    budget_share: float,
) -> dict[str, str]:
    """Returns the prompts' texts in other words, by the text; those that look wrong are left out.

    title: the stage. name: of the file with the rollouts.
    """
    prompts = session.files.prompts(f"{name}-prompts", examples, answers=False)
    output = ask_teacher(
        session, title, prompts, name, budget_share=budget_share,
        tools=NO_FILE, max_turns=1, system=_SYSTEM,
    )  # fmt: skip
    said = final_answers(output)
    return {text: words for text, words in said.items() if _is_rewording(text, words)}


def _is_rewording(before: str, after: str) -> bool:
    is_alike = _MIN_LENGTH < len(after) / max(1, len(before)) < _MAX_LENGTH
    return is_alike and before.strip() != after.strip()


def in_words(example: RecipePrompt, text: str) -> RecipePrompt:
    """Returns a prompt with another text as its last user message."""
    *earlier, last = example.row["messages"]
    row = {**example.row, "messages": [*earlier, {**last, "content": text}]}
    return replace(example, row=row, text=text)


def final_answers(rollouts: Path) -> dict[str, str]:
    """Returns the final answer of each rollout in a file, by the text of its prompt."""
    answers: dict[str, str] = {}
    for line in read_lines(rollouts):
        messages = [dict(message) for message in decode_trajectory(line.data).messages]
        answers["\n".join(user_texts(messages))] = final_answer(messages).strip()
    return answers
