"""The stages of a recipe that ask the teacher, check its answers, and make training rows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from stillroom.api.recipe.rewording import Rewordings, can_reword, reworded_by_teacher
from stillroom.api.recipe.session import RecipeSession, ask_teacher
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.errors import RunError
from stillroom.lines import read_lines
from stillroom.recipe.answers import AnswerForm
from stillroom.recipe.files import is_up_to_date
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.label_check import doubtful_labels
from stillroom.recipe.request import AnswerCounts
from stillroom.recipe.selection import OVERLAPPING, UNSETTLED, TeacherAnswer, read_answers, settle
from stillroom.recipe.splits import PromptSplit

ASK, ASK_REST, AGAIN, AGAIN_REST, SELECT, SELECT_REST, REWORD_MORE = (
    "ask teacher",
    "ask rest",
    "ask again",
    "check rest",
    "select answers",
    "select rest",
    "reword training",
)
DOUBTFUL = "doubtful"
"""The name of the file with the answers that contradict those to similar texts."""
NO_ANSWER = "no answer (a limit or an error)"
_NOT_IN_TEXT = "a copied value does not occur in the text"
_NUM_REASKED = 2
_MAX_DOUBTFUL_SHARE = 0.25
_MIN_ROWS = 20
_MAX_REWORDED, _REWORDING_SHARE = 1.0, 0.85
"""The maximum number of rewordings, as a share of the rows, and their share of the money left."""


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """The rows to train on, and what became of the teacher's answers."""

    train_file: Path
    counts: AnswerCounts
    doubtful: Sequence[dict[str, Any]] = ()
    """A row for each answer that contradicts those to similar texts, with what replaced it."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.counts.trained + self.counts.reworded


class Teaching:
    """Asks the teacher in rounds; the rows of a round include those of the earlier ones.

    If the input has answers, they are used and the teacher is not asked.
    """

    def __init__(self, session: RecipeSession, parts: PromptSplit) -> None:
        self._session, self._evaluation = session, parts.evaluation
        self._num_overlapping = parts.num_overlapping
        self._prompts: dict[str, RecipePrompt] = {}
        """The prompts of all rounds so far, by the ids of their tasks."""
        self._rollout_files: list[Path] = []
        """The files with the teacher's rollouts of the current round."""
        self._usable_answers: list[TeacherAnswer] = []
        """The answers to train on, as of the last round."""

    def ask(
        self, number: int, prompts: Sequence[RecipePrompt], *, budget_share: float
    ) -> TaughtRows:
        """Asks the teacher, checks all its answers so far, and returns the rows to train on.

        Raises RunError if too many answers look wrong (gate `answers`), or too few are usable.
        """
        session = self._session
        ask_title, again_title = ((ASK, AGAIN), (ASK_REST, AGAIN_REST))[number - 1]
        self._prompts |= {prompt.task_id: prompt for prompt in prompts}
        options: dict[str, object] = {"rewards": session.plan.rewards}
        if session.form is not None:
            options["temperature"] = 0
        all_prompts = list(self._prompts.values())
        logged = session.plan.logged_file
        self._rollout_files = (
            ask_teacher(
                session,
                ask_title,
                "teacher",
                all_prompts,
                budget_share=budget_share,
                are_gaps_caveats=False,
                **options,
            )
            if logged is None
            else [logged]
        )
        answers = read_answers(
            self._rollout_files,
            session.form,
            task_ids=self._prompts,
            evaluation=self._evaluation,
        )
        usable, left_out = answers.usable, Counter(answers.left_out)
        left_out[NO_ANSWER] += len(self._prompts) - len(usable) - left_out.total()
        left_out[OVERLAPPING] += self._num_overlapping
        doubtful, corrected, doubtful_rows = None, 0, list[dict[str, Any]]()
        if session.form is not None:
            grounded = [answer for answer in usable if self._is_grounded(session.form, answer)]
            left_out[_NOT_IN_TEXT] = len(usable) - len(grounded)
            usable = grounded
            suggestions = self._suggestions(usable, session.form)
            # With tools the right answer depends on what they return, not on the text alone.
            has_closed = any(session.form.closed_fields(answer.answer) for answer in usable)
            doubtful = len(suggestions) if has_closed and not session.has_tools else None
            self._check_doubtful_share(usable, suggestions)
            settled = self._settle(again_title, usable, suggestions, session.form)
            doubtful_rows = list(self._doubtful_rows(usable, suggestions, settled))
            checked = [settled.get(answer.rollout.id, answer) for answer in usable]
            corrected = sum(
                new is not None and new.answer != old.answer
                for old, new in zip(usable, checked, strict=True)
            )
            left_out[UNSETTLED] += checked.count(None)
            usable = [answer for answer in checked if answer is not None]
        self._check_enough_rows(len(usable), left_out)
        counts = AnswerCounts(
            prompts=len(self._prompts) + self._num_overlapping,
            trained=len(usable),
            left_out={reason: count for reason, count in left_out.items() if count},
            doubtful=doubtful,
            are_labels=session.answer_field is not None,
            corrected=corrected,
        )
        self._usable_answers = usable
        return TaughtRows(self._write_rows(number, usable, counts.left_out), counts, doubtful_rows)

    def with_rewordings(self, taught: TaughtRows) -> TaughtRows:
        """Returns the rows with additional ones, whose texts the teacher has reworded.

        The rewordings cost a share of the remaining budget. Rows are only added if the answers have
        a form and no tools are used: otherwise the right answer may depend on the wording.
        """
        session = self._session
        prompts = [self._prompts[answer.task_id] for answer in self._usable_answers]
        if session.form is None or session.has_tools or not can_reword(session, prompts):
            return taught
        num = round(_MAX_REWORDED * len(prompts))
        chosen = Random(session.request.seed).sample(prompts, num)
        reworded = reworded_by_teacher(
            session, REWORD_MORE, "rewordings", chosen, budget_share=_REWORDING_SHARE
        )
        rows = [
            _reworded_row(reworded, answer, session)
            for answer in self._usable_answers
            if answer.task_id in reworded.prompts
            and session.form.is_grounded(answer.answer, reworded.prompts[answer.task_id].text)
            and not self._evaluation.find([reworded.prompts[answer.task_id].text], near=False)
        ]
        train_file = session.files.write_extended(
            "sft-reworded", taught.train_file, rows, session.request, reworded.files
        )
        counts = msgspec.structs.replace(taught.counts, reworded=len(rows))
        return replace(taught, train_file=train_file, counts=counts)

    def _is_grounded(self, form: AnswerForm, answer: TeacherAnswer) -> bool:
        return form.is_grounded(answer.answer, self._prompts[answer.task_id].text)

    def _suggestions(self, answers: Sequence[TeacherAnswer], form: AnswerForm) -> dict[str, str]:
        """Returns the answer that similar texts suggest for each doubtful one, by rollout id."""
        texts = [self._prompts[answer.task_id].text for answer in answers]
        compared = [] if self._session.has_tools else answers
        values = [form.closed_fields(answer.answer) for answer in compared]
        suggested: dict[int, str] = {}
        for name in values[0] if values else ():
            labels = [fields[name] for fields in values]
            for doubt in doubtful_labels(texts, labels, seed=self._session.request.seed):
                before = suggested.get(doubt.index, answers[doubt.index].answer)
                suggested[doubt.index] = form.with_closed_field(before, name, doubt.likely)
        return {answers[index].rollout.id: likely for index, likely in suggested.items()}

    def _doubtful_rows(
        self,
        answers: Sequence[TeacherAnswer],
        suggestions: Mapping[str, str],
        settled: Mapping[str, TeacherAnswer | None],
    ) -> Iterator[dict[str, Any]]:
        """Yields a row for each doubtful answer, with the suggested one and the one trained on."""
        for answer in answers:
            if answer.rollout.id in suggestions:
                new = settled.get(answer.rollout.id)
                prompt = self._prompts[answer.task_id]
                yield {
                    "messages": [
                        {"role": "user", "content": prompt.text},
                        {"role": "assistant", "content": answer.answer},
                    ],
                    "likely": suggestions[answer.rollout.id],
                    "trained": None if new is None else new.answer,
                    "metadata": prompt.row.get("metadata") or {},
                }

    def _check_doubtful_share(
        self, answers: Sequence[TeacherAnswer], suggestions: Mapping[str, str]
    ) -> None:
        if len(suggestions) > _MAX_DOUBTFUL_SHARE * len(answers):
            self._session.files.write_rows(DOUBTFUL, self._doubtful_rows(answers, suggestions, {}))
            self._session.stop_at(
                "answers",
                f"{len(suggestions)} of {len(answers)} answers contradict those to "
                "similar texts: either many are wrong, or similar texts need different answers",
            )

    def _check_enough_rows(self, num_usable: int, left_out: Counter[str]) -> None:
        if num_usable >= _MIN_ROWS:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.items() if count)
        file = self._session.workspace.shown(self._rollout_files[0])
        raise RunError(
            f"only {num_usable} answers can be trained on ({reasons}), and {_MIN_ROWS} are needed",
            f"look at the answers: inspect_examples(path={file}); then give more texts or, if a "
            "teacher answers, a clearer system message (system) or a larger budget_usd",
        )

    def _settle(
        self,
        title: str,
        answers: Sequence[TeacherAnswer],
        suggestions: Mapping[str, str],
        form: AnswerForm,
    ) -> dict[str, TeacherAnswer | None]:
        """Asks again about doubtful answers; returns what to train on, or None, by rollout id."""
        session = self._session
        doubtful = [answer for answer in answers if answer.rollout.id in suggestions]
        if not doubtful:
            return {}
        if session.plan.teacher_location is None:
            return dict.fromkeys(suggestions)
        files = ask_teacher(
            session,
            title,
            "again",
            [self._prompts[answer.task_id] for answer in doubtful],
            budget_share=0.5,
            temperature=0.7,
            samples_per_prompt=_NUM_REASKED,
        )
        task_ids = [answer.task_id for answer in doubtful]
        new_answers = read_answers(files, form, task_ids=task_ids, evaluation=self._evaluation)
        self._rollout_files = [*self._rollout_files, *files]
        usable = [answer for answer in new_answers.usable if self._is_grounded(form, answer)]
        return settle(doubtful, usable, suggestions, form)

    def _write_rows(
        self, number: int, usable: Sequence[TeacherAnswer], left_out: Mapping[str, int]
    ) -> Path:
        """Writes the chosen rollouts and converts them; returns the file with the training rows."""
        session = self._session
        lines = [answer.line for answer in usable]
        chosen = session.files.write_recorded(
            f"chosen-{number}", lines, session.request, self._rollout_files, left_out
        )
        rewrite = None
        if session.form is not None:
            rewrite = session.workspace.shown(session.files.write_answers_tool(session.form))
        request = ConvertRollouts(
            input=session.workspace.shown(chosen),
            output=session.shown_path(f"sft-{number}.jsonl"),
            rewrite=rewrite,
            system=session.student_system,
        )
        path = session.files.folder / f"sft-{number}.jsonl"
        if not is_up_to_date(path, request):
            title = (SELECT, SELECT_REST)[number - 1]
            session.stages.call(title, "convert_rollouts", request, ConvertResult)
        num_rows = sum(1 for _ in read_lines(path))
        if num_rows != len(usable):
            raise RunError(
                f"only {num_rows} of {len(usable)} chosen answers were converted to rows of {path}",
                f"convert_rollouts(input={session.workspace.shown(chosen)}, output=…) says which "
                "were left out, and why",
            )
        return path


def _reworded_row(
    reworded: Rewordings, answer: TeacherAnswer, session: RecipeSession
) -> dict[str, Any]:
    """Returns a training row: a reworded prompt with the answer to the original one."""
    messages = reworded.prompts[answer.task_id].row["messages"]
    if session.student_system is not None:
        messages = [message for message in messages if message["role"] != "system"]
    return {
        "messages": [*messages, {"role": "assistant", "content": answer.answer}],
        "tools": [],
        "metadata": {
            "reworded_from": answer.rollout.id,
            "reworded_by": reworded.rollout_ids[answer.task_id],
        },
    }
