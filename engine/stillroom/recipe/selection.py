"""Chooses which of the teacher's answers are trained, and asks again about those in doubt."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.data.formats import decode_trajectory
from stillroom.data.words import final_answer, user_texts
from stillroom.lines import read_lines
from stillroom.recipe.answers import named_answer
from stillroom.types import Trajectory

_WRONG = "the answer is not the expected one"
_CUT = "the answer is cut off or missing"
_UNKNOWN = "names none or several of the known answers"
UNSETTLED = "contradicts similar texts, also when asked again"


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """A rollout of the teacher, and the answer that its last turn gives."""

    line: bytes
    rollout: Trajectory
    text: str
    """What the user says in the prompt."""
    answer: str
    """The final turn; if answers are from a small set, the member of the set that it names."""


@dataclass(slots=True)
class TeacherAnswers:
    """The usable answers of the teacher, and why others are left out."""

    usable: list[TeacherAnswer] = field(default_factory=list[TeacherAnswer])
    left_out: Counter[str] = field(default_factory=Counter[str])


def read_answers(files: Iterable[Path], known: Sequence[str] | None) -> TeacherAnswers:
    """Returns the answers in rollout files; `known` are all possible ones, None if there are more.

    Left out are answers that the task's reward calls wrong, that are cut off or missing, or that
    name none or several of the known answers.
    """
    answers = TeacherAnswers()
    for line in (line for file in files for line in read_lines(file)):
        rollout = decode_trajectory(line.data)
        text = final_answer([dict(message) for message in rollout.messages]).strip()
        answer = text if known is None else named_answer(text, known)
        if rollout.success is False:
            answers.left_out[_WRONG] += 1
        elif rollout.truncated or rollout.error is not None or not text:
            answers.left_out[_CUT] += 1
        elif answer is None:
            answers.left_out[_UNKNOWN] += 1
        else:
            prompt = "\n".join(user_texts(map(dict, rollout.messages)))
            answers.usable.append(TeacherAnswer(bytes(line.data), rollout, prompt, answer))
    return answers


def settle(
    doubtful: Iterable[TeacherAnswer],
    again: Iterable[TeacherAnswer],
    likely: Callable[[TeacherAnswer], str],
) -> dict[str, TeacherAnswer | None]:
    """Returns what becomes of each doubtful answer, by its rollout's id: the answer to train.

    That is one from when the teacher was asked again, if at least as many of its answers to the
    prompt are what similar texts suggest (`likely`) as are anything else. Otherwise it is None, and
    nothing is trained: either similar texts or the teacher mislead.
    """
    by_text: dict[str, list[TeacherAnswer]] = {}
    for other in again:
        by_text.setdefault(other.text, []).append(other)
    settled: dict[str, TeacherAnswer | None] = {}
    for answer in doubtful:
        others = by_text.get(answer.text, [])
        votes = Counter(one.answer for one in (answer, *others))
        suggested = likely(answer)
        is_settled = votes[suggested] == max(votes.values())
        found = (one for one in others if is_settled and one.answer == suggested)
        settled[answer.rollout.id] = next(found, None)
    return settled
