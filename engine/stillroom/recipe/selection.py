"""Selects the teacher's answers to train on."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.filter.contamination import Contamination, ContaminationIndex
from stillroom.data.words import content_text, final_answer, user_texts, words_of
from stillroom.lines import read_lines
from stillroom.recipe.answers import AnswerForm, LabelAnswers

_WRONG = "the reward says it is wrong"
_CUT = "cut off or missing"
_OTHER_FORM = "no label, line or JSON object of the form of the right answers"
OVERLAPPING = "contains a text to evaluate on"
UNSETTLED = "contradicts similar texts, and no other answer settled it"
_MIN_REWARD = 0.5
_MIN_WORDS_OF_MESSAGE = 4
"""Many conversations contain shorter messages, such as `Thanks`."""


class ImportOrigin(msgspec.Struct, frozen=True):
    """Where an imported rollout comes from."""

    branch_of: str | None = None
    """The rollout of the same conversation that it branches from; None if it does not."""


class AnsweredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a rollout that the selection needs; imported ones may lack others."""

    id: str
    task_id: str
    sample: int
    messages: list[dict[str, Any]]
    reward: float | None = None
    success: bool | None = None
    truncated: bool = False
    error: dict[str, Any] | None = None
    rewards: dict[str, float] = {}
    """The scores by name."""
    origin: ImportOrigin = ImportOrigin()

    @property
    def answer(self) -> str:
        """The text of the last turn."""
        return final_answer(self.messages).strip()

    @property
    def has_tool_calls(self) -> bool:
        """Whether a turn calls tools."""
        return any(message.get("tool_calls") for message in self.messages)


def read_rollouts(files: Iterable[Path]) -> Iterator[tuple[bytes, AnsweredRollout]]:
    """Yields the lines of rollout files, each with the rollout."""
    for line in (line for file in files for line in read_lines(file)):
        yield bytes(line.data), _ROLLOUT.decode(line.data)


_ROLLOUT = msgspec.json.Decoder(AnsweredRollout)


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """A rollout of the teacher, and the answer that its last turn gives."""

    line: bytes
    rollout: AnsweredRollout
    answer: str
    """The text of the last turn; if answers have a form, the label or JSON object in that text."""

    @property
    def task_id(self) -> str:
        """The id of the prompt's task."""
        return self.rollout.task_id


@dataclass(slots=True)
class TeacherAnswers:
    """The teacher's usable answers, and the number of the others by reason."""

    usable: list[TeacherAnswer] = field(default_factory=list[TeacherAnswer])
    left_out: Counter[str] = field(default_factory=Counter[str])


def read_answers(
    files: Iterable[Path],
    form: AnswerForm | None,
    *,
    task_ids: Collection[str],
    evaluation: ContaminationIndex,
) -> TeacherAnswers:
    """Returns the answers to some prompts in rollout files, in the order of `task_ids`.

    form: the form of the answers; None for free text. Left out are rollouts that the task's reward
    calls wrong, that are cut off or lack an answer, that have none or several of the form, or that
    contain a text of `evaluation`. A label may be one, since it is the answer to many texts.
    """
    answers = TeacherAnswers()
    searched = ("user",) if isinstance(form, LabelAnswers) else ("user", "assistant")
    for line, rollout in read_rollouts(files):
        if rollout.task_id not in task_ids:
            continue
        text = rollout.answer
        answer = text if form is None else form.named(text)
        if is_wrong(rollout):
            answers.left_out[_WRONG] += 1
        elif is_cut_off(rollout):
            answers.left_out[_CUT] += 1
        elif answer is None:
            answers.left_out[_OTHER_FORM] += 1
        elif find_overlap(evaluation, rollout.messages, roles=searched):
            answers.left_out[OVERLAPPING] += 1
        else:
            answers.usable.append(TeacherAnswer(line, rollout, answer))
    # Files list rollouts in the order in which they ended, which differs between runs.
    positions = {task_id: position for position, task_id in enumerate(task_ids)}
    answers.usable.sort(key=lambda one: (positions[one.task_id], one.rollout.sample))
    return answers


def find_overlap(
    evaluation: ContaminationIndex,
    messages: Sequence[dict[str, Any]],
    *,
    roles: Collection[str] = ("user",),
) -> Contamination | None:
    """Returns the match with a text to evaluate on that a conversation contains; None without one.

    Compared are the joined texts of the user and, of these roles, each message that is not short.
    """
    longer = [
        one
        for one in messages
        if one["role"] in roles
        and len(words_of(content_text(one.get("content")))) >= _MIN_WORDS_OF_MESSAGE
    ]
    whole = "\n".join(user_texts(messages))
    return evaluation.find([whole], near=False) or evaluation.find_in(longer, near=False)


def is_cut_off(rollout: AnsweredRollout) -> bool:
    """Returns whether a rollout does not end with an answer."""
    is_last_a_call = bool(rollout.messages[-1].get("tool_calls"))
    return rollout.truncated or rollout.error is not None or is_last_a_call or not rollout.answer


def is_wrong(rollout: AnsweredRollout) -> bool:
    """Returns whether a rollout's reward, or its success if it has one, says that it failed."""
    if rollout.success is None and rollout.reward is not None:
        return rollout.reward < _MIN_REWARD
    return rollout.success is False


def settle(
    doubtful: Iterable[TeacherAnswer],
    repeated: Iterable[TeacherAnswer],
    likely: Mapping[str, str],
    form: AnswerForm,
) -> dict[str, TeacherAnswer | None]:
    """Returns the answer to train on for each doubtful one, by its rollout's id; None for none.

    repeated: the answers when the teacher was asked again. likely: the answer that similar texts
    suggest, by the rollout's id. Of objects, only fields with a fixed set of values are compared.
    A repeated answer is used if it equals the suggestion and no other answer to the prompt is more
    frequent. Otherwise the prompt is not trained on: either similar texts or the teacher mislead.
    """
    by_task: dict[str, list[TeacherAnswer]] = {}
    for other in repeated:
        by_task.setdefault(other.task_id, []).append(other)
    settled: dict[str, TeacherAnswer | None] = {}
    for answer in doubtful:
        others = by_task.get(answer.task_id, [])
        votes = Counter(_closed_values(form, one.answer) for one in (answer, *others))
        suggested = _closed_values(form, likely[answer.rollout.id])
        is_settled = votes[suggested] == max(votes.values())
        matching = (
            one for one in others if is_settled and _closed_values(form, one.answer) == suggested
        )
        settled[answer.rollout.id] = next(matching, None)
    return settled


def _closed_values(form: AnswerForm, answer: str) -> tuple[str, ...]:
    return tuple(form.closed_fields(answer).values())
