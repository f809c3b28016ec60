"""The stages of a recipe that ask the teacher, check its answers, and make training rows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from stillroom.api.recipe.rewording import can_reword, in_words, reworded_by_teacher
from stillroom.api.recipe.session import RecipeSession, ask_teacher
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.errors import RunError
from stillroom.lines import read_lines
from stillroom.recipe.files import is_up_to_date
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.label_check import doubtful_labels
from stillroom.recipe.request import AnswerCounts
from stillroom.recipe.selection import UNSETTLED, TeacherAnswer, read_answers, settle

ASK, ASK_REST, AGAIN, AGAIN_REST, REWORD_MORE = (
    "ask teacher",
    "ask more",
    "ask again",
    "ask again (2)",
    "reword more",
)
_TIMES_AGAIN = 2
_MAX_DOUBT = 0.25
_MIN_ROWS = 20
_MAX_REWORDED, _REWORDING_SHARE = 0.5, 0.8
"""The most rewordings, as a share of the rows, and their share of the dollars that are left."""


@dataclass(frozen=True, slots=True)
class Taught:
    """The rows to train on, and what became of the teacher's answers."""

    train_file: Path
    counts: AnswerCounts

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.counts.trained + self.counts.reworded


class Teaching:
    """Asks the teacher in rounds; the rows of a round include those of the earlier ones."""

    def __init__(self, session: RecipeSession) -> None:
        self._session = session
        self._asked: dict[str, RecipePrompt] = {}
        """The prompts that the teacher was given, by their text."""
        self._files: list[Path] = []
        self._again: list[Path] = []
        self._kept: list[TeacherAnswer] = []
        """The answers of the last round that are trained."""

    def ask(self, number: int, examples: Sequence[RecipePrompt], *, budget_share: float) -> Taught:
        """Asks the teacher, checks all its answers so far, and returns the rows to train on.

        Raises RunError if too many answers look wrong (gate `labels`), or too few are usable.
        """
        session = self._session
        ask, again = ((ASK, AGAIN), (ASK_REST, AGAIN_REST))[number - 1]
        self._asked |= {one.text: one for one in examples}
        prompts = session.files.prompts(f"prompts-{number}", examples)
        is_closed = session.known is not None
        options: dict[str, object] = {"rewards": session.plan.rewards}
        if is_closed:
            options["temperature"] = 0
        output = ask_teacher(
            session, ask, prompts, f"teacher-{number}", budget_share=budget_share, **options
        )
        self._files.append(output)
        answers = read_answers(self._files, session.known)
        kept, left_out = answers.usable, Counter(answers.left_out)
        doubtful, corrected = None, 0
        if is_closed:
            doubts = self._doubts(kept)
            doubtful = len(doubts)
            self._check_share(doubtful, len(kept))
            settled = self._settle(again, number, kept, doubts)
            checked = [settled.get(one.rollout.id, one) for one in kept]
            corrected = sum(
                new is not None and new.answer != old.answer
                for old, new in zip(kept, checked, strict=True)
            )
            left_out[UNSETTLED] += checked.count(None)
            kept = [one for one in checked if one is not None]
        left_out["not asked or no reply: a limit or an error"] += len(self._asked) - (
            len(answers.usable) + sum(answers.left_out.values())
        )
        if len(kept) < _MIN_ROWS:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.items() if count)
            raise RunError(
                f"only {len(kept)} answers of the teacher can be trained ({reasons})",
                f"look at them with inspect_examples(path={session.workspace.shown(output)}); a "
                "clearer system message, more prompts or a larger budget_usd may help",
            )
        counts = AnswerCounts(
            prompts=len(self._asked),
            trained=len(kept),
            left_out={reason: count for reason, count in left_out.items() if count},
            doubtful=doubtful,
            corrected=corrected,
        )
        self._kept = kept
        return Taught(self._rows(number, kept), counts)

    def with_rewordings(self, taught: Taught) -> Taught:
        """Returns the rows with more of them, whose texts the teacher has put in other words.

        A share of the dollars that are left pays for it. Only answers from a small set stay right
        whatever the words are.
        """
        session = self._session
        examples = [self._asked[one.text] for one in self._kept]
        if session.known is None or not can_reword(session, examples):
            return taught
        num = round(_MAX_REWORDED * len(examples))
        chosen = Random(session.request.seed).sample(examples, num)
        said = reworded_by_teacher(
            session, REWORD_MORE, "rewordings", chosen, budget_share=_REWORDING_SHARE
        )
        answers = {one.text: one.answer for one in self._kept}
        rows = [
            _reworded_row(example, said[example.text], answers[example.text], session)
            for example in chosen
            if example.text in said
        ]
        rollouts = session.files.folder / "rewordings.jsonl"
        train_file = session.files.rows(
            "sft-reworded", taught.train_file, rows, session.request, [rollouts]
        )
        counts = msgspec.structs.replace(taught.counts, reworded=len(rows))
        return Taught(train_file, counts)

    def _doubts(self, answers: Sequence[TeacherAnswer]) -> dict[str, str]:
        """Returns what similar texts suggest in place of each doubtful answer, by rollout id."""
        found = doubtful_labels(
            [one.text for one in answers],
            [one.answer for one in answers],
            seed=self._session.request.seed,
        )
        return {answers[doubt.index].rollout.id: doubt.likely for doubt in found}

    def _check_share(self, num_doubtful: int, num_answers: int) -> None:
        if num_doubtful > _MAX_DOUBT * num_answers:
            self._session.stop_at(
                "labels",
                f"{num_doubtful} of the teacher's {num_answers} answers contradict those to "
                "similar texts: either many are wrong, or similar texts need different answers",
            )

    def _settle(
        self, title: str, number: int, answers: Sequence[TeacherAnswer], doubts: dict[str, str]
    ) -> dict[str, TeacherAnswer | None]:
        """Asks the teacher again about doubtful answers; returns what becomes of each."""
        session = self._session
        doubtful = [one for one in answers if one.rollout.id in doubts]
        before = read_answers(self._again, session.known).usable
        known_again = {one.text for one in before}
        new = [self._asked[one.text] for one in doubtful if one.text not in known_again]
        if new:
            prompts = session.files.prompts(f"doubtful-{number}", new)
            output = ask_teacher(
                session, title, prompts, f"again-{number}", budget_share=0.5,
                temperature=0.7, samples_per_prompt=_TIMES_AGAIN,
            )  # fmt: skip
            self._again.append(output)
        again = read_answers(self._again, session.known).usable
        return settle(doubtful, again, lambda one: doubts[one.rollout.id])

    def _rows(self, number: int, kept: Sequence[TeacherAnswer]) -> Path:
        """Writes the chosen rollouts and makes training rows of them; returns the rows' file."""
        session = self._session
        chosen = session.files.rollouts(
            f"chosen-{number}", kept, session.request, [*self._files, *self._again]
        )
        rewrite = None
        if session.known is not None:
            rewrite = session.workspace.shown(session.files.answers_tool(session.known))
        request = ConvertRollouts(
            input=session.workspace.shown(chosen),
            output=session.shown(f"sft-{number}.jsonl"),
            rewrite=rewrite,
            system=session.student_system,
        )
        path = session.files.folder / f"sft-{number}.jsonl"
        if not is_up_to_date(path, request):
            title = (ASK, ASK_REST)[number - 1]
            session.stages.do(title, "convert_rollouts", request, ConvertResult)
        num_rows = sum(1 for _ in read_lines(path))
        if num_rows != len(kept):
            raise RunError(
                f"of {len(kept)} chosen answers, {num_rows} became rows of {path}",
                "this is a bug in stillroom; convert_rollouts on that file says which are left out",
            )
        return path


def _reworded_row(
    example: RecipePrompt, text: str, answer: str, session: RecipeSession
) -> dict[str, Any]:
    """Returns a training row: a prompt in other words, with the answer to the original one."""
    messages = in_words(example, text).row["messages"]
    if session.student_system is not None:
        messages = [message for message in messages if message["role"] != "system"]
    return {
        "messages": [*messages, {"role": "assistant", "content": answer}],
        "tools": [],
        "metadata": {"reworded_from": example.text},
    }
