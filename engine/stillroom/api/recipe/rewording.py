"""Prompts in other words, by the teacher: to measure with, and as more rows to train on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.api.recipe.session import RecipeSession, ask_teacher
from stillroom.data.instruction import Instruction
from stillroom.data.words import user_texts
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.selection import read_rollouts
from stillroom.rollout.request import NO_FILE
from stillroom.teachers.providers import Endpoint

_SYSTEM = (
    "Rewrite the user's message in other words, as another person would put it. Keep its meaning, "
    "its language and every name and number. Answer with the rewritten message alone."
)
_MIN_LENGTH, _MAX_LENGTH = 0.3, 3
"""How long a rewording may be, as a share of the text."""


@dataclass(frozen=True, slots=True)
class Rewordings:
    """Prompts in other words, by the task id of the original, and the files with the rollouts."""

    prompts: dict[str, RecipePrompt]
    files: list[Path]


def can_reword(session: RecipeSession, prompts: Sequence[RecipePrompt]) -> bool:
    """Returns whether the teacher can put prompts in other words: an API, and single messages."""
    return isinstance(session.plan.teacher_at, Endpoint) and is_single(prompts)


def is_single(prompts: Sequence[RecipePrompt]) -> bool:
    """Returns whether each prompt has one message of the user."""
    return all(len(user_texts(one.row["messages"])) == 1 for one in prompts)


def reworded_by_teacher(
    session: RecipeSession,
    title: str,
    name: str,
    prompts: Sequence[RecipePrompt],
    *,
    budget_share: float,
) -> Rewordings:
    """Lets the teacher put the prompts' texts in other words; those that look wrong are left out.

    title: the stage. name: of the files.
    """
    by_task_id = {_to_reword(prompt).task_id: prompt for prompt in prompts}
    files = ask_teacher(
        session,
        title,
        name,
        [_to_reword(prompt) for prompt in prompts],
        budget_share=budget_share,
        tools=NO_FILE,
        mcp_servers=(),
        browse=False,
        max_turns=1,
    )
    said = final_answers(files)
    reworded = {
        by_task_id[task_id].task_id: in_words(by_task_id[task_id], words)
        for task_id, words in said.items()
        if task_id in by_task_id and _is_rewording(by_task_id[task_id].text, words)
    }
    return Rewordings(reworded, files)


def _to_reword(prompt: RecipePrompt) -> RecipePrompt:
    """Returns the prompt that asks for other words."""
    bare = prompt.without_answer()
    messages = Instruction(_SYSTEM).put_before(bare.row["messages"])
    return RecipePrompt({**bare.row, "messages": messages}, bare.text, None)


def _is_rewording(before: str, after: str) -> bool:
    is_alike = _MIN_LENGTH < len(after) / max(1, len(before)) < _MAX_LENGTH
    return is_alike and before.strip() != after.strip()


def in_words(prompt: RecipePrompt, text: str) -> RecipePrompt:
    """Returns a prompt with another text as its last user message."""
    *earlier, last = prompt.row["messages"]
    row = {**prompt.row, "messages": [*earlier, {**last, "content": text}]}
    return RecipePrompt(row, text, prompt.answer)


def final_answers(files: Iterable[Path]) -> dict[str, str]:
    """Returns the final answer of each rollout, by the id of its prompt's task."""
    answers: dict[str, str] = {}
    for _, rollout in read_rollouts(files):
        answers[rollout.task_id] = rollout.answer
    return answers
