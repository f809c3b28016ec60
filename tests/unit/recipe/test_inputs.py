import json
from pathlib import Path

import pytest

from fakes.rollout_rows import assistant, user
from stillroom.errors import DataError
from stillroom.recipe.inputs import read_prompts


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_gives_prompts_with_the_system_message_and_other_columns_as_metadata(
    tmp_path: Path,
) -> None:
    table = written(tmp_path / "in.csv", 'id,text,label\n1,"Where is it, please?",delivery\n')

    [example] = read_prompts(table, system="Sort it.", is_labelled=True).prompts

    assert example.row == {
        "messages": [
            {"role": "system", "content": "Sort it."},
            {"role": "user", "content": "Where is it, please?"},
        ],
        "metadata": {"id": "1", "expected_answer": "delivery"},
    }
    assert (example.text, example.answer) == ("Where is it, please?", "delivery")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("in.csv", "body,queue\nWhere is my parcel?,delivery\n"),
        ("in.tsv", "queue\tticket words\ndelivery\tWhere is my parcel?\n"),
        ("in.jsonl", '{"ticket": "Where is my parcel?", "queue": "delivery"}\n'),
    ],
)
def test_the_columns_of_texts_and_answers_are_found(tmp_path: Path, name: str, text: str) -> None:
    [example] = read_prompts(written(tmp_path / name, text), system=None, is_labelled=True).prompts

    assert (example.text, example.answer) == ("Where is my parcel?", "delivery")


def test_an_unclear_column_of_answers_is_asked_for(tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", "text,queue,team\nWhere is it?,delivery,north\n")

    with pytest.raises(DataError, match="which column has the labels: queue, team") as error:
        read_prompts(table, system=None, is_labelled=True)
    assert "'label'" in error.value.fix


def test_prompts_keep_their_fields_and_equal_texts_count_once(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?", "tools": ["sum"], "metadata": {"expected_answer": "4"}},
        {"prompt": "2 + 2?", "metadata": {"expected_answer": "4"}},
        {"messages": [{"role": "system", "content": "Old."}, {"role": "user", "content": "Hi"}]},
    ]
    path = written(tmp_path / "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    first, second = read_prompts(path, system="New.").prompts

    assert first.row["tools"] == ["sum"]
    assert first.answer == "4"
    assert [message["content"] for message in second.row["messages"]] == ["New.", "Hi"]
    assert read_prompts(path, system=None).prompts[1].row["messages"][0]["content"] == "Old."


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path / "in.txt", "One?\nTwo?\n")

    assert [example.text for example in read_prompts(path, system=None).prompts] == ["One?", "Two?"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("in.csv", "text\n", "no rows that can be read"),
        ("in.csv", "text\n \n", "has no prompts"),
        (
            "in.jsonl",
            f"{json.dumps({'messages': [user('a'), assistant('b')]})}\n",
            "conversations with answers, not prompts",
        ),
    ],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read_prompts(written(tmp_path / name, text), system=None)


def test_most_labelled_prompts_need_an_answer(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", '{"prompt": "Where is it?"}\n')

    with pytest.raises(DataError, match="1 prompts without an answer, such as 'Where is it"):
        read_prompts(path, system=None, is_labelled=True)


def test_texts_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", "Mensaje;Categoría \nA;x\nB;\nC;y\n")

    read = read_prompts(table, system=None, is_labelled=True)

    assert [(one.text, one.answer) for one in read.prompts] == [("A", "x"), ("C", "y")]
    assert read.notes == [
        "in.csv: the labels are from column 'Categoría'",
        "in.csv: 1 texts without a label: left out",
    ]


def test_a_label_of_spaces_is_none(tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", "text,label\nA,x\nB, \nC,X\n")
    row = {"prompt": "D", "metadata": {"expected_answer": " "}}
    prompts = written(tmp_path / "in.jsonl", json.dumps(row) + "\n")

    read = read_prompts(table, system=None, is_labelled=True)
    [prompt] = read_prompts(prompts, system=None).prompts

    assert [one.answer for one in read.prompts] == ["x", "X"]
    assert read.notes == ["in.csv: 1 texts without a label: left out"]
    assert not prompt.is_answered
    assert prompt.answer is None


@pytest.mark.parametrize(
    ("others", "is_found"),
    [
        ({"nr": "T-{n}", "Datum": "0{n}.02.2026"}, True),
        ({"priority": "low"}, False),
        ({"reply": "answer {n} to the text"}, False),
    ],
)
def test_a_label_column_of_any_name_is_found_if_no_other_has_words(
    tmp_path: Path, others: dict[str, str], *, is_found: bool
) -> None:
    rows = [
        {"Nachricht": f"the text of message number {n}", "Abteilung": f"ward {n % 2}"}
        | {name: form.format(n=n) for name, form in others.items()}
        for n in range(8)
    ]
    table = written(tmp_path / "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    if is_found:
        read = read_prompts(table, system=None, is_labelled=True)
        assert read.notes == ["in.jsonl: the labels are from column 'Abteilung'"]
        assert {one.answer for one in read.prompts} == {"ward 0", "ward 1"}
    else:
        with pytest.raises(DataError, match="cannot tell which column has the labels"):
            read_prompts(table, system=None, is_labelled=True)


def test_a_column_that_is_no_label_is_not_taken_for_one(tmp_path: Path) -> None:
    rows = "".join(f"text number {n},{n}\n" for n in range(40))
    table = written(tmp_path / "in.csv", f"text,ticket\n{rows}")

    with pytest.raises(DataError, match="cannot tell which column has the labels: ticket"):
        read_prompts(table, system=None, is_labelled=True)


@pytest.mark.parametrize(("given", "answer"), [(7, "7"), (0.5, "0.5"), (["a", "b"], None)])
def test_answers_that_are_no_texts_count_as_given(
    tmp_path: Path, given: object, answer: str | None
) -> None:
    row = {"prompt": "How many?", "metadata": {"expected_answer": given}}
    path = written(tmp_path / "in.jsonl", json.dumps(row) + "\n")

    [prompt] = read_prompts(path, system=None, is_labelled=True).prompts

    assert prompt.is_answered
    assert prompt.answer == answer
    assert not prompt.without_answer().is_answered


def test_prompts_with_the_same_question_about_other_documents_are_different(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "Summarise.", "system": f"Document {n}"} for n in range(3)]
    path = written(tmp_path / "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    prompts = read_prompts(path, system=None).prompts

    assert len({prompt.task_id for prompt in prompts}) == 3


def test_texts_with_several_labels_are_left_out_and_counted(tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", "text,label\nA,1\nB,1\nA,2\n")

    read = read_prompts(table, system=None, is_labelled=True)

    assert [prompt.text for prompt in read.prompts] == ["B"]
    assert read.notes == ["in.csv: 1 texts have several labels: left out"]


def test_an_equal_text_without_an_answer_does_not_contradict_one_with_an_answer(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "A"}, {"prompt": "A", "metadata": {"expected_answer": "x"}}, {"prompt": "A"}]
    path = written(tmp_path / "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    read = read_prompts(path, system=None)

    assert [(prompt.text, prompt.answer) for prompt in read.prompts] == [("A", "x")]
    assert read.notes == []


def test_the_first_of_equal_texts_without_an_answer_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "in.csv", "text,id\nhello,1\nhello,2\nbye,3\n")

    read = read_prompts(path, system=None)

    assert [prompt.row["metadata"]["id"] for prompt in read.prompts] == ["1", "3"]


def test_texts_with_several_objects_as_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    answers = {"A": [{"k": 1, "l": 2}, {"k": 2, "l": 2}], "B": [{"k": 1, "l": 2}, {"l": 2, "k": 1}]}
    rows = [
        {"prompt": text, "metadata": {"expected_answer": answer}}
        for text, both in answers.items()
        for answer in both
    ]
    path = written(tmp_path / "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    read = read_prompts(path, system=None, is_labelled=True)

    assert [prompt.text for prompt in read.prompts] == ["B"]
    assert read.notes == ["in.jsonl: 1 texts have several labels: left out"]


def test_a_category_of_texts_without_labels_is_no_answer(tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", "text,category\nIt broke.,lamps\n")

    [prompt] = read_prompts(table, system=None).prompts

    assert not prompt.is_answered
    assert prompt.row["metadata"] == {"category": "lamps"}


@pytest.mark.parametrize(("num_bad", "is_refused"), [(1, False), (4, True)])
def test_rows_that_cannot_be_read_are_counted_and_many_are_refused(
    tmp_path: Path, num_bad: int, is_refused: bool
) -> None:
    path = tmp_path / "in.csv"
    bad = [f"Caf\xe9 {n}\n".encode("latin-1") for n in range(num_bad)]
    path.write_bytes(b"".join([b"text\n", *(b"Cafe %d\n" % n for n in range(30)), *bad]))

    if is_refused:
        with pytest.raises(DataError, match="4 of 34 rows cannot be read, the first at line 32"):
            read_prompts(path, system=None)
    else:
        read = read_prompts(path, system=None)
        assert len(read.prompts) == 30
        assert read.notes == ["in.csv: 1 rows cannot be read and are left out"]
