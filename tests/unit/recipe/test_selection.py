import json
from pathlib import Path
from typing import Any

from fakes.rollout_rows import assistant, rollout_row, user
from stillroom.curate.filter.contamination import ContaminationIndex
from stillroom.recipe.answers import AnswerForm, LabelAnswers, ObjectAnswers
from stillroom.recipe.selection import OVERLAPPING, TeacherAnswer, read_answers, settle

LABELS = LabelAnswers(("a", "b", "c"))
NO_TEXTS = ContaminationIndex.of_texts({})
TEXTS = ("insists", "changes", "ties", "says more", "is not asked")


def answered(text: str, *answers: str, start: int = 0, **fields: Any) -> list[dict[str, Any]]:
    return [
        rollout_row(task_id=text, sample=number, messages=[user(text), assistant(answer)], **fields)
        for number, answer in enumerate(answers, start)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, rows: list[dict[str, Any]], form: AnswerForm = LABELS) -> list[TeacherAnswer]:
    return read_answers([written(path, rows)], form, task_ids=TEXTS, evaluation=NO_TEXTS).usable


def test_unusable_answers_are_left_out_with_a_reason(tmp_path: Path) -> None:
    rows = [
        *answered("right", "It is **a**."),
        *answered("judged wrong", "a", success=False, reward=0.0),
        *answered("cut off", "a", truncated=True, success=None),
        *answered("silent", " ", success=None),
        *answered("undecided", "a or b", success=None),
        *answered("low reward", "a", success=None, reward=0.0),
        *answered("of no prompt", "a"),
    ]

    path, tasks = written(tmp_path / "rows.jsonl", rows), {row["task_id"] for row in rows[:-1]}

    answers = read_answers([path], LabelAnswers(("a", "b")), task_ids=tasks, evaluation=NO_TEXTS)

    assert [(one.task_id, one.answer) for one in answers.usable] == [("right", "a")]
    assert json.loads(answers.usable[0].line) == rows[0]
    assert answers.left_out == {
        "the reward says it is wrong": 2,
        "cut off or missing": 2,
        "no label, line or JSON object of the form of the right answers": 1,
    }


def test_any_answer_counts_where_the_possible_ones_are_not_known(tmp_path: Path) -> None:
    rows = answered("why", "Because it rained.\nAnd then?")

    path = written(tmp_path / "rows.jsonl", rows)

    [answer] = read_answers([path], None, task_ids={"why"}, evaluation=NO_TEXTS).usable

    assert answer.answer == "Because it rained.\nAnd then?"


def test_a_doubtful_answer_is_replaced_if_the_teacher_says_what_similar_texts_suggest(
    tmp_path: Path,
) -> None:
    doubtful = read(
        tmp_path / "first.jsonl", [row for text in TEXTS for row in answered(text, "a")]
    )
    again = read(
        tmp_path / "again.jsonl",
        [
            *answered("insists", "a", "b", start=1),
            *answered("changes", "b", "b", start=1),
            *answered("ties", "b", start=1),
            *answered("says more", "c", start=1),
        ],
    )

    likely = {one.rollout.id: "b" for one in doubtful}
    settled = settle(doubtful, again, likely, LABELS)

    chosen = {one.task_id: settled[one.rollout.id] for one in doubtful}
    assert {text: one and (one.answer, one.rollout.sample) for text, one in chosen.items()} == {
        "insists": None,
        "changes": ("b", 1),
        "ties": ("b", 1),
        "says more": None,
        "is not asked": None,
    }


def test_of_doubtful_objects_only_values_from_small_sets_are_compared(tmp_path: Path) -> None:
    form = ObjectAnswers(("kind", "note"), {"kind": ('"a"', '"b"')})

    def objects(*pairs: tuple[str, str], start: int = 0) -> list[dict[str, Any]]:
        texts = [json.dumps({"kind": kind, "note": note}) for kind, note in pairs]
        return answered("changes", *texts, start=start)

    doubtful = read(tmp_path / "first.jsonl", objects(("a", "at once")), form)
    again = read(tmp_path / "again.jsonl", objects(("b", "soon"), ("b", "now"), start=1), form)
    [answer] = doubtful

    settled = settle(doubtful, again, {answer.rollout.id: '{"kind": "b", "note": "at once"}'}, form)

    chosen = settled[answer.rollout.id]
    assert chosen is not None
    assert json.loads(chosen.answer) == {"kind": "b", "note": "soon"}


def test_rows_with_a_text_to_evaluate_on_are_left_out(tmp_path: Path) -> None:
    held_out = "Where is the parcel that I sent to my aunt?"
    rows = [
        *answered("asks it", f"Hello. {held_out}"),
        *answered("answers with it", f"You wrote: {held_out.upper()}"),
        *answered("refund", "refund"),
    ]
    rows[0]["messages"].insert(0, user(f"Hi! {held_out} Thanks."))
    path, tasks = written(tmp_path / "rows.jsonl", rows), [row["task_id"] for row in rows]
    texts = ContaminationIndex.of_texts({"1": held_out, "2": "Refund"})

    free = read_answers([path], None, task_ids=tasks, evaluation=texts)
    labels = LabelAnswers(("refund", "wrote"))
    rows[-1]["messages"][0] = user("I want my money back.")
    written(path, rows)
    labelled = read_answers([path], labels, task_ids=tasks, evaluation=texts)

    assert (free.usable, free.left_out) == ([], {OVERLAPPING: 3})
    # A label is the answer to many texts, whichever is evaluated.
    assert [one.task_id for one in labelled.usable] == ["answers with it", "refund"]


def test_answers_are_in_the_order_of_the_prompts_whichever_ended_first(tmp_path: Path) -> None:
    rows = [*answered("b", "1", "2"), *answered("a", "3")]
    path = written(tmp_path / "rows.jsonl", rows[::-1])

    answers = read_answers([path], None, task_ids=["a", "b"], evaluation=NO_TEXTS).usable

    assert [one.answer for one in answers] == ["3", "1", "2"]
