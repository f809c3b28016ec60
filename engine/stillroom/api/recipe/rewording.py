"""Lets the teacher reword prompts, to evaluate on and as more rows to train on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.api.recipe.session import RecipeSession, ask_teacher
from stillroom.curate.filter.contamination import ContaminationIndex
from stillroom.data.instruction import Instruction
from stillroom.data.words import user_texts
from stillroom.lines import read_lines
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.selection import find_overlap, read_rollouts
from stillroom.rollout.request import NO_FILE
from stillroom.teachers.providers import Endpoint

_SYSTEM = (
    "Rewrite the user's message in other words, as another person would put it. Keep its meaning, "
    "its language and every name and number. Answer with the rewritten message alone."
)
_MIN_LENGTH, _MAX_LENGTH = 0.3, 3
"""The shortest and longest rewording, as a multiple of the text's length."""


@dataclass(frozen=True, slots=True)
class Rewordings:
    """Reworded prompts, by the task id of the original, and the files with the rollouts."""

    prompts: dict[str, RecipePrompt]
    rollout_ids: dict[str, str]
    """The ids of the rollouts that reworded them, by the same task ids."""
    files: list[Path]


def can_reword(session: RecipeSession, prompts: Sequence[RecipePrompt]) -> bool:
    """Returns whether the teacher is an API, and all prompts have one user message to reword."""
    return isinstance(session.plan.teacher_location, Endpoint) and have_one_message(prompts)


def have_one_message(prompts: Sequence[RecipePrompt]) -> bool:
    """Returns whether each prompt has exactly one user message."""
    return all(len(user_texts(prompt.row["messages"])) == 1 for prompt in prompts)


def reworded_by_teacher(
    session: RecipeSession,
    title: str,
    name: str,
    prompts: Sequence[RecipePrompt],
    *,
    budget_share: float,
) -> Rewordings:
    """Returns the teacher's rewordings of the prompts, without those that look wrong.

    title: the stage's title. name: the stem of the files' names.
    """
    by_task_id = {_rewording_prompt(prompt).task_id: prompt for prompt in prompts}
    files = ask_teacher(
        session,
        title,
        name,
        [_rewording_prompt(prompt) for prompt in prompts],
        budget_share=budget_share,
        tools=NO_FILE,
        mcp_servers=(),
        browse=False,
        max_turns=1,
    )
    reworded = Rewordings({}, {}, files)
    for _, rollout in read_rollouts(files):
        prompt = by_task_id.get(rollout.task_id)
        if prompt is not None and _is_plausible(prompt.text, rollout.answer):
            reworded.prompts[prompt.task_id] = with_text(prompt, rollout.answer)
            reworded.rollout_ids[prompt.task_id] = rollout.id
    return reworded


def without_trained(prompts: Sequence[RecipePrompt], train_file: Path) -> list[RecipePrompt]:
    """Returns the prompts whose text no user of a training file's rows says."""
    rows = [msgspec.json.decode(line.data)["messages"] for line in read_lines(train_file)]
    kept, found = list(prompts), {""}
    # The closest match of a row may hide another.
    while found:
        index = ContaminationIndex.of_texts({prompt.task_id: prompt.text for prompt in kept})
        found = {match.where for row in rows if (match := find_overlap(index, row))}
        kept = [prompt for prompt in kept if prompt.task_id not in found]
    return kept


def _rewording_prompt(prompt: RecipePrompt) -> RecipePrompt:
    """Returns the prompt that asks the teacher to reword another prompt."""
    bare = prompt.without_answer()
    messages = Instruction(_SYSTEM).apply_to(bare.row["messages"])
    return RecipePrompt({**bare.row, "messages": messages}, bare.text, None)


def _is_plausible(before: str, after: str) -> bool:
    is_similar_length = _MIN_LENGTH < len(after) / max(1, len(before)) < _MAX_LENGTH
    return is_similar_length and before.strip() != after.strip()


def with_text(prompt: RecipePrompt, text: str) -> RecipePrompt:
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
